"""Real daemons for tests: each in its own process, with its socket in a folder of the test's own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sidecar import Client, SidegateError

START_SECONDS = 20.0
EPOCH = 1_700_000_000_000
"""Where manual clocks start, epoch ms."""


class DaemonProcess:
    """`sidegate serve` as a process; its log lines stand in `log`, and what it prints in `output`."""

    def __init__(self, folder: Path, *options: str, clock: str = f"manual:{EPOCH}", socket: str = "") -> None:
        self.socket = socket or str(folder / "sidegate.sock")
        self.log = folder / "log.jsonl"
        self.output = folder / "output"
        # Doors that many daemons on one host would all open; a test that wants one names a place of its own.
        off = ("--listen", "off", "--http", "off")
        self.options = ("--socket", self.socket, "--clock", clock, "--node", "test-node", *off, *options)
        self.start()

    def start(self) -> None:
        """Start (again) at the same socket and wait until it answers."""
        words = [sys.executable, "-m", "sidecar", "serve", *self.options]
        with self.log.open("ab") as log, self.output.open("ab") as output:
            self.process = subprocess.Popen(words, stdout=output, stderr=log, env=clean_environment())
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

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The log's lines as data, all of them or those of one event; a line that is not JSON fails the test."""
        *whole, _unfinished = self.log.read_bytes().split(b"\n")
        lines = [json.loads(line) for line in whole]
        return [line for line in lines if name in (None, line["event"])]

    def memory(self) -> int:
        """Bytes of memory that the daemon holds at present."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found, "the daemon has no memory: it is gone"
        return int(found[1]) * 1024

    def connections(self) -> dict[str, int]:
        """The daemon's own count of connections, the one that asks included."""
        with self.client() as client:
            return dict(client.info()["connections"])

    def kill(self) -> None:
        """End it whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


@contextmanager
def running_daemon(*options: str, **more: str) -> Iterator[DaemonProcess]:
    """A daemon in a folder of its own, for fixtures that several tests share and for tools outside pytest."""
    folder = Path(tempfile.mkdtemp(prefix="sg-"))
    try:
        daemon = DaemonProcess(folder, *options, **more)
        try:
            yield daemon
        finally:
            daemon.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Wait until `condition()` is true; fails with `what` if it never is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain until {what}"
        time.sleep(0.01)


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without any SIDEGATE_ variable, so that only a test's own settings count."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SIDEGATE_")} | more
