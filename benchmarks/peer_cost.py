"""What a linked peer costs for real: memory of a channel on both sides, files, threads, and CPU time of links at rest.

`python -m benchmarks.peer_cost` links this process to one other over so many addresses of loopback, with the real
PeerClient and PeerServer (an echo behind it; what is carried makes no difference to a link at rest), and prints JSON.
Small on purpose: the slope between two counts is told, so that what one process costs anyway is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import uvloop

import sidecar.cluster  # noqa: F401  sets gRPC up as a daemon does, before it is loaded
from cluster_link.membership import Peer
from cluster_link.peer_client import Codec, PeerClient, Settings
from cluster_link.peer_server import PeerServer

PAGE = os.sysconf("SC_PAGE_SIZE")
_LOOPBACK = "127.0.0.1"
_AT_REST = 3.0
"""Seconds that links are watched while nothing is asked."""

CODEC = Codec(
    many=1,
    pack=lambda batch_id, op, payload: bytes(msgpack.packb((batch_id, payload))),
    unpack=lambda data: (*msgpack.unpackb(data, use_list=False), "", "echo"),
    ping=lambda batch_id: bytes(msgpack.packb((batch_id, None))),
)


class _Once:
    """Waits for one answer."""

    waiting = True
    trace = None

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(self, answer: Any, node: str) -> None:
        self.answer.set_result(answer)

    def failed(self, why: str, sent: bool) -> None:
        self.answer.set_exception(RuntimeError(why))


def costs_of(pid: int) -> dict[str, float]:
    """Resident bytes, open files, threads and CPU seconds of a process, by Linux's /proc."""
    with open(f"/proc/{pid}/statm") as statm:
        resident = int(statm.read().split()[1]) * PAGE
    threads = os.listdir(f"/proc/{pid}/task")
    seconds = 0.0
    for thread in threads:
        # Nanoseconds; the clock ticks of /proc/PID/stat are too coarse for links at rest.
        with open(f"/proc/{pid}/task/{thread}/schedstat") as spent:
            seconds += int(spent.read().split()[0]) / 1e9
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return {"bytes": resident, "files": files, "threads": len(threads), "cpu": seconds}


def serve(count: int, pipe: Connection) -> None:
    """Listen on so many ports of loopback, tell them, and serve until the pipe says so."""
    uvloop.run(_serve(count, pipe))


async def _serve(count: int, pipe: Connection) -> None:
    ports: list[int] = []

    def listen(server: Any) -> None:
        # One address a link: gRPC shares a connection between channels to one address.
        ports.extend(server.add_insecure_port(f"{_LOOPBACK}:0") for _ in range(count - 1))

    server = PeerServer(lambda batch: batch, [listen])
    ports.append(await server.start(f"{_LOOPBACK}:0"))
    pipe.send(ports)
    await asyncio.to_thread(pipe.recv)
    await server.stop(0)


async def _link(ports: list[int], steps: list[int], served_by: int) -> list[dict[str, Any]]:
    settings = Settings(limit=1_000, wait=0, max_queue=20_000, timeout=0.5)
    clients: list[PeerClient] = []
    rows = []
    for step in [0, *steps]:
        while len(clients) < step:
            address = f"{_LOOPBACK}:{ports[len(clients)]}"
            client = PeerClient(Peer(address, address), [CODEC], settings, lambda event, **fields: None)
            waiter = _Once()
            client.ask(1, "hit", waiter)
            await waiter.answer
            clients.append(client)
        await asyncio.sleep(0.5)
        before = costs_of(os.getpid()), costs_of(served_by)
        started = time.monotonic()
        await asyncio.sleep(_AT_REST)
        took = time.monotonic() - started
        here, there = costs_of(os.getpid()), costs_of(served_by)
        for old, new in zip(before, (here, there), strict=True):
            new["cpu"] = (new["cpu"] - old["cpu"]) / took
        rows.append({"links": step, "asked": here, "owner": there, "load": os.getloadavg()[0]})
    await asyncio.gather(*(client.close() for client in clients))
    return rows


def measure(steps: list[int]) -> dict[str, Any]:
    """Rows for no links and for each count (ascending), and the slope of the last beside the first count."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(steps[-1], theirs))
    process.start()
    try:
        assert process.pid is not None
        rows = uvloop.run(_link(ours.recv(), steps, process.pid))
    finally:
        ours.send(None)
        process.join(10)
        if process.is_alive():
            process.kill()
    first, last = rows[1], rows[-1]
    more = last["links"] - first["links"]
    slope = {
        side: {what: (last[side][what] - first[side][what]) / more for what in last[side]}
        for side in ("asked", "owner")
    }
    return {"rows": rows, "a_link": slope}


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_cost", description=__doc__)
    parser.add_argument("--links", default="20,100,200", help="how many links, ascending (default 20,100,200)")
    steps = [int(text) for text in parser.parse_args().links.split(",")]
    if len(steps) < 2 or steps != sorted(set(steps)) or steps[0] < 1:
        parser.error("--links: at least two counts, ascending, of 1 or more")
    print(json.dumps(measure(steps), indent=1))


if __name__ == "__main__":
    main()
