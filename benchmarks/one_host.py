"""The figures of one host: the daemon beside an echo, the client beside a raw socket, a million buckets, the import.

Decides what is measured and how it is compared; each figure is a median of ratios within rounds that alternate, since
this kind of machine is shared and its speed drifts.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import load
from benchmarks.processes import daemon, echo, resident, together

CLIENTS = 8


class Figure(NamedTuple):
    """One measured value and what it should be: at least `target` if `at_least`, else at most."""

    name: str
    value: float
    target: float
    unit: str
    at_least: bool
    detail: str

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.value >= self.target if self.at_least else self.value <= self.target


def figures(rounds: int, seconds: float) -> Iterator[Figure]:
    """All figures, each as soon as it is measured."""
    folder = Path(tempfile.mkdtemp(prefix="sgb-"))
    yield from speed(folder, rounds, seconds)
    for algorithm, name in ((0, "token"), (1, "leaky")):
        yield from million(folder, algorithm, name)
    yield import_time(rounds)


def speed(folder: Path, rounds: int, seconds: float) -> Iterator[Figure]:
    """Round trips: owned decisions against the echo of the same bytes, frames of 100, the Client class."""
    ours, floor = str(folder / "daemon"), str(folder / "echo")
    runs: list[dict[str, load.Load]] = []
    eight: list[tuple[float, float]] = []
    with daemon(Path(ours)), echo(Path(floor)):
        for _ in range(rounds):
            at_once = [
                sum(one.rate for one in together(load.raw, [(path, seconds, 1, who) for who in range(CLIENTS)]))
                for path in (floor, ours)
            ]
            eight.append((at_once[0], at_once[1]))
            runs.append(
                {
                    "echo": together(load.raw, [(floor, seconds, 1, 0)])[0],
                    "one": together(load.raw, [(ours, seconds, 1, 0)])[0],
                    "hundred": together(load.raw, [(ours, seconds, 100, 0)])[0],
                    "client": together(load.client, [(ours, seconds, 0)])[0],
                }
            )

    def middle(name: str) -> load.Load:
        return sorted((run[name] for run in runs), key=lambda one: one.rate)[len(runs) // 2]

    yield Figure(
        "one-hit frames, 8 processes, of the echo's round trips",
        statistics.median(mine / theirs for theirs, mine in eight),
        0.80,
        "x",
        True,
        f"{statistics.median(mine for _, mine in eight):,.0f}/s, "
        f"echo {statistics.median(theirs for theirs, _ in eight):,.0f}/s",
    )
    one, echoed = middle("one"), middle("echo")
    yield Figure(
        "frames of 100, one process, decisions of one-hit frames",
        statistics.median(100 * run["hundred"].rate / run["one"].rate for run in runs),
        5.0,
        "x",
        True,
        f"{100 * middle('hundred').rate:,.0f}/s, one-hit {one.rate:,.0f}/s, p50 {one.p50:.0f} us, "
        f"echo p50 {echoed.p50:.0f} us",
    )
    asking = middle("client")
    yield Figure(
        "Client class, one process, of the raw generator's rate",
        statistics.median(run["client"].rate / run["one"].rate for run in runs),
        0.60,
        "x",
        True,
        f"{asking.rate:,.0f}/s, p50 {asking.p50:.0f} us",
    )


def million(folder: Path, algorithm: int, name: str) -> Iterator[Figure]:
    """A million live buckets: memory each, and the worst stall while filling, serving and sweeping."""
    path = folder / f"million-{name}"
    with daemon(path, "--max-buckets", str(2 * load.MILLION), module="benchmarks.timed_daemon") as process:

        def stall() -> tuple[float, float]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            wall, cpu = process.stdout.readline().split()
            return float(wall), float(cpu)

        time.sleep(0.5)
        empty = resident(process.pid)
        stall()
        filled, probed = together(load.fill_or_probe, [(str(path), algorithm, load.MILLION), (str(path), algorithm, 0)])
        filling = stall()
        each = (resident(process.pid) - empty) / load.MILLION
        yield Figure(
            f"memory of a {name} bucket, a million live",
            each,
            350,
            "bytes",
            False,
            f"filled in {filled:.0f} s, probed {probed:.0f} ms",
        )
        # Their windows end one after the other, as they were filled, and the sweep follows while requests go on.
        sweeping = together(load.probe_until_swept, [(str(path), algorithm)])[0]
        swept = stall()
        for what, found, worst in (("filling", filling, probed), ("sweeping", swept, sweeping)):
            yield Figure(
                f"worst stall while {what} a million {name} buckets, loop timer",
                found[0],
                10,
                "ms",
                False,
                f"of it the loop's own CPU time {found[1]:.1f} ms; a probe's worst round trip {worst:.1f} ms",
            )


def import_time(rounds: int) -> Figure:
    """Importing the client against importing msgpack, in fresh interpreters, alternating."""

    def seconds(module: str) -> float:
        code = f"import time; began = time.perf_counter(); import {module}; print(time.perf_counter() - began)"
        return float(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
            ).stdout
        )

    # As installed: with the byte code that pip writes, which a checkout may lack.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds("sidecar")
    pairs = [(seconds("msgpack"), seconds("sidecar")) for _ in range(rounds * 5)]
    return Figure(
        "import sidecar, of import msgpack",
        statistics.median(ours / theirs for theirs, ours in pairs),
        3.0,
        "x",
        False,
        f"{statistics.median(ours for _, ours in pairs) * 1000:.1f} ms, "
        f"msgpack {statistics.median(theirs for theirs, _ in pairs) * 1000:.1f} ms",
    )
