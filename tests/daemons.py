"""Real daemons for tests: each in its own process, with its socket in a folder of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sidecar import Client, SidegateError

START_SECONDS = 20.0
EPOCH = 1_700_000_000_000
"""Where manual clocks start, epoch ms."""


class DaemonProcess:
    """`sidegate serve` as a process; its log lines stand in `log`."""

    def __init__(self, folder: Path, *options: str, clock: str = f"manual:{EPOCH}") -> None:
        self.socket = str(folder / "sidegate.sock")
        self.log = folder / "log.jsonl"
        self.options = ("--socket", self.socket, "--clock", clock, "--node", "test-node", *options)
        self.start()

    def start(self) -> None:
        """Start (again) at the same socket and wait until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sidecar", "serve", *self.options], stderr=log, env=clean_environment()
            )
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                with self.client(timeout=1.0) as client:
                    client.ping()
                return
            except SidegateError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(f"the daemon did not start: {self.log.read_text()}") from None
                time.sleep(0.02)

    def client(self, **options: object) -> Client:
        """A client with a deadline that a busy test machine can keep, unless the test says otherwise."""
        return Client(self.socket, **{"timeout": 5.0, **options})  # type: ignore[arg-type]

    def stop(self, number: int = signal.SIGTERM, timeout: float = 10.0) -> int:
        """Send a signal and wait; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """End it whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without any SIDEGATE_ variable, so that only a test's own settings count."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SIDEGATE_")} | more
