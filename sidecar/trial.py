"""A cluster on one machine, for trying and for tests: daemons as processes of their own, on free ports.

Decides names, ports and sockets, and that all end together.  Each daemon is an ordinary `sidegate serve`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

from sidecar.client import Client
from sidecar.errors import SidegateError

_START_SECONDS = 30.0


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on just now."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def run_cluster(nodes: int, folder: str | None) -> int:
    """Start `nodes` linked daemons, tell how to ask each, and run until SIGINT or SIGTERM; the exit status.

    A daemon that ends by itself ends them all, with status 1.
    """
    folder = folder or tempfile.mkdtemp(prefix="sidegate-cluster-")
    os.makedirs(folder, mode=0o750, exist_ok=True)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(nodes)]
    sockets = [os.path.join(folder, f"node-{number}.sock") for number in range(1, nodes + 1)]
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    processes = []
    for number, (path, address) in enumerate(zip(sockets, addresses, strict=True), 1):
        words = [sys.executable, "-m", "sidecar", "serve", "--socket", path, "--node", f"node-{number}"]
        words += ["--listen", address, "--peers", ",".join(addresses), "--http", "off"]
        # Ctrl-C goes to all processes of a terminal; these are ended from here, once each.
        processes.append(subprocess.Popen(words, start_new_session=True))  # noqa: S603  our own command
    try:
        end = time.monotonic() + _START_SECONDS
        while not all(_answers(path) for path in sockets):
            if stopped or time.monotonic() > end or any(process.poll() is not None for process in processes):
                return 0 if stopped else 1
            time.sleep(0.05)
        for path in sockets:
            print(f"sidegate hit requests_per_sec account:123 --limit 100 --per 1m --socket {path}", flush=True)
        while not stopped and all(process.poll() is None for process in processes):
            time.sleep(0.1)
        return 0 if stopped else 1
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()


def _answers(path: str) -> bool:
    try:
        with Client(path, timeout=1.0) as client:
            client.ping()
    except SidegateError:
        return False
    return True
