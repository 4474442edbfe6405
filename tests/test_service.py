"""The operations of one node, through frames."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from sidecar.calendar import LAST_INSTANT
from sidecar.clock import Clock, ManualClock, SystemClock
from sidecar.service import Service
from sidecar.table import Table
from sidecar.wire import BadFrame, Op, Outcome, frame, open_answer
from tests.helpers import INT64_MAX, INT64_MIN, Nobody, O, T, U, answer, call, fields, pack

ERROR = 2


def make(clock: Clock | None = None) -> Service:
    """A service whose facts are a version."""
    return Service(Table(), clock or ManualClock(T), "node-1", lambda: {"version": "9.9"})


@pytest.fixture
def service() -> Service:
    """A node with a manual clock at T."""
    return make()


# --- CHECK


@pytest.mark.parametrize("length", range(5, 10))
def test_a_request_may_leave_out_what_has_a_default(service: Service, length: int) -> None:
    """Five to nine fields are a request; what is left out is a token bucket's, plain and now."""
    found = call(service, T, Op.CHECK, [fields()[:length]], request_id=77)
    assert found == (77, Outcome.ANSWERED, [[U, 10, 9, T + 1000, 0]], "node-1")


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"hits": 11}, [O, 10, 10, T + 1000, 1000]),
        ({"hits": 11, "behavior": 32}, [O, 10, 0, T + 1000, 1000]),
        ({"hits": 0}, [U, 10, 10, T + 1000, 0]),
        ({"hits": -5}, [U, 10, 15, T + 1000, 0]),
        ({"limit": 0}, [O, 0, 0, T + 1000, 1000]),
        ({"duration": 0, "behavior": 4}, [U, 10, 9, T + 39_999, 0]),
        ({"algorithm": 1, "burst": 20}, [U, 10, 19, T + 100, 0]),
        ({"created_at": T - 500}, [U, 10, 9, T + 500, 0]),
        ({"hits": INT64_MIN, "limit": INT64_MAX, "duration": INT64_MAX}, [U, INT64_MAX, INT64_MAX, INT64_MAX, 0]),
    ],
)
def test_every_field_of_a_request_counts(service: Service, changed: dict[str, int], verdict: list[int]) -> None:
    """Each field reaches the bucket from its place in the array."""
    assert call(service, T, Op.CHECK, [fields(**changed)]).payload == [verdict]


BAD_REQUESTS: list[tuple[object, str]] = [
    (fields(name=""), "field 'name' cannot be empty"),
    (fields(name=b"n"), "field 'name' must be a string, not bytes"),
    (fields(unique_key="k" * 1025), "field 'unique_key' has 1025 bytes"),
    (fields(unique_key="\udcff"), "field 'unique_key' is not valid UTF-8"),
    (fields(unique_key=None), "field 'unique_key' must be a string, not NoneType"),
    (fields(unique_key=["k"]), "field 'unique_key' must be a string, not tuple"),
    (fields(hits=True), "field 'hits' must be an integer, not bool"),
    (fields(hits=2**63), "field 'hits' must lie in"),
    (fields(limit=-1), "field 'limit' must lie in"),
    (fields(limit=10.0), "field 'limit' must be an integer, not float"),
    (fields(limit=[10]), "field 'limit' must be an integer, not tuple"),
    (fields(limit={}), "field 'limit' must be an integer, not dict"),
    (fields(limit=float("nan")), "field 'limit' must be an integer, not float"),
    (fields(duration="1s"), "field 'duration' must be an integer, not str"),
    (fields(algorithm=2), "unknown algorithm 2"),
    (fields(algorithm=None), "field 'algorithm' must be an integer, not NoneType"),
    (fields(behavior=64), "unknown behavior 64"),
    (fields(behavior=4, duration=6), "duration 6 is no Gregorian interval"),
    (fields(burst=2**63), "field 'burst' must lie in"),
    (fields(created_at="now"), "field 'created_at' must be an integer, not str"),
    (fields()[:4], "a request is an array of 5 to 10 elements"),
    ((*fields(), None), "field 'fallback' must be an integer"),
    ((*fields(), 5), "field 'fallback' must lie in 0..4"),
    ((*fields(), 0, 0), "a request is an array of 5 to 10 elements"),
    ((), "a request is an array of 5 to 10 elements"),
    (None, "a request is an array of 5 to 10 elements"),
    (7, "a request is an array of 5 to 10 elements"),
    ("request", "a request is an array of 5 to 10 elements"),
    ("nine char", "a request is an array of 5 to 10 elements"),
    (b"nine char", "a request is an array of 5 to 10 elements"),
    ({"name": "n"}, "a request is an array of 5 to 10 elements"),
]


@pytest.mark.parametrize(("bad", "why"), BAD_REQUESTS, ids=lambda value: ascii(value)[:40])
def test_a_bad_request_among_good_ones(service: Service, bad: object, why: str) -> None:
    """A request that is none gets its own error in its place; those around it are counted as if it were not there."""
    found = call(service, T, Op.CHECK, [fields(), bad, fields()])
    assert found.outcome == Outcome.ANSWERED
    first, (status, *zeros, owner, degraded, error), last = found.payload
    assert first == [U, 10, 9, T + 1000, 0]
    assert last == [U, 10, 8, T + 1000, 0]
    assert (status, zeros, owner, degraded) == (ERROR, [0, 0, 0, 0], None, False)
    assert error.startswith(why)
    assert len(error) < 120


def test_requests_of_one_frame_are_judged_in_order(service: Service) -> None:
    """A frame may ask for one bucket many times, each request after the one before."""
    found = call(service, T, Op.CHECK, [fields(limit=2)] * 4)
    assert [(status, left) for status, _, left, _, _ in found.payload] == [(U, 1), (U, 0), (O, 0), (O, 0)]


def test_the_most_requests_in_a_frame(service: Service) -> None:
    """A check holds up to 1,000 requests, all answered."""
    found = call(service, T, Op.CHECK, [fields(unique_key=f"k{number}", hits=number) for number in range(1000)])
    assert [left for _, _, left, _, _ in found.payload] == [max(0, 10 - n) if n <= 10 else 10 for n in range(1000)]


@pytest.mark.parametrize("payload", [None, 7, "text", {}, [], ()])
def test_a_check_without_requests_is_a_bad_frame(service: Service, payload: object) -> None:
    """The payload of a check is an array of at least one request."""
    with pytest.raises(BadFrame) as caught:
        call(service, T, Op.CHECK, payload, request_id=5)
    assert caught.value.request_id == 5


def test_a_check_of_too_many_requests_is_a_bad_frame(service: Service) -> None:
    """1,001 requests are refused whole, and none of them is counted."""
    with pytest.raises(BadFrame):
        call(service, T, Op.CHECK, [fields()] * 1001)
    assert call(service, T, Op.CHECK, [fields(hits=0)]).payload[0][2] == 10


# --- RESET


def test_a_reset_forgets_one_bucket(service: Service) -> None:
    """The answer tells whether there was a bucket; the next request opens a new one."""
    call(service, T, Op.CHECK, [fields(hits=10), fields(unique_key="other", hits=10)])
    assert call(service, T, Op.RESET, ("n", "k"), request_id=8) == (8, Outcome.ANSWERED, True, "node-1")
    assert call(service, T, Op.RESET, ("n", "k")).payload is False
    answers = call(service, T, Op.CHECK, [fields(), fields(unique_key="other")]).payload
    assert [status for status, *_ in answers] == [U, O]


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (("", "k"), "field 'name' cannot be empty"),
        (("n", ""), "field 'unique_key' cannot be empty"),
        (("n", "k" * 1025), "field 'unique_key' has 1025 bytes"),
        (("n", "\udcff"), "field 'unique_key' is not valid UTF-8"),
        ((1, "k"), "field 'name' must be a string, not int"),
        (("n", None), "field 'unique_key' must be a string, not NoneType"),
        ((["n"], {}), "field 'name' must be a string, not tuple"),
    ],
)
def test_a_reset_of_what_is_no_key_is_refused(service: Service, payload: object, why: str) -> None:
    """A wrong name or key is refused with the reason, and the connection may go on."""
    found = call(service, T, Op.RESET, payload, request_id=3)
    assert (found.request_id, found.outcome) == (3, Outcome.REFUSED)
    assert found.payload.startswith(why)


@pytest.mark.parametrize("op", [Op.RESET, Op.CLOCK])
@pytest.mark.parametrize("payload", [None, 7, "nk", [], ["n"], ["n", "k", "more"], {"n": "k"}])
def test_a_payload_that_is_no_pair_is_a_bad_frame(service: Service, op: Op, payload: object) -> None:
    """Reset and clock take an array of two, and nothing else."""
    with pytest.raises(BadFrame) as caught:
        call(service, T, op, payload, request_id=5)
    assert caught.value.request_id == 5


# --- Frames that come again


def check_frame(request_id: int, key: str) -> bytes:
    """A whole frame of one hit of a limit of 10."""
    return frame(pack((1, request_id, int(Op.CHECK), (("n", key, 1, 10, 60_000),), None)))


def ask(service: Service, data: bytes) -> tuple[bool, int]:
    """Whether a frame was known, and what is left by its answer."""
    again = service.answer_again(data, T, Nobody())
    answered = again or service.answer(data[4:], T, Nobody())
    assert answered
    return again is not None, open_answer(answered[4:])[2][0][2]


def test_what_is_asked_again_stays_known_whatever_else_comes(service: Service) -> None:
    """Of many more frames than are remembered, those that keep coming are known; what is remembered is bounded."""
    assert ask(service, check_frame(1, "kept")) == (False, 9)
    for number in range(50_000):
        ask(service, check_frame(1, f"account:{number}"))
        if number % 10_000 == 0:
            assert ask(service, check_frame(2, "kept")) == (True, 8 - number // 10_000)
    assert len(service._known) + len(service._known_before) <= 2 * 16_384
    assert ask(service, check_frame(1, "account:0")) == (False, 8)
    assert ask(service, check_frame(1, "account:49999")) == (True, 8)


def test_a_known_frame_with_a_wrong_id_is_not_answered(service: Service) -> None:
    """An id of 0 is none, also before a request that is known in every other byte, now or from the memory before."""
    for before in (False, True):
        ask(service, check_frame(1, "k"))
        if before:
            service._known, service._known_before = {}, service._known
        assert service.answer_again(check_frame(0, "k"), T, Nobody()) is None


# --- PING, INFO and unknown operations


@pytest.mark.parametrize("payload", [None, 1, [1, 2], "anything"])
def test_a_ping_is_answered(service: Service, payload: object) -> None:
    """A ping's answer tells the node, whatever the payload."""
    assert call(service, T, Op.PING, payload, request_id=9) == (9, Outcome.ANSWERED, None, "node-1")


@pytest.mark.parametrize(("clock", "name"), [(ManualClock(T), "manual"), (SystemClock(lambda: 0, lambda: 0), "system")])
def test_info_tells_the_clock_and_the_facts(clock: Clock, name: str) -> None:
    """Info tells the instant it was asked, the kind of clock, and what the daemon adds."""
    found = call(make(clock), T + 5, Op.INFO, None)
    assert (found.outcome, found.node) == (Outcome.ANSWERED, "node-1")
    assert found.payload["now"] == T + 5
    assert found.payload["clock"] == name
    assert found.payload["version"] == "9.9"


def test_info_counts_what_was_decided(service: Service) -> None:
    """Every request counts once, as admitted, refused or wrong; buckets are counted by the table."""
    call(service, T, Op.CHECK, [fields(hits=10), fields(hits=1), fields(hits=0), fields(limit=-1), None])
    call(service, T, Op.CHECK, [fields(unique_key="other")])
    call(service, T, Op.RESET, ("n", "other"))
    counters = call(service, T, Op.INFO, None).payload["counters"]
    assert counters == {
        "under_limit": 2,
        "over_limit": 2,
        "errors": 2,
        "buckets": 1,
        "created": 2,
        "ended": 0,
        "evicted": 0,
        "evicted_exhausted": 0,
        "reset": 1,
    }


@pytest.mark.parametrize("op", [0, 7, -1, 255, INT64_MAX])
def test_an_unknown_operation_is_a_bad_frame(service: Service, op: int) -> None:
    """An op that this release does not know is told with the frame's id."""
    with pytest.raises(BadFrame, match=f"unknown op {op}") as caught:
        call(service, T, op, None, request_id=5)
    assert caught.value.request_id == 5


@pytest.mark.parametrize("body", [b"", b"\xc1", pack([1, 0, 3, None]), pack([2, 1, 3, None])])
def test_a_bad_envelope_is_a_bad_frame(service: Service, body: bytes) -> None:
    """What is no request frame never reaches an operation."""
    with pytest.raises(BadFrame):
        answer(service, T, body)


# --- CLOCK


def test_a_manual_clock_is_set_and_advanced() -> None:
    """The answer is the clock's new time; setting may also go back."""
    clock = ManualClock(T)
    service = make(clock)
    assert call(service, T, Op.CLOCK, (1, 250)).payload == clock.now() == T + 250
    assert call(service, T, Op.CLOCK, (1, 0)).payload == clock.now() == T + 250
    assert call(service, T, Op.CLOCK, (0, T - 5)).payload == clock.now() == T - 5
    assert call(service, T, Op.CLOCK, (0, LAST_INSTANT)).payload == clock.now() == LAST_INSTANT


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ((2, 1), "field 'how' must lie in 0..1"),
        ((-1, 1), "field 'how' must lie in 0..1"),
        ((True, 1), "field 'how' must be an integer, not bool"),
        (("set", 1), "field 'how' must be an integer, not str"),
        ((0, -1), "field 'amount' must lie in 0.."),
        ((1, -1), "field 'amount' must lie in 0.."),
        ((0, 2**63), "field 'amount' must lie in 0.."),
        ((0, 1.5), "field 'amount' must be an integer, not float"),
        ((0, None), "field 'amount' must be an integer, not NoneType"),
        ((0, LAST_INSTANT + 1), f"the clock can be set to 0..{LAST_INSTANT}, not {LAST_INSTANT + 1}"),
        ((1, LAST_INSTANT), "the clock can be set to 0.."),
        ((1, INT64_MAX), "the clock can be set to 0.."),
    ],
)
def test_a_manual_clock_is_not_moved_out_of_range(payload: object, why: str) -> None:
    """A wrong time is refused with the reason, and the clock stays."""
    clock = ManualClock(T)
    found = call(make(clock), T, Op.CLOCK, payload)
    assert found.outcome == Outcome.REFUSED
    assert found.payload.startswith(why)
    assert clock.now() == T


@pytest.fixture
def ticks() -> Iterator[int]:
    """Nanoseconds that pass by one a reading."""
    return count(T * 1_000_000)


@pytest.mark.parametrize("payload", [(0, T), (1, 5), (9, 9)])
def test_a_system_clock_is_not_moved(ticks: Iterator[int], payload: object) -> None:
    """A daemon with the system's clock refuses and says how to start one that can be moved."""
    found = call(make(SystemClock(lambda: next(ticks), lambda: next(ticks))), T, Op.CLOCK, payload)
    assert found.outcome == Outcome.REFUSED
    assert "--clock manual:" in found.payload
