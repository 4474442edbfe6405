"""The bounded count of hot keys, against an exact one."""

from __future__ import annotations

import random
from collections import Counter as Exact
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.clock import ManualClock
from sidecar.hot import HALF, Counter, HotKeys
from sidecar.messages import Status
from sidecar.service import Service
from sidecar.table import Table
from sidecar.wire import Op, Outcome, Packer
from tests.helpers import LEAKY, RESET, Nobody, T, ask, call, fields

SIGHTINGS = st.lists(st.integers(0, 30) | st.integers(0, 2), max_size=400)


@given(st.integers(1, 12), SIGHTINGS)
def test_every_frequent_key_is_there_and_no_bound_is_wrong(capacity: int, sightings: list[int]) -> None:
    """A key seen more often than total / capacity is held; every count lies within its bounds, and they are no further
    apart than total / capacity."""
    counter: Counter[int] = Counter(capacity)
    for key in sightings:
        counter.see(key)
    exact = Exact(sightings)
    assert counter.total == len(sightings)
    assert len(counter) <= capacity
    for key in range(32):
        at_least, at_most = counter.bounds(key)
        assert at_least <= exact[key] <= at_most
        assert (at_most - at_least) * capacity <= len(sightings)
        assert key in set(counter) or exact[key] * capacity <= len(sightings)


@given(st.lists(SIGHTINGS, min_size=1, max_size=4))
def test_what_is_read_is_the_last_two_halves(halves: list[list[int]]) -> None:
    """With every request looked at, the bounds hold of the current half and the one before, and of no other."""
    hot = HotKeys(8, 0.0, lambda: 0.0, every=1)
    for number, half in enumerate(halves):
        hot.renew(HALF * number)
        for key in half:
            hot.look(("n", str(key)), 0)
    lately = [key for half in halves[-2:] for key in half]
    found = hot.hottest(HALF * len(halves), 100)
    exact = Exact(str(key) for key in lately)
    assert found.requests == len(lately)
    assert found.seconds == HALF * min(len(halves), 2)
    told = {one.key[1]: (one.at_least, one.at_most) for one in found.keys}
    assert all(told[key][0] <= exact[key] <= told[key][1] for key in told)
    assert all(key in told for key in exact if exact[key] * 8 > len(lately))
    assert [one[:2] for one in found.names] == ([("n", len(lately))] if lately else [])


def test_a_silent_half_leaves_nothing() -> None:
    """What was hot before a silence longer than a half is not hot lately."""
    hot = HotKeys(8, 0.0, lambda: 0.0)
    hot.look(("n", "k"), 1)
    hot.renew(2 * HALF)
    assert hot.hottest(2 * HALF, 10) == (0.0, 0, [], [])


def service(every: int, seed: int = 1) -> tuple[Service, HotKeys]:
    """A node that counts hot keys, its chance repeatable."""
    node = Service(Table(), ManualClock(T), "node-1", lambda: {"pid": 1})
    hot = HotKeys(200, 0.0, random.Random(seed).random, every)
    node.count_hot(hot, lambda: 5.0)
    return node, hot


def one_by_one(node: Service, keys: list[str], hits: int) -> None:
    """One-hit frames, most of them answered without decoding."""
    frames = [Packer().request(1, Op.CHECK, [fields(unique_key=key)]) for key in keys]
    for number in range(hits):
        data = frames[number % len(frames)]
        assert node.answer_again(data, T, Nobody()) or node.answer(data[4:], T, Nobody())


def in_frames(node: Service, keys: list[str], hits: int) -> None:
    """Frames of a hundred."""
    for first in range(0, hits, 100):
        batch = [fields(unique_key=keys[number % len(keys)]) for number in range(first, first + 100)]
        call(node, T, Op.CHECK, batch)


@pytest.mark.parametrize("way", [one_by_one, in_frames])
@pytest.mark.parametrize("amount", [1, 32, 100])
def test_looking_at_some_finds_the_share_of_each(way: Callable[..., None], amount: int) -> None:
    """Of keys asked for in turn, each one's share is found to within what chance allows, however their number and that
    of the requests between two looks divide each other."""
    node, hot = service(every=32)
    way(node, [f"k{number}" for number in range(amount)], 64_000)
    found = hot.hottest(5.0, 1000)
    assert found.requests == pytest.approx(64_000, rel=0.05)
    assert len(found.keys) == amount
    looks = 2_000 / amount
    assert all(abs(one.at_least / 32 - looks) <= 6 * looks**0.5 for one in found.keys)


def test_what_is_no_request_is_not_counted() -> None:
    """A request that gets an error names no key, and those after it are looked at as ever."""
    node, hot = service(every=1)
    call(node, T, Op.CHECK, [None, fields(unique_key="good"), fields(limit=-1), ["n"]])
    assert [one.key for one in hot.hottest(5.0, 10).keys] == [("n", "good")]


def test_top_tells_what_is_left_and_changes_nothing() -> None:
    """Top's hottest keys come with what a peek would find, and a peek after many of them finds the same."""
    node, _ = service(every=1)
    call(node, T, Op.CHECK, [fields(hits=8), fields(hits=8), fields(unique_key="l", algorithm=LEAKY, hits=5)])
    before = node.table.state("n", "l")
    for _ in range(3):
        top = call(node, T + 100, Op.TOP, 5).payload
    assert top["cluster"] == {}
    assert top["counters"]["over_limit"] == 1
    assert (top["hot"]["window_ms"], top["hot"]["every"], top["hot"]["requests"]) == (5_000, 1, 3)
    assert top["hot"]["names"] == [["n", 3, 3]]
    assert top["hot"]["keys"] == [["n", "k", 2, 2, [0, 10, 2, T + 1000]], ["n", "l", 1, 1, [0, 10, 6, T + 500]]]
    assert node.table.state("n", "l") == before
    call(node, T, Op.RESET, ("n", "k"))
    assert call(node, T + 100, Op.TOP, 1).payload["hot"]["keys"] == [["n", "k", 2, 2, None]]


@pytest.mark.parametrize("count", [0, 101, -1, True, "5", 1.0, (5,)])
def test_top_of_an_odd_number_is_refused(count: object) -> None:
    """Top tells 1 to 100 keys; any other number is refused, and the connection goes on."""
    node, _ = service(every=1)
    found = call(node, T, Op.TOP, count)
    assert found.outcome == Outcome.REFUSED
    assert "'count'" in found.payload


def test_top_where_nothing_is_counted() -> None:
    """A node that does not count hot keys says nil."""
    node = Service(Table(), ManualClock(T), "node-1", dict)
    call(node, T, Op.CHECK, [fields()])
    assert call(node, T, Op.TOP, None).payload["hot"] is None


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(-3, 12), st.sampled_from([0, 4, RESET])), max_size=8),
    st.integers(0, 1),
    st.integers(0, 3000),
)
def test_a_tables_peek_is_a_peek(asked: list[tuple[int, int, int]], algorithm: int, later: int) -> None:
    """Table.peek tells what a request of no hits under the bucket's terms is then answered, and leaves no trace."""
    table, at, behavior = Table(), T, 0
    for passed, hits, how in asked:
        at += passed
        behavior = how
        ask(table, at, hits=hits, behavior=how, algorithm=algorithm, duration=2 if how == 4 else 1000)
    at += later
    before = table.state("n", "k")
    peeked = table.peek(at, "n", "k")
    assert table.state("n", "k") == before
    if not asked:
        assert peeked is None
        return
    terms = behavior & 4
    answer = ask(table, at, hits=0, behavior=terms, algorithm=algorithm, duration=2 if terms else 1000)
    assert peeked == answer
    assert peeked[0] != Status.ERROR
