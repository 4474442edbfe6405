"""Load generators: raw msgpack over a blocking socket, and the Client class.

Each runs for a time in a process of its own and answers with how many round trips it made and its median.
The raw one knows no class of Sidegate: it is what the protocol page alone lets one write.
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

LIMIT = 1_000_000
WINDOW = 3_600_000


class Load(NamedTuple):
    """Round trips made, in how many seconds, and the median round trip in microseconds."""

    trips: int
    seconds: float
    p50: float

    @property
    def rate(self) -> float:
        """Round trips a second."""
        return self.trips / self.seconds


def raw(start: Callable[[], object], path: str, seconds: float, hits: int, who: int) -> Load:
    """Frames of `hits` one-hit requests, one at a time, packed and unpacked anew each round trip."""
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(path)
    packer = msgpack.Packer()
    keys = [f"account:{who}:{number}" for number in range(max(hits, 100))]
    request_id = 0

    def once() -> None:
        nonlocal request_id
        request_id += 1
        requests = [
            ("requests_per_sec", keys[(request_id + number) % len(keys)], 1, LIMIT, WINDOW, 0, 0, 0, None)
            for number in range(hits)
        ]
        body = packer.pack((1, request_id, 1, requests, None))
        stream.sendall(struct.pack(">I", len(body)) + body)
        data = stream.recv(65536)
        (length,) = struct.unpack_from(">I", data)
        while len(data) < length + 4:
            data += stream.recv(65536)
        answer = msgpack.unpackb(data[4:], use_list=False)
        assert answer[1] == request_id

    return _timed(start, once, seconds)


def client(start: Callable[[], object], path: str, seconds: float, who: int) -> Load:
    """One `Client.hit` a round trip."""
    from sidecar import Client, Limit

    limit = Limit("requests_per_sec", LIMIT, per=WINDOW)
    keys = [f"account:{who}:{number}" for number in range(100)]
    asked = 0
    with Client(path, timeout=5) as asking:

        def once() -> None:
            nonlocal asked
            asked += 1
            asking.hit(limit, keys[asked % 100])

        return _timed(start, once, seconds)


def _timed(start: Callable[[], object], once: Callable[[], Any], seconds: float) -> Load:
    for _ in range(50):
        once()
    start()
    clock = time.perf_counter
    trips = []
    began = before = clock()
    end = began + seconds
    while before < end:
        once()
        now = clock()
        trips.append(now - before)
        before = now
    return Load(len(trips), before - began, statistics.median(trips) * 1e6)
