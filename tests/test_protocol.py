"""The protocol, spoken by hand: a plain socket and bytes.  Read it beside docs/protocol.md as its example."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.daemons import EPOCH, DaemonProcess, running_daemon
from tests.sockets import PATIENCE, Raw, frame, packed

CHECK, RESET, PING, INFO, CLOCK = 1, 2, 3, 4, 5
ANSWERED, REFUSED, FATAL = 0, 1, 2
UNDER, OVER, ERROR = 0, 1, 2
NODE = "test-node"


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    """One daemon for this file; tests keep out of each other's way by their keys and move no clock."""
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def raw(shared: DaemonProcess) -> Iterator[Raw]:
    """A fresh connection to it."""
    with Raw(shared.socket) as raw:
        yield raw


def hit(key: str, hits: int = 1, limit: int = 10, duration: int = 1000) -> list[object]:
    """A request as short as it may be: name, unique_key, hits, limit, duration."""
    return ["protocol", key, hits, limit, duration]


def test_ping_byte_for_byte(shared: DaemonProcess) -> None:
    """The smallest call and its answer are exactly these bytes."""
    # Any stream socket will do; there is no greeting, the first frame may be sent at once.
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(PATIENCE)
    stream.connect(shared.socket)
    # A frame is the length of its body (4 bytes, big-endian), then the body: one msgpack array.
    stream.sendall(
        b"\x00\x00\x00\x05"  # the body has 5 bytes
        b"\x94"  # an array of 4 elements
        b"\x01"  # the protocol's version: 1
        b"\x07"  # the request's id, chosen by us: 7
        b"\x03"  # the op: 3 is PING
        b"\xc0"  # its payload: nil
    )
    expected = (
        b"\x00\x00\x00\x0f"  # the body has 15 bytes
        b"\x95"  # an array of 5 elements
        b"\x01"  # the protocol's version
        b"\x07"  # the id of the request that this answers
        b"\x00"  # the outcome: 0 is ANSWERED
        b"\xc0"  # the payload: for a PING, nil
        b"\xa9test-node"  # the node that answers
    )
    assert stream.recv(len(expected), socket.MSG_WAITALL) == expected
    # There is no farewell either.
    stream.close()


def test_check_byte_for_byte(start_daemon: Callable[..., DaemonProcess]) -> None:
    """One hit and its decision are exactly these bytes, which are those of the example in docs/protocol.md."""
    request = (
        b"\x00\x00\x00\x15"  # the body has 21 bytes
        b"\x95"  # an array of 5 elements: version, id, op, payload, budget
        b"\x01"  # version 1
        b"\x07"  # id 7
        b"\x01"  # op 1 is CHECK
        b"\x91"  # its payload: an array of requests, here of 1
        b"\x98"  # a request is an array of 5 to 10 elements, here 8
        b"\xa3rps"  # name
        b"\xa1a"  # unique_key
        b"\x01"  # hits
        b"\x0a"  # limit: 10
        b"\xcd\xea\x60"  # duration: 60,000 ms
        b"\x00"  # algorithm: 0 is TOKEN_BUCKET
        b"\x00"  # behavior: none
        b"\x00"  # burst: none
        b"\xc0"  # the budget: nil, or ms from now after which nobody waits for the answer any more
    )
    expected = (
        b"\x00\x00\x00\x1a"  # the body has 26 bytes
        b"\x95"  # an array of 5 elements: version, id, outcome, payload, node
        b"\x01"  # version 1
        b"\x07"  # the id of the request
        b"\x00"  # ANSWERED
        b"\x91"  # the payload: as many decisions as requests, in their order
        b"\x95"  # a decision without trouble has 5 elements
        b"\x00"  # status: 0 is UNDER_LIMIT
        b"\x0a"  # limit
        b"\x09"  # remaining: 9
        b"\xcf\x00\x00\x01\x8b\xcf\xe6\x52\x60"  # reset_time: epoch ms, here EPOCH + 60,000
        b"\x00"  # retry_after: 0 ms, since it was admitted
        b"\xa6node-1"  # the node that decided
    )
    with Raw(start_daemon("--node", "node-1").socket) as raw:
        raw.send(request)
        assert raw.take(len(expected)) == expected
    page = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text()
    # In the page's example bytes stand in columns; behind two spaces comes what they mean.
    lines = page.partition("\n-> ")[2].partition("```")[0].replace("<-", "  ").splitlines()
    shown = bytes.fromhex("".join(line.strip().partition("  ")[0] for line in lines))
    assert shown == request + expected


def test_check_with_every_field(raw: Raw) -> None:
    """A request may name all nine fields, and a refusal tells how long to wait."""
    leaky, drain = 1, 32
    # name, unique_key, hits, limit, duration, algorithm, behavior, burst, created_at
    request = ["protocol", "every-field", 4, 2, 1000, leaky, drain, 5, EPOCH]
    raw.send(packed(1, 1, CHECK, [request], None))
    # 4 of 5 are taken; 2 leak in 1,000 ms, so the bucket is full again after 2,000 ms.
    assert raw.answer() == [1, 1, ANSWERED, [[UNDER, 2, 1, EPOCH + 2000, 0]], NODE]
    raw.send(packed(1, 2, CHECK, [request], None))
    # 4 do not fit any more; DRAIN_OVER_LIMIT empties the bucket, and 4 tokens take 2,000 ms to leak.
    assert raw.answer() == [1, 2, ANSWERED, [[OVER, 2, 0, EPOCH + 2500, 2000]], NODE]


def test_reset(raw: Raw) -> None:
    """RESET forgets a bucket and says whether there was one."""
    raw.send(packed(1, 1, CHECK, [hit("reset", 10)]))
    raw.send(packed(1, 2, RESET, ["protocol", "reset"]))
    raw.send(packed(1, 3, RESET, ["protocol", "reset"]))
    raw.send(packed(1, 4, CHECK, [hit("reset", 1)]))
    assert raw.answer()[3][0][2] == 0
    assert raw.answer() == [1, 2, ANSWERED, True, NODE]
    assert raw.answer() == [1, 3, ANSWERED, False, NODE]
    assert raw.answer()[3][0][2] == 9
    # A name or key that cannot be is refused, and the connection goes on.
    raw.send(packed(1, 5, RESET, ["", "reset"]) + packed(1, 6, PING, None))
    request_id, outcome, why, node = raw.answer()[1:]
    assert (request_id, outcome, node) == (5, REFUSED, NODE)
    assert "name" in why
    assert raw.answer() == [1, 6, ANSWERED, None, NODE]


def test_info(raw: Raw) -> None:
    """INFO answers a map with the version, the node, the uptime, the clock and the counters."""
    raw.send(packed(1, 9, INFO, None))
    version, request_id, outcome, info, node = raw.answer()
    assert (version, request_id, outcome) == (1, 9, ANSWERED)
    assert node == NODE
    assert info["protocol"] == 1
    assert info["clock"] == "manual"
    assert info["now"] == EPOCH
    assert info["uptime_ms"] >= 0
    assert isinstance(info["version"], str)
    assert {"under_limit", "over_limit", "errors", "buckets"} <= set(info["counters"])


def test_clock(daemon: DaemonProcess) -> None:
    """CLOCK sets a manual clock or advances it, and answers the new time; a bad amount is refused."""
    with Raw(daemon.socket) as raw:
        raw.send(packed(1, 1, CHECK, [hit("clock", 10)]))
        assert raw.answer()[3] == [[UNDER, 10, 0, EPOCH + 1000, 0]]
        raw.send(packed(1, 2, CLOCK, [1, 1500]))  # 1: advance by 1,500 ms
        # Frames read together share one reading of the clock: wait for the answer before relying on the new time.
        assert raw.answer() == [1, 2, ANSWERED, EPOCH + 1500, NODE]
        raw.send(packed(1, 3, CHECK, [hit("clock", 10)]))
        assert raw.answer()[3] == [[UNDER, 10, 0, EPOCH + 2500, 0]]
        raw.send(packed(1, 4, CLOCK, [0, 5000]))  # 0: set to 5,000 ms after the epoch, so it may go back
        assert raw.answer() == [1, 4, ANSWERED, 5000, NODE]
        for payload in ([1, -1], [2, 0], [0, 2**63 - 1], [0, "soon"]):
            raw.send(packed(1, 5, CLOCK, payload))
            assert raw.answer()[1:3] == [5, REFUSED]
        raw.send(packed(1, 6, CLOCK, [1, 0]))
        assert raw.answer() == [1, 6, ANSWERED, 5000, NODE]


def test_clock_is_refused_on_the_real_clock(start_daemon: Callable[..., DaemonProcess]) -> None:
    """On a daemon with the system's clock CLOCK is refused, and the connection goes on."""
    with Raw(start_daemon(clock="system").socket) as raw:
        raw.send(packed(1, 1, CLOCK, [1, 1000]) + packed(1, 2, PING, None))
        version, request_id, outcome, why, _node = raw.answer()
        assert (version, request_id, outcome) == (1, 1, REFUSED)
        assert "--clock manual" in why
        assert raw.answer() == [1, 2, ANSWERED, None, NODE]


def test_a_frame_in_two_halves(raw: Raw) -> None:
    """A frame may come in pieces, cut anywhere, its length included."""
    whole = packed(1, 3, PING, None)
    for cut in range(1, len(whole)):
        raw.send(whole[:cut])
        time.sleep(0.005)  # so that the two halves are two reads, mostly
        raw.send(whole[cut:])
        assert raw.answer() == [1, 3, ANSWERED, None, NODE]


def test_pipelining(raw: Raw) -> None:
    """Many frames may be sent at once, before any answer is read; each gets its own answer."""
    raw.send(b"".join(packed(1, number, CHECK, [hit("pipeline", 1, 5000)]) for number in range(1, 3001)))
    left = {}
    for _ in range(3000):
        _, request_id, outcome, ((status, _limit, remaining, _reset, _retry),), _node = raw.answer()
        assert (outcome, status) == (ANSWERED, UNDER)
        left[request_id] = remaining
    assert left == {number: 5000 - number for number in range(1, 3001)}


def test_ids_are_the_clients_to_choose(raw: Raw) -> None:
    """Ids need no order and may be as large as 2^63 - 1; an answer is known by its id."""
    ids = [5, 2**63 - 1, 1, 4_000_000_000, 5, 127, 128, 65_536]
    raw.send(b"".join(packed(1, number, PING, None) for number in ids))
    assert sorted(raw.answer()[1] for _ in ids) == sorted(ids)


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_many_requests_in_one_frame(raw: Raw, count: int) -> None:
    """A check holds up to 1,000 requests, answered in their order."""
    raw.send(packed(1, 8, CHECK, [hit(f"{count}:{number}", number % 11) for number in range(count)]))
    _, request_id, outcome, answers, _node = raw.answer()
    assert (request_id, outcome) == (8, ANSWERED)
    assert [answer[2] for answer in answers] == [10 - number % 11 for number in range(count)]


def test_too_many_requests_in_one_frame(raw: Raw) -> None:
    """A check of 1,001 requests is answered by an error and decides none of them."""
    raw.send(packed(1, 8, CHECK, [hit("too-many")] * 1001))
    _, request_id, outcome, why, _node = raw.answer()
    assert request_id in (0, 8)
    assert outcome == FATAL
    assert "1000" in why or "1,000" in why or "1001" in why
    assert raw.ended()


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (["", "key", 1, 10, 1000], "name"),
        (["name", "", 1, 10, 1000], "unique_key"),
        (["n" * 1025, "key", 1, 10, 1000], "name"),
        (["name", "\u00e9" * 513, 1, 10, 1000], "unique_key"),
        ([7, "key", 1, 10, 1000], "name"),
        (["name", b"key", 1, 10, 1000], "unique_key"),
        (["name", "key", 1.5, 10, 1000], "hits"),
        (["name", "key", True, 10, 1000], "hits"),
        (["name", "key", 2**63, 10, 1000], "hits"),
        (["name", "key", 1, -1, 1000], "limit"),
        (["name", "key", 1, 2**64 - 1, 1000], "limit"),
        (["name", "key", 1, 10, -1], "duration"),
        (["name", "key", 1, 10, None], "duration"),
        (["name", "key", 1, 10, 1000, 2], "algorithm"),
        (["name", "key", 1, 10, 1000, 0, 64], "behavior"),
        (["name", "key", 1, 10, 6, 0, 4], "Gregorian"),
        (["name", "key", 1, 10, 1000, 1, 0, -1], "burst"),
        (["name", "key", 1, 10, 1000, 1, 0, 0, "now"], "created_at"),
        (["name", "key", 1, 10], "5 to 10"),
        (["name", "key", 1, 10, 1000, 0, 0, 0, None, 5], "fallback"),
        (["name", "key", 1, 10, 1000, 0, 0, 0, None, 0, 0], "5 to 10"),
        ("a string", "5 to 10"),
        ({"name": "name"}, "5 to 10"),
        (None, "5 to 10"),
        (msgpack.ExtType(5, b"what"), "5 to 10"),
    ],
)
def test_a_bad_request_in_a_good_frame(raw: Raw, request_: object, named: str) -> None:
    """A bad request gets an error that names the field, for itself alone; its neighbours are decided."""
    raw.send(packed(1, 1, RESET, ["protocol", "neighbour"]))
    raw.send(packed(1, 2, CHECK, [hit("neighbour"), request_, hit("neighbour")]))
    assert raw.answer()[1:3] == [1, ANSWERED]
    _, request_id, outcome, (first, bad, last), _node = raw.answer()
    assert (request_id, outcome) == (2, ANSWERED)
    assert (first[0], first[2]) == (UNDER, 9)
    assert (last[0], last[2]) == (UNDER, 8)
    # An answer with trouble has 8 elements: the 5 of every answer, then owner, degraded and error.
    status, limit, remaining, reset_time, retry_after, owner, degraded, error = bad
    assert (status, limit, remaining, reset_time, retry_after) == (ERROR, 0, 0, 0, 0)
    assert (owner, degraded) == (None, False)
    assert named in error
    raw.send(packed(1, 3, PING, None))
    assert raw.answer() == [1, 3, ANSWERED, None, NODE]


def test_a_key_that_is_not_utf8(raw: Raw) -> None:
    """Text that is not UTF-8 is one request's fault and not the frame's."""
    bad = b"\x95" + b"\xa4name" + b"\xa2\xff\xfe" + b"\x01\x0a\x7d"
    raw.send(frame(b"\x94\x01\x02\x01\x91" + bad))
    _, request_id, outcome, (answer,), _node = raw.answer()
    assert (request_id, outcome, answer[0]) == (2, ANSWERED, ERROR)
    assert "UTF-8" in answer[7]
    raw.send(packed(1, 3, PING, None))
    assert raw.answer() == [1, 3, ANSWERED, None, NODE]


def nested(depth: int) -> bytes:
    """Arrays of one element in each other."""
    return b"\x91" * depth + b"\xc0"


BAD_FRAMES: list[tuple[str, bytes, int]] = [
    ("longer than the daemon takes", struct.pack(">I", (1 << 20) + 1), 0),
    ("as long as four bytes can say", b"\xff\xff\xff\xff", 0),
    ("empty", frame(b""), 0),
    ("a byte that msgpack never uses", frame(b"\xc1"), 0),
    ("an integer", frame(b"\x07"), 0),
    ("a string", frame(b"\xa3abc"), 0),
    ("a map", frame(b"\x82\x01\x07\x03\xc0"), 0),
    ("an array that ends early", frame(b"\x94\x01\x07\x03"), 0),
    ("bytes after the array", frame(b"\x94\x01\x07\x03\xc0\xc0"), 0),
    ("3 elements", packed(1, 7, PING), 7),
    ("7 elements", packed(1, 7, PING, None, None, None, None), 7),
    ("a context that is an integer", packed(1, 7, PING, None, None, 1), 7),
    ("a context that is bytes", packed(1, 7, PING, None, None, b"00-"), 7),
    ("id 0, which is the daemon's own", packed(1, 0, PING, None), 0),
    ("a negative id", packed(1, -1, PING, None), 0),
    ("an id of 2^63", packed(1, 2**63, PING, None), 0),
    ("an id that is a bool", packed(1, True, PING, None), 0),
    ("an id that is text", packed(1, "7", PING, None), 0),
    ("another version", packed(2, 7, PING, None), 7),
    ("a version that is a bool", packed(True, 7, PING, None), 7),
    ("a version that is nested", frame(b"\x94" + nested(20) + b"\x07\x03\xc0"), 7),
    ("a version that is nested as deep as may be", frame(b"\x94" + nested(1020) + b"\x07\x03\xc0"), 7),
    ("an unknown op", packed(1, 7, 99, None), 7),
    ("op 0", packed(1, 7, 0, None), 7),
    ("a negative op", packed(1, 7, -1, None), 7),
    ("an op that is text", packed(1, 7, "ping", None), 7),
    ("a budget of 0", packed(1, 7, PING, None, 0), 7),
    ("a budget that is text", packed(1, 7, PING, None, "soon"), 7),
    ("a check of nothing", packed(1, 7, CHECK, []), 7),
    ("a check whose payload is nil", packed(1, 7, CHECK, None), 7),
    ("a check whose payload is a map", packed(1, 7, CHECK, {}), 7),
    ("a reset of one element", packed(1, 7, RESET, ["name"]), 7),
    ("a reset of nil", packed(1, 7, RESET, None), 7),
    ("a clock of nil", packed(1, 7, CLOCK, None), 7),
    ("a clock of three elements", packed(1, 7, CLOCK, [0, 1, 2]), 7),
    ("an array that says it has 4 billion elements", frame(b"\x94\x01\x07\x01\xdd\xff\xff\xff\xff"), 0),
    ("a map that says it has 4 billion elements", frame(b"\x94\x01\x07\x01\xdf\xff\xff\xff\xff"), 0),
    ("a string that says it has 4 GB", frame(b"\x94\x01\x07\x01\xdb\xff\xff\xff\xffabc"), 0),
    ("bytes that say they have 4 GB", frame(b"\x94\x01\x07\x01\xc6\xff\xff\xff\xffabc"), 0),
    ("a map whose key is a map", frame(b"\x94\x01\x07\x01\x81\x80\xc0"), 0),
    ("nested without end", frame(b"\x91" * 100_000), 0),
    ("maps nested without end", frame(b"\x81\xa1k" * 100_000), 0),
]


@pytest.mark.parametrize(("data", "request_id"), [row[1:] for row in BAD_FRAMES], ids=[row[0] for row in BAD_FRAMES])
def test_a_bad_frame(raw: Raw, data: bytes, request_id: int) -> None:
    """Bytes that can never become a good frame get an error with their id (or 0) and why; then the stream ends."""
    # Two good frames go before it in the same write; they are answered first.
    raw.send(packed(1, 1, PING, None) + packed(1, 2, PING, None) + data + packed(1, 3, PING, None))
    assert raw.answer() == [1, 1, ANSWERED, None, NODE]
    assert raw.answer() == [1, 2, ANSWERED, None, NODE]
    version, told_id, outcome, why, _node = raw.answer()
    assert (version, told_id, outcome) == (1, request_id, FATAL)
    assert isinstance(why, str)
    assert why
    assert "internal" not in why
    # Nothing after the bad frame is answered.
    assert raw.ended()


def test_the_longest_frame(start_daemon: Callable[..., DaemonProcess]) -> None:
    """A frame of exactly max_frame bytes is taken, one byte more is not."""
    with Raw(start_daemon("--max-frame", "2048").socket) as raw:
        # A ping's payload is not looked at: here, bytes that fill the frame.
        body = msgpack.packb([1, 7, PING, b"x" * (2048 - 7)])
        assert len(body) == 2048
        raw.send(frame(body))
        assert raw.answer() == [1, 7, ANSWERED, None, NODE]
        raw.send(frame(body + b"x"))
        assert raw.answer()[1:3] == [0, FATAL]
        assert raw.ended()


def test_the_end_of_a_stream_inside_a_frame(raw: Raw) -> None:
    """A client that closes in mid-frame gets the answers of its whole frames and no error."""
    raw.send(packed(1, 1, PING, None) + packed(1, 2, PING, None)[:5])
    assert raw.finish() == [[1, 1, ANSWERED, None, NODE]]


def test_a_half_closed_stream_is_answered(raw: Raw) -> None:
    """A client may say that it sends no more and still gets every answer."""
    raw.send(b"".join(packed(1, number, PING, None) for number in range(1, 20_001)))
    answers = raw.finish()
    assert [answer[1] for answer in answers] == list(range(1, 20_001))


def test_a_stream_cut_anywhere(raw: Raw) -> None:
    """However the bytes of many frames are cut into writes, every frame gets its answer, once."""
    chance = random.Random(7)
    expected: list[Any] = []
    stream = b""
    for number in range(1, 301):
        request = hit(f"cut:{number}", chance.randrange(11)) + [0, 0, 0, None][: chance.randrange(5)]
        stream += packed(1, number, CHECK, [request] * chance.randrange(1, 4))
        expected.append(number)
    while stream:
        size = chance.choice((1, 2, 3, 5, 50, 500, 5000))
        raw.send(stream[:size])
        stream = stream[size:]
    assert [raw.answer()[1] for _ in expected] == expected
