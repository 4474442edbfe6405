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

NAME = "requests_per_sec"
LIMIT = 1_000_000
WINDOW = 3_600_000
MILLION = 1_000_000
SHORT_WINDOW = 25_000
"""Long enough to fill a million buckets before the first of them ends."""


class Load(NamedTuple):
    """Round trips made, in how many seconds, and the median round trip in microseconds."""

    trips: int
    seconds: float
    p50: float

    @property
    def rate(self) -> float:
        """Round trips a second."""
        return self.trips / self.seconds


class Asker:
    """A raw connection: one frame, one answer."""

    def __init__(self, path: str) -> None:
        self._stream = socket.socket(socket.AF_UNIX)
        self._stream.connect(path)
        self._pack = msgpack.Packer().pack
        self._request_id = 0

    def ask(self, op: int, payload: object) -> Any:
        """The answer's payload."""
        self._request_id += 1
        body = self._pack((1, self._request_id, op, payload, None))
        self._stream.sendall(struct.pack(">I", len(body)) + body)
        data = self._stream.recv(65536)
        (length,) = struct.unpack_from(">I", data)
        while len(data) < length + 4:
            data += self._stream.recv(65536)
        answer = msgpack.unpackb(data[4:], use_list=False)
        assert answer[1] == self._request_id
        return answer[3]


def raw(start: Callable[[], object], path: str, seconds: float, hits: int, who: int) -> Load:
    """Frames of `hits` one-hit requests, one at a time, packed and unpacked anew each round trip."""
    return asking(start, path, seconds, hits, [f"account:{who}:{number}" for number in range(max(hits, 100))])


def asking(start: Callable[[], object], path: str, seconds: float, hits: int, keys: list[str]) -> Load:
    """The same, of these keys in turn."""
    asker = Asker(path)
    asked = 0

    def once() -> None:
        nonlocal asked
        asked += 1
        asker.ask(
            1,
            [(NAME, keys[(asked + number) % len(keys)], 1, LIMIT, WINDOW, 0, 0, 0, None) for number in range(hits)],
        )

    return _timed(start, once, seconds)


def client(start: Callable[[], object], path: str, seconds: float, who: int) -> Load:
    """One `Client.hit` a round trip."""
    from sidecar import Client, Limit

    limit = Limit(NAME, LIMIT, per=WINDOW)
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


def fill_or_probe(start: Callable[[], object], path: str, algorithm: int, buckets: int) -> float:
    """Open `buckets` buckets, 100 a frame: the seconds it took.  With 0, ask every 2 ms until they are there: the
    worst round trip in ms."""
    asker = Asker(path)
    start()
    if not buckets:
        return _probe(asker, algorithm, lambda held: held >= MILLION)
    began = time.perf_counter()
    for first in range(0, buckets, 100):
        asker.ask(
            1,
            [
                (NAME, f"account:{number:07d}", 1000, 1000, SHORT_WINDOW, algorithm, 0, 0, None)
                for number in range(first, first + 100)
            ],
        )
    return time.perf_counter() - began


def probe_until_swept(start: Callable[[], object], path: str, algorithm: int) -> float:
    """Ask every 2 ms until the table is swept: the worst round trip in ms."""
    asker = Asker(path)
    start()
    return _probe(asker, algorithm, lambda held: held < MILLION // 100)


def _probe(asker: Asker, algorithm: int, done: Callable[[int], bool]) -> float:
    worst = 0.0
    asked = 0
    while asked % 100 or not done(asker.ask(4, None)["counters"]["buckets"]):
        asked += 1
        began = time.perf_counter()
        asker.ask(1, [(NAME, "probe", 1, LIMIT, WINDOW, algorithm, 0, 0, None)])
        worst = max(worst, time.perf_counter() - began)
        time.sleep(0.002)
    return worst * 1000
