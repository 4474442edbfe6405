"""Buckets as plain values, and charges that are not judged: what travels between nodes."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from sidecar.bucket import Bucket, State, make
from sidecar.calendar import LAST_INSTANT, Calendar
from sidecar.errors import InvalidRequest
from sidecar.table import Table
from tests.helpers import (
    DRAIN,
    GREGORIAN,
    INT64_MAX,
    INT64_MIN,
    LEAKY,
    NOON,
    RESET,
    TOKEN,
    O,
    T,
    U,
    ask,
    decide,
    fields,
)
from tests.test_model import EXTREMES, HISTORIES, SKEW, SOME, STARTS, Step

KEYS = [("a", "c"), ("a", "b_c"), ("a_b", "c"), ("a_b", "b_c")]


def sent(state: State) -> Any:
    """The state as it comes out at the other end of a link."""
    return msgpack.unpackb(msgpack.packb(state), use_list=False)


def held(table: Table, name: str = "n", unique_key: str = "k") -> Bucket:
    """A bucket of the table, by way of its state."""
    state = table.state(name, unique_key)
    assert state is not None
    return make(state, Calendar())


def charge(table: Table, now: int, at: int | None = None, refused: bool = False, **values: Any) -> State:
    """Charge `fields(**values)`."""
    return table.charge(now, fields(**values), at, refused)


# --- There and back


def _copied(start: int, before: list[Step], after: list[Step]) -> None:
    table = Table(max_clock_skew=SKEW)
    now = start
    for step in before:
        now += step.wait
        decide(table, now, step.request(now))
    copy = Table(max_clock_skew=SKEW)
    for key in KEYS:
        state = table.state(*key)
        if state is not None:
            assert sent(state) == state
            copy.adopt(now, *key, sent(state))
            assert copy.state(*key) == state
    assert len(copy) == len(table)
    for step in after:
        now += step.wait
        request = step.request(now)
        assert decide(copy, now, request) == decide(table, now, request)
        assert copy.state(*request[:2]) == table.state(*request[:2])


@given(start=st.sampled_from(STARTS), before=HISTORIES, after=HISTORIES)
@SOME
def test_a_copy_answers_as_the_bucket_it_came_from(start: int, before: list[Step], after: list[Step]) -> None:
    """A bucket sent elsewhere goes on as if nothing had happened: every answer and the state after it are the same."""
    _copied(start, before, after)


@given(before=EXTREMES, after=EXTREMES)
@SOME
def test_the_largest_numbers_travel(before: list[Step], after: list[Step]) -> None:
    """Levels and counts past int64 arrive as they were."""
    _copied(T, before, after)


@pytest.mark.parametrize("start", [0, LAST_INSTANT])
@pytest.mark.parametrize("duration", range(6))
@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_states_at_the_ends_of_time_travel(algorithm: int, duration: int, start: int) -> None:
    """Whatever a clock may show and a caller may date, the state can be adopted."""
    table, copy = Table(), Table()
    for created_at in (start - 10_000, start + 10_000):
        ask(table, start, algorithm=algorithm, behavior=GREGORIAN, duration=duration, created_at=created_at)
        state = table.state("n", "k")
        assert state is not None
        copy.adopt(start, "n", "k", sent(state))
        assert copy.state("n", "k") == state


TOKEN_STATE: tuple[Any, ...] = (0, 10, 1000, 0, 0, False, T + 1000, 3)
LEAKY_STATE: tuple[Any, ...] = (1, 10, 1000, 0, 0, False, T, 3000, 1000)


@pytest.mark.parametrize("state", [TOKEN_STATE, LEAKY_STATE])
@pytest.mark.parametrize("odd", [None, "1", 1.0, True, 2**70, -(2**70), [], b"", b"\1" * 33, (1,)])
def test_no_odd_value_makes_a_bucket(state: tuple[Any, ...], odd: object) -> None:
    """A value of another type or size, in any place, is refused, and the table stays as it was."""
    for place in range(len(state)):
        if odd is True and place == 5:
            continue
        table = Table()
        with pytest.raises(InvalidRequest):
            table.adopt(T, "n", "k", (*state[:place], odd, *state[place + 1 :]))
        assert len(table) == 0


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        "12345678",
        (),
        TOKEN_STATE[:7],
        (*TOKEN_STATE, 1),  # a leaky bucket's size
        LEAKY_STATE[:8],
        (2, *TOKEN_STATE[1:]),
        (0, -1, *TOKEN_STATE[2:]),
        (*TOKEN_STATE[:3], RESET, *TOKEN_STATE[4:]),
        (*TOKEN_STATE[:2], 6, GREGORIAN, *TOKEN_STATE[4:]),  # no such interval
        (*TOKEN_STATE[:6], 2**63, 0),  # a window that starts when no calendar goes
        (*TOKEN_STATE[:6], INT64_MIN, 0),
        (*LEAKY_STATE[:6], INT64_MAX, 0, 1000),
        (*LEAKY_STATE[:7], -1, 1000),
        (*LEAKY_STATE[:8], 999),  # not the window's length
        (*LEAKY_STATE[:8], 0),
        (1, 10, 0, 0, 0, False, T, 5, 0),  # a level in units of nothing
        (1, 10, 2, GREGORIAN, 0, False, T, 5, 0),
        (1, 10, 2, GREGORIAN, 0, False, T, 5, 2**62),
    ],
)
def test_no_nonsense_makes_a_bucket(state: object) -> None:
    """What no bucket exports is refused before anything is done."""
    with pytest.raises(InvalidRequest):
        make(state, Calendar())
    table = Table()
    with pytest.raises(InvalidRequest):
        table.adopt(T, "n", "k", state)
    assert len(table) == 0


@given(
    st.lists(
        st.one_of(
            st.integers(),
            st.integers(-1, 3),
            st.booleans(),
            st.sampled_from([T, 1000, INT64_MAX, 2**64 - 1]),
            st.binary(max_size=34),
            st.none(),
        ),
        max_size=10,
    )
)
@SOME
def test_whatever_makes_a_bucket_can_be_asked(values: list[object]) -> None:
    """A state is refused or gives a bucket that answers: nothing in between."""
    table = Table()
    try:
        table.adopt(T, "n", "k", tuple(values))
    except InvalidRequest:
        event("refused")
        return
    event("taken")
    for behavior in (0, GREGORIAN, RESET):
        ask(table, T, behavior=behavior, duration=4)
        ask(table, T, behavior=behavior, duration=4, algorithm=LEAKY)
    table.sweep(T, 10)


def test_an_adopted_bucket_replaces_the_one_that_is_there() -> None:
    """Of two states the last one adopted counts, whatever the algorithm; a frame's memory of the old one is void."""
    table, other = Table(), Table()
    ask(table, T, hits=3)
    known = table.find(fields())
    assert known is not None
    ask(other, T, hits=10, algorithm=LEAKY)
    state = other.state("n", "k")
    table.adopt(T, "n", "k", state)
    assert len(table) == 1
    assert table.judge(*known, T) is None
    assert ask(table, T, algorithm=LEAKY)[0] == O


def test_an_adopted_bucket_counts_as_any_new_one() -> None:
    """It makes room in a full table, and an exhausted one is kept before one with tokens."""
    table, other = Table(2), Table()
    ask(other, T, hits=10, duration=9999)
    exhausted = other.state("n", "k")
    for key in "abc":
        table.adopt(T, "n", key, exhausted if key == "a" else (0, 10, 9999, 0, 0, False, T + 9999, 3))
    assert len(table) == 2
    assert table.counters.evicted == 1
    assert table.state("n", "a") == exhausted
    assert table.state("n", "b") is None


def test_there_is_no_state_of_no_bucket() -> None:
    """A bucket that is not held has no state, and asking makes none."""
    table = Table()
    assert table.state("n", "k") is None
    assert len(table) == 0


@pytest.mark.parametrize("key", [("", "k"), ("n", ""), (1, "k"), ("n", None), ("n" * 1025, "k")])
def test_a_state_needs_a_name_and_a_key(key: tuple[Any, Any]) -> None:
    """A bucket is not adopted under what no request could name."""
    with pytest.raises(InvalidRequest):
        Table().adopt(T, *key, TOKEN_STATE)


# --- Charges


@given(start=st.sampled_from(STARTS), steps=HISTORIES)
@SOME
def test_a_charge_does_what_the_admitted_request_did(start: int, steps: list[Step]) -> None:
    """Where a request would be admitted, charging it leaves the very bucket that deciding it leaves."""
    decided, charged = Table(max_clock_skew=SKEW), Table(max_clock_skew=SKEW)
    now = start
    for step in steps:
        now += step.wait
        request = step.request(now)
        key = request[:2]
        status = decide(decided, now, request)[0]
        if status == U:
            event("admitted")
            assert charged.charge(now, request) == decided.state(*key)
            assert charged.state(*key) == decided.state(*key)
        else:
            state = decided.state(*key)
            charged.adopt(now, *key, state)


@given(start=st.sampled_from(STARTS), steps=HISTORIES)
@SOME
def test_any_history_can_be_charged(start: int, steps: list[Step]) -> None:
    """No charge is refused, each is counted, and its state can be adopted elsewhere."""
    table, copy = Table(max_clock_skew=SKEW), Table(max_clock_skew=SKEW)
    now = start
    for step in steps:
        now += step.wait
        request = step.request(now)
        state = table.charge(now, request, None, step.hits > step.limit)
        copy.adopt(now, *request[:2], sent(state))
        assert copy.state(*request[:2]) == table.state(*request[:2]) == state


@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_hits_beyond_the_limit_are_remembered(algorithm: int) -> None:
    """Consumed may pass the limit: the bucket is empty until refunds or a raised limit make up for all of it."""
    table = Table()
    terms: dict[str, Any] = {"algorithm": algorithm, "duration": 10_000}
    charge(table, T, hits=8, **terms)
    charge(table, T, hits=7, **terms)
    assert ask(table, T, hits=0, **terms)[:3] == (U, 10, 0)  # nothing has been refused yet
    assert ask(table, T, hits=1, **terms)[0] == O
    assert ask(table, T, hits=0, **terms)[0] == O
    assert ask(table, T, hits=-5, **terms)[:3] == (U, 10, 0)
    assert ask(table, T, hits=1, **terms)[0] == O
    assert ask(table, T, hits=-1, **terms)[:3] == (U, 10, 1)
    assert ask(table, T, hits=0, **{**terms, "limit": 20})[2] == 11
    assert ask(table, T, hits=0, **terms)[2] == 1


def test_a_level_past_the_capacity_leaks_as_any_other() -> None:
    """15 of 10 tokens at 10 a second: a token is there after 600 ms, and the bucket is full after 1500."""
    table = Table()
    charge(table, T, hits=15, algorithm=LEAKY)
    assert ask(table, T, hits=1, algorithm=LEAKY) == (O, 10, 0, T + 1500 - 500, 600)
    assert ask(table, T + 599, hits=0, algorithm=LEAKY)[0] == O
    assert ask(table, T + 600, hits=0, algorithm=LEAKY)[:3] == (U, 10, 1)
    assert ask(table, T + 1500, hits=0, algorithm=LEAKY)[2:4] == (10, T + 1500)


@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_refunds_resets_and_limits_are_charged_in_order(algorithm: int) -> None:
    """What travels with hits does what it would have done as a request."""
    table = Table()
    terms: dict[str, Any] = {"algorithm": algorithm, "duration": 10_000}
    charge(table, T, hits=15, **terms)
    charge(table, T, hits=-7, **terms)
    assert ask(table, T, hits=0, **terms)[2] == 2
    charge(table, T, hits=1, **{**terms, "limit": 12})
    assert ask(table, T, hits=0, **terms)[2] == 1
    charge(table, T, hits=5, behavior=RESET, **terms)
    assert ask(table, T, hits=0, **terms)[2] == 10
    charge(table, T, hits=4, algorithm=1 - algorithm)
    assert ask(table, T, hits=0, algorithm=1 - algorithm)[2] == 6


@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_a_refusal_elsewhere_is_remembered_while_nothing_is_left(algorithm: int) -> None:
    """It charges nothing, but a peek says OVER_LIMIT, as if this node had refused; with tokens left it says nothing."""
    table = Table()
    charge(table, T, hits=9, algorithm=algorithm)
    charge(table, T, hits=4, refused=True, algorithm=algorithm)
    assert ask(table, T, hits=0, algorithm=algorithm)[:3] == (U, 10, 1)
    charge(table, T, hits=1, algorithm=algorithm)
    assert ask(table, T, hits=0, algorithm=algorithm)[0] == U
    charge(table, T, hits=4, refused=True, algorithm=algorithm)
    assert ask(table, T, hits=0, algorithm=algorithm)[0] == O


@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_a_drain_elsewhere_empties_the_bucket(algorithm: int) -> None:
    """A refusal with DRAIN_OVER_LIMIT takes what is left, and gives nothing back of what was charged beyond."""
    table = Table()
    charge(table, T, hits=4, algorithm=algorithm)
    charge(table, T, hits=99, refused=True, behavior=DRAIN, algorithm=algorithm)
    assert ask(table, T, hits=0, algorithm=algorithm)[:3] == (O, 10, 0)
    charge(table, T, hits=3, algorithm=algorithm)
    state = charge(table, T, hits=99, refused=True, behavior=DRAIN, algorithm=algorithm)
    assert state[7] == (13_000 if algorithm else 13)


@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_a_raised_limit_ends_the_memory_of_a_refusal(algorithm: int) -> None:
    """Also where the raise came with hits that took all it gave."""
    table = Table()
    ask(table, T, hits=10, algorithm=algorithm)
    ask(table, T, hits=1, algorithm=algorithm)
    charge(table, T, hits=1, limit=11, algorithm=algorithm)
    assert ask(table, T, hits=0, limit=11, algorithm=algorithm)[:3] == (U, 11, 0)


def test_nothing_is_remembered_of_a_window_of_no_length() -> None:
    """Not even a refusal elsewhere."""
    assert charge(Table(), T, refused=True, limit=0, duration=0, algorithm=LEAKY)[5] is False


def test_hits_of_a_window_that_is_over_are_not_charged_to_the_next() -> None:
    """A window is known by its end, so that late reports and nodes with other clocks cannot fill the wrong one."""
    table = Table()
    ask(table, T, hits=1)
    ask(table, T + 1000, hits=1)  # the second window
    charge(table, T + 1000, at=T + 1000, hits=5)
    assert ask(table, T + 1000, hits=0)[2:4] == (9, T + 2000)
    charge(table, T + 1000, at=T + 2000, hits=5)
    assert ask(table, T + 1000, hits=0)[2:4] == (4, T + 2000)
    charge(table, T + 1000, at=T + 1000, hits=0, behavior=RESET)
    assert ask(table, T + 1000, hits=0)[2:4] == (4, T + 2000)


def test_a_charge_restores_a_window_that_its_owner_lost() -> None:
    """An owner that knows no bucket learns of the window from the nodes, with the end that they told their callers."""
    table = Table()
    charge(table, T + 300, at=T + 1000, hits=4)
    assert ask(table, T + 300, hits=0) == (U, 10, 6, T + 1000, 0)
    ended = Table()
    charge(ended, T + 1000, at=T + 1000, hits=4)  # over by now
    assert ask(ended, T + 1000, hits=0) == (U, 10, 10, T + 2000, 0)
    charge(table, T + 300, at=NOON + 60_000, hits=4, duration=0, behavior=GREGORIAN, unique_key="g")
    assert table.state("n", "g") is not None


def test_no_clock_that_runs_ahead_freezes_a_bucket() -> None:
    """A window or an instant far in the future is taken for one within the clock skew."""
    table = Table(max_clock_skew=500)
    charge(table, T, at=T + 10**9, hits=4)
    assert ask(table, T, hits=0)[3] == T + 500 + 1000
    charge(table, T, at=T + 10**9, hits=10, algorithm=LEAKY)
    assert ask(table, T, hits=0, algorithm=LEAKY)[3] == T + 500 + 1000


def test_a_leaky_bucket_takes_late_hits_for_a_window() -> None:
    """Hits from before the bucket's time are charged as of it, until they would have leaked anyway."""
    table = Table(max_clock_skew=500)
    ask(table, T, hits=1, algorithm=LEAKY)
    charge(table, T, at=T - 1499, hits=5, algorithm=LEAKY)
    assert ask(table, T, hits=0, algorithm=LEAKY)[2] == 4
    charge(table, T, at=T - 1500, hits=3, algorithm=LEAKY)
    assert ask(table, T, hits=0, algorithm=LEAKY)[2] == 4
    wide: dict[str, Any] = {"algorithm": LEAKY, "burst": 40, "unique_key": "wide"}  # takes 4 s to leak
    ask(table, T, hits=1, **wide)
    charge(table, T, at=T - 4499, hits=5, **wide)
    charge(table, T, at=T - 4500, hits=5, **wide)
    assert ask(table, T, hits=0, **wide)[2] == 34


@pytest.mark.parametrize("at", [True, 1.5, "1", INT64_MIN, 2**64, INT64_MAX])
@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_a_charge_of_no_instant_is_refused(algorithm: int, at: Any) -> None:
    """An instant that no calendar knows makes no bucket."""
    table = Table()
    with pytest.raises(InvalidRequest):
        charge(table, T, at=at, algorithm=algorithm)
    assert len(table) == 0


@pytest.mark.parametrize("odd", [{"hits": 1.0}, {"limit": True}, {"algorithm": 2}, {"name": ""}, {"duration": None}])
def test_a_charge_that_is_no_request_is_refused(odd: dict[str, Any]) -> None:
    """Values that are no request are refused though the same terms in the right types are known."""
    table = Table()
    ask(table, T, limit=1)
    ask(table, T, hits=1)
    before = table.state("n", "k")
    with pytest.raises(InvalidRequest):
        charge(table, T, **odd)
    assert table.state("n", "k") == before


def test_charged_buckets_are_used_ones() -> None:
    """A charge counts as a use, and an exhausted bucket is known as such."""
    table = Table(3)
    for key in "abc":
        ask(table, T, unique_key=key, duration=9999)
    charge(table, T, unique_key="a", hits=20, duration=9999)
    charge(table, T, unique_key="b", duration=9999)
    for key in "de":
        ask(table, T, unique_key=key, duration=9999)
    assert [key for key in "abcde" if table.forget("n", key)] == ["a", "d", "e"]
