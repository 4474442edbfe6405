"""A daemon with a loop timer beside it: `python -m benchmarks.timed_daemon <options of sidegate serve>`.

Every millisecond a timer notes how late it ran, in wall time and in CPU time of this thread; each line on
standard input is answered with the worst of both since the line before, in ms.  CPU time is the loop's own
work, wall time includes what other processes took of the machine.
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from sidecar.cli import settings_of
from sidecar.daemon import Daemon
from sidecar.logs import make_logger

_PERIOD = 0.001


class LoopTimer:
    """The worst stall of the loop since it was last asked."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    async def run(self) -> None:
        """Note every period's lateness until cancelled."""
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_PERIOD)
            self.wall = max(self.wall, time.perf_counter() - wall - _PERIOD)
            self.cpu = max(self.cpu, time.thread_time() - cpu)

    def tell(self) -> None:
        """Answer one line, and begin anew."""
        if sys.stdin.readline():
            print(f"{self.wall * 1000:.3f} {self.cpu * 1000:.3f}", flush=True)
            self.wall = self.cpu = 0.0


async def _main() -> None:
    config = settings_of(sys.argv[1:])
    timer = LoopTimer()
    asyncio.get_running_loop().add_reader(sys.stdin, timer.tell)
    task = asyncio.create_task(timer.run())
    await Daemon(config, make_logger(config.log_level, config.log_format)).run()
    task.cancel()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main())
