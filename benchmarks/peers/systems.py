"""The servers: each started on loopback or a Unix socket with nothing else open, and ended by its process id.

Decides how each is set: as it comes, but for where it listens, room for the keys of the largest scene, and Redis
kept from writing to disk (the others do not either).  Knows nothing of what is asked.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import running
from sidecar.client import Client
from sidecar.trial import free_ports

BUCKETS = 2_000_000
"""Room in every system: Gubernator's own default is 50,000, ours 1,000,000, Redis's without bound."""
_OWN_NAME = ("unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname "$0" && exec "$1"')
"""Run a program under a host name of its own: followed by the name and the program, which keeps the process id."""
_QUIET = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


class Endpoint(NamedTuple):
    """Where workers ask: a Unix socket, or gRPC and HTTP addresses; and the servers' process ids."""

    socket: str = ""
    grpc: str = ""
    http: str = ""
    pids: tuple[int, ...] = ()


def gubernator() -> str | None:
    """The program that `make gubernator` builds, or the one that GUBERNATOR names; None if it is not there."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.environ.get("GUBERNATOR") or os.path.join(cache, "sidegate", "bin", "gubernator")
    return path if os.access(path, os.X_OK) else None


def missing(system: str, nodes: int = 1) -> str:
    """What to do about a system of so many nodes that cannot be started here; "" if it can."""
    if system == "gubernator" and gubernator() is None:
        return "Gubernator is not built: make gubernator (it needs Go), or name the program in GUBERNATOR"
    if system == "gubernator" and nodes > 1 and not _may_name():
        return (
            f"several Gubernators on one machine need a host name each, which is not allowed here: {_OWN_NAME[0]} fails"
        )
    if system == "redis" and shutil.which("redis-server") is None:
        return "there is no redis-server: apt-get install redis-server, or your system's like"
    return ""


def _may_name() -> bool:
    try:
        return subprocess.run([*_OWN_NAME, "node-0", "true"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def started(system: str, nodes: int, folder: Path) -> Iterator[Endpoint]:
    """`nodes` servers of a system, linked; the first is the one to ask.  "none" is no server at all."""
    with ExitStack() as stack:
        yield _START[system](stack, nodes, folder)


def _sidegate(stack: ExitStack, nodes: int, folder: Path) -> Endpoint:
    ports = free_ports(nodes)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    linked = ["--peers", ",".join(addresses)] if nodes > 1 else []
    pids = []
    for number, address in enumerate(addresses):
        path = folder / f"sidegate-{nodes}-{number}"
        command = [sys.executable, "-m", "sidecar", "serve", "--socket", str(path), "--node", f"node-{number}"]
        command += ["--log-level", "error", "--http", "off", "--max-buckets", str(BUCKETS)]
        command += ["--listen", address if nodes > 1 else "off", *linked]
        pids.append(stack.enter_context(running(command, path, **_QUIET)).pid)
    asked = str(folder / f"sidegate-{nodes}-0")
    with Client(asked, timeout=5) as client:
        client.ping()
    return Endpoint(socket=asked, pids=tuple(pids))


def _gubernator(stack: ExitStack, nodes: int, folder: Path) -> Endpoint:
    program = gubernator()
    if program is None:
        raise RuntimeError(missing("gubernator"))
    ports = free_ports(3 * nodes)
    # Its gossip tells members apart by host, so that each node has another of the loopback addresses.
    hosts = [f"127.0.0.{number}" for number in range(1, nodes + 1)]
    grpc, http, gossip = (
        [f"{host}:{port}" for host, port in zip(hosts, ports[kind::3], strict=True)] for kind in range(3)
    )
    pids = []
    for number in range(nodes):
        settings = {
            "GUBER_GRPC_ADDRESS": grpc[number],
            "GUBER_HTTP_ADDRESS": http[number],
            "GUBER_ADVERTISE_ADDRESS": grpc[number],
            "GUBER_INSTANCE_ID": f"node-{number}",
            "GUBER_CACHE_SIZE": str(BUCKETS),
            "GUBER_LOG_LEVEL": "error",
            "GUBER_PEER_DISCOVERY_TYPE": "member-list",
            "GUBER_MEMBERLIST_ADDRESS": gossip[number],
            "GUBER_MEMBERLIST_BIND_ADDRESS": gossip[number],
            "GUBER_MEMBERLIST_ADVERTISE_ADDRESS": grpc[number],
            "GUBER_MEMBERLIST_KNOWN_NODES": ",".join(gossip),
        }
        others = {name: value for name, value in os.environ.items() if not name.startswith(("GUBER_", "OTEL_"))}
        environment = {**others, **settings}
        listens = (hosts[number], int(grpc[number].rpartition(":")[2]))
        # And it names a member as its host is named, which no setting changes.
        command = [*_OWN_NAME, f"node-{number}", program] if nodes > 1 else [program]
        # Asked to end, it waits many seconds for its gossip; it has nothing to save.
        running_one = running(command, listens, signal.SIGKILL, env=environment, **_QUIET)
        pids.append(stack.enter_context(running_one).pid)
    for address in http:
        _await_peers(f"http://{address}/v1/HealthCheck", nodes)
    return Endpoint(grpc=grpc[0], http=http[0], pids=tuple(pids))


def _await_peers(url: str, nodes: int) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                health = json.load(answer)
            if health["status"] == "healthy" and health["peer_count"] == nodes:
                return
        except OSError:
            health = None
        if time.monotonic() > end:
            raise RuntimeError(f"{url} does not count {nodes} peers after 30 s: {health}")
        time.sleep(0.1)


def _redis(stack: ExitStack, nodes: int, folder: Path) -> Endpoint:
    path = folder / f"redis-{nodes}"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"]
    command += ["--save", "", "--appendonly", "no", "--dir", str(folder)]
    return Endpoint(socket=str(path), pids=(stack.enter_context(running(command, path, **_QUIET)).pid,))


def _echo(stack: ExitStack, nodes: int, folder: Path) -> Endpoint:
    path = folder / f"echo-{nodes}"
    process = stack.enter_context(running([sys.executable, "-m", "benchmarks.echo", str(path)], path, **_QUIET))
    return Endpoint(socket=str(path), pids=(process.pid,))


def _stream(stack: ExitStack, _nodes: int, _folder: Path) -> Endpoint:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "benchmarks.stream", "serve", str(port)]
    pid = stack.enter_context(running(command, ("127.0.0.1", port), **_QUIET)).pid
    return Endpoint(grpc=f"127.0.0.1:{port}", pids=(pid,))


def _none(_stack: ExitStack, _nodes: int, _folder: Path) -> Endpoint:
    return Endpoint()


_START = {
    "sidegate": _sidegate,
    "gubernator": _gubernator,
    "redis": _redis,
    "echo": _echo,
    "stream": _stream,
    "none": _none,
}
