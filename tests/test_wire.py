"""Frames and messages: bytes in, bytes out."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.wire import (
    BadFrame,
    DoesNotFit,
    Frames,
    Op,
    Outcome,
    Packer,
    open_answer,
    open_request,
    split_id,
    unpack,
)
from tests.helpers import INT64_MAX, pack


def framed(body: bytes) -> bytes:
    """A body with its length before it, written here by hand."""
    return struct.pack(">I", len(body)) + body


def fed(frames: Frames, *parts: bytes) -> list[bytes]:
    """The bodies that these parts complete."""
    return [body for part in parts for body in frames.feed(part)]


# --- Frames


@pytest.mark.parametrize(
    "bodies", [[], [b""], [b"a"], [b"", b"", b""], [b"abc", b"", b"\0\0\0\1"], [b"a" * 1000, b"b" * 70_000]]
)
def test_bodies_come_out_as_they_went_in(bodies: list[bytes]) -> None:
    """Fed whole or byte by byte, the same bodies come out in order, and nothing is left."""
    stream = b"".join(framed(body) for body in bodies)
    frames = Frames()
    assert fed(frames, stream) == bodies
    assert not frames.partial
    assert fed(frames, *(stream[at : at + 1] for at in range(len(stream)))) == bodies
    assert not frames.partial


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_any_split_gives_the_same_bodies(bodies: list[bytes], cuts: list[int]) -> None:
    """Wherever the stream is cut, and however empty the parts, the bodies come out once and in order."""
    stream = b"".join(framed(body) for body in bodies)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts = [stream[start:end] for start, end in pairwise(edges)]
    frames = Frames()
    assert fed(frames, *parts) == bodies
    assert not frames.partial


@pytest.mark.parametrize("sent", range(1, 8))
def test_part_of_a_frame_is_known_as_such(sent: int) -> None:
    """While a frame is under way nothing comes out, and that there is a part can be seen."""
    frames = Frames()
    stream = framed(b"abcd")
    assert fed(frames, stream[:sent]) == []
    assert frames.partial
    assert fed(frames, stream[sent:]) == [b"abcd"]
    assert not frames.partial


def test_a_whole_frame_and_part_of_the_next() -> None:
    """What is complete comes at once; the rest waits."""
    frames = Frames()
    assert fed(frames, framed(b"one") + framed(b"two")[:5]) == [b"one"]
    assert frames.partial
    assert fed(frames, framed(b"two")[5:] + framed(b"three")) == [b"two", b"three"]


@pytest.mark.parametrize("split", [0, 1, 3])
def test_the_longest_frame(split: int) -> None:
    """A frame of just the most bytes is taken, and one more byte is refused by the length alone."""
    frames = Frames(max_frame=10)
    assert fed(frames, framed(b"x" * 10)) == [b"x" * 10]
    length = struct.pack(">I", 11)
    with pytest.raises(BadFrame, match="a frame of 11 bytes is longer than 10"):
        fed(frames, length[:split], length[split:])


def test_an_overlong_frame_after_a_good_one() -> None:
    """The good frame before an impossible one still comes out."""
    bodies = iter(Frames(max_frame=10).feed(framed(b"good") + b"\xff\xff\xff\xff"))
    assert next(bodies) == b"good"
    with pytest.raises(BadFrame) as caught:
        next(bodies)
    assert caught.value.request_id == 0


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"])
def test_another_protocol_is_refused_by_its_first_bytes(text: bytes) -> None:
    """HTTP and TLS read as lengths far beyond any frame."""
    with pytest.raises(BadFrame, match="longer than"):
        fed(Frames(), text)


# --- Messages


@pytest.mark.parametrize(
    ("payload", "budget"),
    [(None, None), ([], 1), ([("n", "k", 1, 10, 1000)], 500), (("n", "k"), INT64_MAX), ("é", None), (-1, 1)],
)
def test_a_request_opens_as_it_was_packed(payload: object, budget: int | None) -> None:
    """Id, op and payload travel, whatever the budget; arrays become tuples."""
    (body,) = Frames().feed(Packer().request(7, Op.CHECK, payload, budget))
    wanted = tuple(payload) if isinstance(payload, list) else payload
    assert open_request(body)[:3] == (7, Op.CHECK, wanted)


@pytest.mark.parametrize("owner", [None, "", "other", "ö" * 253])
def test_a_decision_is_written_short_or_wide_and_reads_the_same(owner: str | None) -> None:
    """The quick way to write one decision says what the general way says, of this node's own and of another's."""
    packer = Packer("me")
    for verdict in [(0, 10, 9, 1_700_000_000_000, 0), (1, 2**64 - 1, 0, 0, 2**63)]:
        for _ in range(2):  # the second time its owner is known
            quick, general = packer.decided(7, verdict, owner), packer.answer(7, Outcome.ANSWERED, ())
            assert len(general) < len(quick) == 4 + int.from_bytes(quick[:4], "big")
            whole = verdict if owner is None else (*verdict, owner)
            assert open_answer(quick[4:]) == (7, Outcome.ANSWERED, (whole,), "me")


@pytest.mark.parametrize("odd", [None, -1, 2**64, 1.0, "1", (), b""])
def test_what_is_no_decision_is_not_written_as_one(odd: object) -> None:
    """A value from another node that does not fit is refused whole, wherever it stands."""
    for place in range(5):
        verdict: list[object] = [0, 10, 9, 1_700_000_000_000, 0]
        verdict[place] = odd
        with pytest.raises(DoesNotFit):
            Packer("me").decided(7, tuple(verdict), "other")  # type: ignore[arg-type]


@given(st.integers(1, 2**32 - 1), st.text(min_size=1, max_size=300), st.integers(1, INT64_MAX))
def test_a_request_of_packed_parts_is_that_request(number: int, key: str, budget: int) -> None:
    """Joined from what is packed already, it says the same, and without its id has the same bytes."""
    payload = (("n", key, 1, 10, 1000, 0, 0, 0, None),)
    made = Packer.packed_request(number, Op.CHECK, pack(payload), pack(budget))
    assert open_request(made[4:]) == (number, Op.CHECK, payload, budget, None)
    usual = Packer().request(number, Op.CHECK, payload, budget)
    if split_id(made)[0]:
        assert split_id(made)[0] == number
        assert split_id(made)[1][4:] == split_id(usual)[1][4:] or not split_id(usual)[0]


def test_owners_that_are_kept_packed_are_bounded() -> None:
    """A peer that gives itself ever new names fills no memory, and is still told by the name that it gave."""
    packer = Packer("me")
    for number in range(25_000):
        packer.decided(7, (0, 1, 1, 1, 0), f"node-{number}")
    assert len(packer._ends) <= 10_000
    assert open_answer(packer.decided(7, (0, 1, 1, 1, 0), "node-1")[4:])[2] == ((0, 1, 1, 1, 0, "node-1"),)


@pytest.mark.parametrize("outcome", Outcome)
def test_an_answer_opens_as_it_was_packed(outcome: Outcome) -> None:
    """Id, outcome, payload and the node's name travel."""
    (body,) = Frames().feed(Packer("node-1").answer(INT64_MAX, outcome, [(0, 1, 2, 3, 4)]))
    assert open_answer(body) == (INT64_MAX, outcome, ((0, 1, 2, 3, 4),), "node-1")


def test_a_packer_serves_many_messages() -> None:
    """One packer's frames share nothing, also after one that could not be packed."""
    packer = Packer()
    first = packer.request(1, Op.PING, None)
    with pytest.raises((TypeError, OverflowError)):
        packer.request(2, Op.CHECK, [object()])
    assert packer.request(1, Op.PING, None) == first
    assert first == framed(pack((1, 1, 3, None, None)))


def test_a_request_may_go_without_a_budget() -> None:
    """Four elements are a request, and so is a budget of nil."""
    wanted = (1, 3, None, None, None)
    assert open_request(pack((1, 1, 3, None))) == wanted
    assert open_request(pack((1, 1, 3, None, None))) == wanted


def test_a_request_may_bring_a_context() -> None:
    """The sixth element comes out as it went in, whatever it says; nil is as good as none."""
    assert open_request(pack((1, 1, 3, None, 7, "00-ab"))) == (1, 3, None, 7, "00-ab")
    assert open_request(pack((1, 1, 3, None, None, None))) == (1, 3, None, None, None)
    (body,) = Frames().feed(Packer().request(1, Op.CHECK, [("n", "k", 1, 10, 1000)], 7, "00-ab"))
    assert open_request(body) == (1, Op.CHECK, (("n", "k", 1, 10, 1000),), 7, "00-ab")


def test_a_request_without_a_context_is_as_it_was_before_there_were_any() -> None:
    """Five elements: what a daemon of the release before reads."""
    assert Packer().request_body(1, Op.PING, None, 7) == b"\x95\x01\x01\x03\xc0\x07"


@pytest.mark.parametrize(
    ("value", "why", "request_id"),
    [
        (None, "an array of 4 to 6 elements", 0),
        (7, "an array of 4 to 6 elements", 0),
        ("text", "an array of 4 to 6 elements", 0),
        ({"a": 1}, "an array of 4 to 6 elements", 0),
        ([], "an array of 4 to 6 elements", 0),
        ([1, 1, 3], "an array of 4 to 6 elements", 1),
        ([1, 1, 3, None, None, None, None], "an array of 4 to 6 elements", 1),
        ([1, 0, 3, None], "id is an integer from 1", 0),
        ([1, -1, 3, None], "id is an integer from 1", 0),
        ([1, 2**63, 3, None], "id is an integer from 1", 0),
        ([1, True, 3, None], "id is an integer from 1", 0),
        ([1, 1.0, 3, None], "id is an integer from 1", 0),
        ([1, "1", 3, None], "id is an integer from 1", 0),
        ([1, None, 3, None], "id is an integer from 1", 0),
        ([0, 5, 3, None], "unknown protocol version 0; this daemon speaks 1", 5),
        ([2, 5, 3, None], "unknown protocol version 2", 5),
        ([True, 5, 3, None], "unknown protocol version True", 5),
        ([1.0, 5, 3, None], "unknown protocol version 1.0", 5),
        (["1", 5, 3, None], "unknown protocol version '1'", 5),
        ([None, 5, 3, None], "unknown protocol version None", 5),
        (["v" * 10_000, 5, 3, None], "unknown protocol version", 5),
        ([1, 5, "check", None], "op is an integer", 5),
        ([1, 5, None, None], "op is an integer", 5),
        ([1, 5, True, None], "op is an integer", 5),
        ([1, 5, 1.0, None], "op is an integer", 5),
        ([1, 5, 3, None, 0], "budget is a positive integer of ms, or nil", 5),
        ([1, 5, 3, None, -1], "budget is a positive integer", 5),
        ([1, 5, 3, None, 2**63], "budget is a positive integer", 5),
        ([1, 5, 3, None, True], "budget is a positive integer", 5),
        ([1, 5, 3, None, 1.5], "budget is a positive integer", 5),
        ([1, 5, 3, None, "1"], "budget is a positive integer", 5),
        ([1, 5, 3, None, None, 1], "context is a W3C traceparent as text, or nil", 5),
        ([1, 5, 3, None, None, b"00-ab"], "context is a W3C traceparent as text, or nil", 5),
        ([1, 5, 3, None, None, ["00-ab"]], "context is a W3C traceparent as text, or nil", 5),
        ([2, 5, 3, None, None, 1], "unknown protocol version 2", 5),
    ],
)
def test_envelopes_that_are_wrong(value: object, why: str, request_id: int) -> None:
    """A wrong envelope is refused in few words, with the request's id where it could be read."""
    with pytest.raises(BadFrame) as caught:
        open_request(pack(value))
    assert why in caught.value.why
    assert len(caught.value.why) < 120
    assert caught.value.request_id == request_id


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # a byte that msgpack never uses
        b"\x94\x01",  # an array that ends early
        pack((1, 1, 3, None)) + b"\0",
        pack((1, 1, 3, None)) * 2,
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million elements
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 5000,  # nested deeper than msgpack goes
        pack([0] * 1001),
        pack(dict.fromkeys(range(1001), 0)),
        b"\x81\x90\xc0",  # a map whose key is an array
        b"\x81\x81\x01\x01\xc0",  # a map whose key is a map
    ],
    ids=lambda body: repr(body[:12]),
)
def test_bytes_that_are_no_message(body: bytes) -> None:
    """Bytes that msgpack cannot read, or only beyond bounds, are a bad frame and nothing else."""
    with pytest.raises(BadFrame) as caught:
        open_request(body)
    assert caught.value.request_id == 0
    with pytest.raises(BadFrame):
        open_answer(body)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_bad_frame(body: bytes) -> None:
    """No bytes raise anything but BadFrame."""
    for opened, length in ((open_request, 5), (open_answer, 4)):
        try:
            assert len(opened(body)) == length
        except BadFrame as error:
            assert error.why  # noqa: PT017  either outcome is right; nothing else may come


@pytest.mark.parametrize(
    "value", [None, 7, [], [1, 1, 0, None], [1, 1, 0, None, "n", 0], [2, 1, 0, None, "n"], ["1", 1, 0, None, "n"]]
)
def test_answers_that_are_wrong(value: object) -> None:
    """An answer of another shape or version is refused."""
    with pytest.raises(BadFrame, match="not an answer of protocol version 1"):
        open_answer(pack(value))


def test_bytes_that_are_no_text_go_and_come_back() -> None:
    """Text that is not UTF-8 opens as lone surrogates, and the same bytes go back in an answer."""
    odd = b"\xa2a\xff"  # a msgpack string of two bytes
    assert unpack(odd) == "a\udcff"
    assert odd in Packer().answer(1, Outcome.REFUSED, unpack(odd))


def test_numbers_have_the_protocols_values() -> None:
    """The numbers on the wire stay what they are."""
    asked = {"CHECK": 1, "RESET": 2, "PING": 3, "INFO": 4, "CLOCK": 5, "PEERS": 6, "REPORT": 7, "ASK": 8, "TOP": 9}
    assert {op.name: int(op) for op in Op} == asked
    assert {outcome.name: int(outcome) for outcome in Outcome} == {"ANSWERED": 0, "REFUSED": 1, "FATAL": 2}
