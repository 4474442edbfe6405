"""Malformed input for a real daemon: `python -m tests.fuzz --seconds 600 --seed 7`, or a part of it as a test.

A seeded source of byte strings: a corpus of known nastiness, and mutations of valid frames.  Each is sent on a
connection of its own whose writing side is then closed, so that a daemon that answers and closes as it
should ends every stream, and one that waits, dies or babbles is noticed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgpack

from sidecar import Limit
from tests.daemons import EPOCH, DaemonProcess, running_daemon, wait_until
from tests.sockets import PATIENCE, frame, packed

BATCH = 128
"""Connections at a time; far below the daemon's backlog."""
OPTIONS = ("--max-buckets", "5000", "--stall-timeout", "60000")
"""For the daemon: a small table, so that growth of its memory can only come from a fault."""
MEMORY = 64 << 20
"""Bytes by which its memory may grow, whatever it was sent."""

_HEADS = (
    *(
        b"\xc1",
        b"\xc4\xff",
        b"\xc5\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xd9\xff",
        b"\xda\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ),
    *(b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdd\x00\x00\x03\xe9"),
    *(b"\xc7\xff\x01", b"\xc8\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x00", b"\xd8\xff", b"\x8f", b"\x9f", b"\xbf"),
)
"""Heads of msgpack values that say more follows than does."""

_LIMIT = ["fuzz", "key", 1, 10, 1000]

VALID: tuple[list[Any], ...] = (
    [1, 1, 1, [_LIMIT], None],
    [1, 2, 1, [[*_LIMIT, 1, 32, 20, EPOCH]], 100],
    [1, 3, 1, [_LIMIT] * 20],
    [1, 4, 1, [["fuzz", "gregorian", 1, 10, kind, kind & 1, 4] for kind in range(6)], None],
    [1, 5, 2, ["fuzz", "key"], None],
    [1, 6, 3, None, None],
    [1, 7, 4, None],
    [1, 7, 9, 20],
    [1, 8, 5, [1, 10], None],
    [1, 9, 1, [_LIMIT], 100, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"],
    [1, 2**63 - 1, 1, [["n" * 1024, "\u00e9" * 512, -(2**63), 2**63 - 1, 2**63 - 1, 1, 63, 2**63 - 1, -(2**63)]], 1],
)
"""Frames of every operation, to be spoilt."""

CORPUS: tuple[bytes, ...] = (
    b"",
    b"\x00",
    b"\x00\x00\x00\x00" * 100,
    b"\xff\xff\xff\xff",
    struct.pack(">I", 1 << 20),
    struct.pack(">I", (1 << 20) + 1) + b"x" * 100,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    *(frame(head) for head in _HEADS),
    *(frame(b"\x94\x01\x07\x01" + head) for head in _HEADS),
    *(frame(b"\x91" * depth) for depth in (10, 511, 512, 1023, 1024, 1025, 100_000)),
    *(frame(b"\x81\xa1k" * depth) for depth in (10, 512, 1024, 100_000)),
    *(frame(b"\x94" + b"\x91" * depth + b"\xc0\x07\x03\xc0") for depth in (300, 900, 990, 1000, 1010, 1020)),
    *(frame(b"\x94\x01\x07\x01" + b"\x91" * depth + b"\xc0") for depth in (300, 900, 1000, 1020)),
    *(
        frame(b"\x94\x01\x07\x01\x91\x95" + b"\x91" * depth + b"\xc0\xa1k\x01\x0a\x7d")
        for depth in (300, 900, 1000, 1015)
    ),
    frame(b"\x94\x01\x07\x01\x91\x95\xa2\xff\xfe\xa1k\x01\x0a\x7d"),
    frame(b"\x94\x01\x07\x02\x92\xa2\xff\xfe\xa1k"),
    frame(b"\x94\x01\x07\x01\x81\x90\xc0"),
    frame(b"\x94\x01\x07\x01\x81\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\xc0"),
    frame(b"\x94\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x07\x03\xc0"),
    frame(b"\x94\xd6\xff\x00\x00\x00\x00\x07\x03\xc0"),
    frame(b"\x94\x01\x07\x01\x91\xc7\x0c\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
    packed(1, 1, 1, [["fuzz", "k", 1, 10, 2**64 - 1]]),
    packed(1, 1, 1, [["fuzz", "k", float("nan"), 10, 1000]]),
    packed(1, 1, 1, [["fuzz", "k", 1, 10, 5, 0, 4, 0, -(2**63)]]),
    packed(1, 1, 1, [["fuzz", "k", 1, 10, 5, 1, 4, 0, 2**63 - 1]]),
    packed(1, 1, 5, [0, 2**63 - 1]) + packed(1, 2, 5, [1, 2**63 - 1]) + packed(1, 3, 5, [0, 0]),
    packed(1, 1, 1, [_LIMIT] * 1000) * 20,
)


def inputs(seed: int) -> Iterator[bytes]:
    """Malformed byte strings without end: the corpus first, the same ones for the same seed."""
    yield from CORPUS
    chance = random.Random(seed)
    makers = (_flipped, _cut, _wrong_length, _wrong_value, _bad_requests, _random_value, _spliced, _noise, _several)
    while True:
        yield chance.choice(makers)(chance)


def _valid(chance: random.Random) -> bytes:
    return packed(*chance.choice(VALID))


def _flipped(chance: random.Random) -> bytes:
    """A valid frame with a few bits or bytes changed; often with its length left right."""
    data = bytearray(_valid(chance))
    first = 4 if chance.random() < 0.8 else 0
    for _ in range(chance.choice((1, 1, 1, 2, 5, 20))):
        at = chance.randrange(first, len(data))
        data[at] = data[at] ^ (1 << chance.randrange(8)) if chance.random() < 0.5 else chance.randrange(256)
    return bytes(data)


def _cut(chance: random.Random) -> bytes:
    """A valid frame that ends early, in the stream or in its body."""
    data = _valid(chance)
    if chance.random() < 0.3:
        return data[: chance.randrange(len(data))]
    return frame(data[4 : chance.randrange(4, len(data))])


def _wrong_length(chance: random.Random) -> bytes:
    """A valid frame under a wrong length, with more frames behind it."""
    data = _valid(chance)
    length = max(
        0, chance.choice((0, 1, len(data) - 5, len(data) - 3, 1 << 20, 1 << 24, 1 << 31, chance.randrange(1 << 32)))
    )
    return struct.pack(">I", length) + data[4:] + _valid(chance)


def _wrong_value(chance: random.Random) -> bytes:
    """A valid frame in which one value, at any depth, is another one."""
    whole: list[Any] = _copied(chance.choice(VALID))
    at = whole
    while True:
        index = chance.randrange(len(at))
        if isinstance(at[index], list) and at[index] and chance.random() < 0.85:
            at = at[index]
            continue
        if chance.random() < 0.1:
            del at[index]
        elif chance.random() < 0.1:
            at.insert(index, _value(chance, 2))
        else:
            at[index] = _value(chance, 2)
        return frame(_pack(whole))


def _bad_requests(chance: random.Random) -> bytes:
    """A good frame with requests of which some fields hold anything."""
    good = ["fuzz", "key", 1, 10, 1000, 1, 0, 0, EPOCH]
    requests = [
        [field if chance.random() < 0.8 else _value(chance, 1) for field in good[: chance.randrange(4, 10)]]
        for _ in range(chance.randrange(1, 6))
    ]
    return frame(_pack([1, 7, 1, requests, None]))


def _random_value(chance: random.Random) -> bytes:
    """Any msgpack value as a body, often in the form of a frame."""
    if chance.random() < 0.3:
        return frame(_pack(_value(chance, 5)))
    op = chance.randrange(11)
    return frame(
        _pack([1, chance.randrange(1, 9), op, _value(chance, 4), *([_value(chance, 1)] * chance.randrange(2))])
    )


def _spliced(chance: random.Random) -> bytes:
    """A valid frame's start and a head that promises more than there is, or bytes that are too many."""
    data = _valid(chance)[4:]
    at = chance.randrange(len(data))
    middle = chance.choice(_HEADS) if chance.random() < 0.7 else chance.randbytes(chance.randrange(1, 9))
    return frame(data[:at] + middle + data[at if chance.random() < 0.5 else len(data) :])


def _noise(chance: random.Random) -> bytes:
    """Random bytes, as a stream or as a body."""
    data = chance.randbytes(chance.choice((1, 3, 4, 5, 16, 64, 500)))
    return frame(data) if chance.random() < 0.7 else data


def _several(chance: random.Random) -> bytes:
    """Several of these in one write."""
    makers = (_valid, _valid, _wrong_value, _cut, _flipped)
    return b"".join(chance.choice(makers)(chance) for _ in range(chance.randrange(2, 6)))


def _copied(value: Any) -> Any:
    return [_copied(item) for item in value] if isinstance(value, list) else value


_SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 5, 6, 63, 64, 127, 128, 1000, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, EPOCH),
    *(0.0, 1.5, float("nan"), float("inf"), -1e308, "", "a", "fuzz", "\u00e9" * 513, "n" * 1025, "\x00", "\U0001f600"),
    *("\udcff", b"", b"fuzz", b"\xff\xfe", msgpack.ExtType(5, b""), msgpack.ExtType(127, b"x" * 300)),
    *(msgpack.Timestamp(0), msgpack.Timestamp(2**33, 999_999_999)),
)


def _value(chance: random.Random, depth: int) -> Any:
    """Any value that msgpack knows, also text that is not UTF-8."""
    kind = chance.random()
    if depth and kind < 0.25:
        return [_value(chance, depth - 1) for _ in range(chance.choice((0, 1, 2, 2, 5, 9)))]
    if depth and kind < 0.35:
        return {chance.choice(("", "k", 1, None, b"k")): _value(chance, depth - 1) for _ in range(chance.randrange(3))}
    if kind < 0.5:
        return chance.randrange(-(2**63), 2**64) >> chance.randrange(64)
    return chance.choice(_SCALARS)


def _pack(value: Any) -> bytes:
    data: bytes = msgpack.packb(value, unicode_errors="surrogateescape")
    return data


class Failure(AssertionError):
    """What the daemon did wrong, and with which input."""


def feed(path: str, data: Sequence[bytes]) -> None:
    """Send each input on its own connection, all at once, and read each stream to its end; raises Failure."""
    streams = []
    try:
        for one in data:
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            streams.append(stream)
            stream.settimeout(PATIENCE)
            try:
                stream.connect(path)
                stream.sendall(one)
                stream.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the daemon saw enough before the end: its reason is there to be read
            except OSError as error:
                raise Failure(f"{error!r} at input {one.hex()}") from error
        for one, stream in zip(data, streams, strict=True):
            _judge(one, _read(one, stream))
    finally:
        for stream in streams:
            stream.close()


def _read(one: bytes, stream: socket.socket) -> bytes:
    chunks = []
    try:
        while chunk := stream.recv(65_536):
            chunks.append(chunk)
    except ConnectionResetError:
        pass  # closed with some of our bytes unread
    except TimeoutError as error:
        raise Failure(f"no end of the stream after input {one.hex()}") from error
    return b"".join(chunks)


def _judge(one: bytes, answers: bytes) -> None:
    """Whole answer frames, and nothing after a fatal one."""
    at = 0
    fatal = False
    while at < len(answers):
        try:
            (length,) = struct.unpack_from(">I", answers, at)
            body = answers[at + 4 : at + 4 + length]
            version, request_id, outcome, payload, node = msgpack.unpackb(body, unicode_errors="surrogateescape")
        except Exception as error:
            raise Failure(f"an answer that is none ({error!r}) to input {one.hex()}") from error
        at += 4 + length
        sound = version == 1 and outcome in (0, 1, 2) and request_id >= 0 and node == "test-node"
        if not sound or fatal or (outcome and not isinstance(payload, str)):
            raise Failure(f"a wrong answer {(version, request_id, outcome, payload, node)!r} to input {one.hex()}")
        fatal = outcome == 2
        if fatal and "internal error" in payload:
            raise Failure(f"an internal error at input {one.hex()}")


def run(path: str, source: Iterable[bytes]) -> int:
    """Feed all of `source`; how many inputs that were."""
    count = 0
    iterator = iter(source)
    while batch := list(itertools.islice(iterator, BATCH)):
        feed(path, batch)
        count += len(batch)
    return count


def examine(daemon: DaemonProcess, memory_before: int) -> None:
    """The daemon is alive, correct, has told of no fault of its own and holds no more than it should."""
    if daemon.process.poll() is not None:
        raise Failure("the daemon died")
    with daemon.client(timeout=PATIENCE) as client:
        # Some inputs were valid, and moved the clock or hit these very keys.
        client.set_clock(EPOCH)
        for algorithm in ("token", "leaky"):
            limit = Limit(f"after-{algorithm}", 3, per="3s", algorithm=algorithm)
            client.reset(limit, "key")
            seen = [(decision.allowed, decision.remaining) for decision in (client.hit(limit, "key") for _ in range(4))]
            if seen != [(True, 2), (True, 1), (True, 0), (False, 0)]:
                raise Failure(f"wrong decisions afterwards: {seen}")
        wait_until(lambda: client.info()["connections"]["open"] == 1, "the connections are closed")
    faults = daemon.events("internal_error") + daemon.events("loop_error")
    if faults:
        raise Failure(f"a fault was logged: {faults[0]}")
    grown = daemon.memory() - memory_before
    if grown > MEMORY:
        raise Failure(f"its memory grew by {grown >> 20} MiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 if the daemon stood it all."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Feed a daemon malformed input.")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long (default 60)")
    parser.add_argument(
        "--seed", type=int, default=None, metavar="N", help="of the inputs (default: another each time)"
    )
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with running_daemon(*OPTIONS) as daemon:
        run(daemon.socket, itertools.islice(inputs(seed), 5000))
        memory = daemon.memory()
        began = told = time.monotonic()
        count = 0
        source = inputs(seed + 1)
        try:
            while time.monotonic() - began < options.seconds:
                count += run(daemon.socket, itertools.islice(source, BATCH))
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    print(f"{count} inputs, {daemon.memory() >> 20} MiB", flush=True)
            examine(daemon, memory)
        except Failure as failure:
            print(f"seed {seed}, after {count} inputs: {failure}", file=sys.stderr)
            return 1
        print(f"{count} inputs in {time.monotonic() - began:.0f} s; the daemon is alive and correct")
    return 0


if __name__ == "__main__":
    sys.exit(main())
