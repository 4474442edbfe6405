"""When a batch leaves for a peer, what is in it, and that nothing is lost or doubled on the way."""

from __future__ import annotations

from collections import deque
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_link.batch import Batcher


def filled(items: str, limit: int = 3, window: int = 2, max_queue: int = 100) -> Batcher[str]:
    """A batcher with these one-letter items; capitals are alone."""
    batcher: Batcher[str] = Batcher(limit, window, max_queue)
    for item in items:
        assert batcher.add(item, alone=item.isupper())
    return batcher


def takes(batcher: Batcher[str]) -> list[str]:
    """Every batch that leaves now, none of them returning."""
    return ["".join(batch) for batch in iter(batcher.take, [])]


# --- What leaves at once


@pytest.mark.parametrize(
    ("items", "batches", "left"),
    [
        pytest.param("", [], 0, id="nothing queued, nothing sent"),
        pytest.param("a", ["a"], 0, id="a free link takes one item"),
        pytest.param("ab", ["ab"], 0, id="a free link takes all there is"),
        pytest.param("abc", ["abc"], 0, id="up to the limit"),
        pytest.param("abcd", ["abc"], 1, id="a rest that is no full batch waits"),
        pytest.param("abcdef", ["abc", "def"], 0, id="full batches do not wait"),
        pytest.param("abcdefg", ["abc", "def"], 1, id="a rest behind full batches waits"),
        pytest.param("abcdefghi", ["abc", "def"], 3, id="no more batches than the window are under way"),
        pytest.param("A", ["A"], 0, id="one that is alone"),
        pytest.param("aB", ["a", "B"], 0, id="those before it leave first and do not wait either"),
        pytest.param("aBc", ["a", "B"], 1, id="those behind it gather"),
        pytest.param("AB", ["A", "B"], 0, id="two that are alone leave as two batches"),
        pytest.param("ABCDE", ["A", "B", "C", "D", "E"], 0, id="the window does not hold them"),
        pytest.param("abcdE", ["abc", "d", "E"], 0, id="the limit holds before it too"),
        pytest.param("abcdefghI", ["abc", "def", "gh", "I"], 0, id="nor does the window hold those before it"),
        pytest.param("abCdeF", ["ab", "C", "de", "F"], 0, id="plain ones between two that are alone"),
    ],
)
def test_what_leaves_at_once(items: str, batches: list[str], left: int) -> None:
    """A free link takes what is there, a busy one full batches up to the window, and one that is alone always."""
    batcher = filled(items)
    assert takes(batcher) == batches
    assert len(batcher) == left
    assert batcher.under_way == len(batches)


def test_what_gathered_leaves_when_the_link_is_free_again() -> None:
    """While a batch is under way the next one grows; it leaves when none is under way any more."""
    batcher = filled("a")
    assert takes(batcher) == ["a"]
    batcher.add("b")
    assert takes(batcher) == []
    batcher.add("c")
    assert not batcher.ready
    batcher.returned()
    assert batcher.ready
    assert takes(batcher) == ["bc"]


def test_a_batch_that_is_not_full_waits_for_every_batch_under_way() -> None:
    """With two full batches under way, the rest leaves after the second has returned."""
    batcher = filled("abcdefg")
    assert takes(batcher) == ["abc", "def"]
    batcher.returned()
    assert takes(batcher) == []
    batcher.returned()
    assert takes(batcher) == ["g"]


def test_a_full_window_opens_by_one_for_each_batch_that_returns() -> None:
    """Full batches keep the window filled."""
    batcher = filled("abcdefghijkl")
    assert takes(batcher) == ["abc", "def"]
    batcher.returned()
    assert takes(batcher) == ["ghi"]
    batcher.returned()
    assert takes(batcher) == ["jkl"]


@pytest.mark.parametrize("limit", [1, 2, 999, 1000])
def test_a_batch_never_exceeds_the_limit(limit: int) -> None:
    """2,500 items at once leave in batches of the limit, in order."""
    batcher: Batcher[int] = Batcher(limit, 10_000)
    for item in range(2_500):
        batcher.add(item)
    found = []
    while batch := batcher.take():
        assert len(batch) <= limit
        found += batch
    assert found == list(range(2_500 - len(batcher)))
    assert len(batcher) < limit


# --- A queue that is full


def test_a_full_queue_takes_no_more_and_loses_nothing() -> None:
    """`add` says so, also of one that is alone; what is queued is untouched, and there is room after a take."""
    batcher = filled("ab", max_queue=2)
    assert not batcher.add("c")
    assert not batcher.add("D", alone=True)
    assert len(batcher) == 2
    assert takes(batcher) == ["ab"]
    assert batcher.add("e")
    batcher.returned()
    assert takes(batcher) == ["e"]


# --- A link that broke


@pytest.mark.parametrize("items", ["", "ab", "aBcD", "abcdefghij", "A"])
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_clearing_gives_what_has_not_left_and_starts_anew(items: str, taken: int) -> None:
    """Everything still queued comes out once, in order; then the link counts as free, and nobody is alone."""
    batcher = filled(items)
    sent = "".join("".join(batcher.take()) for _ in range(taken))
    assert sent + "".join(batcher.clear()) == items
    assert (len(batcher), batcher.under_way, batcher.ready, batcher.take()) == (0, 0, False, [])
    for item in "xyZw":
        batcher.add(item, alone=item.isupper())
    assert takes(batcher) == ["xy", "Z"]
    assert batcher.clear() == ["w"]


# --- Whatever happens


@given(
    limit=st.integers(1, 5),
    window=st.integers(1, 4),
    max_queue=st.integers(1, 20),
    steps=st.lists(st.sampled_from(["add", "add", "add", "alone", "take", "take", "returned", "clear"]), max_size=200),
)
def test_nothing_is_lost_or_doubled_and_the_order_is_kept(
    limit: int, window: int, max_queue: int, steps: list[str]
) -> None:
    """Items that were taken in leave exactly once, in the order they came, whatever is done in whatever order;
    no batch is longer than the limit, and one that is alone has its batch for itself."""
    batcher: Batcher[int] = Batcher(limit, window, max_queue)
    numbers = count()
    waiting: deque[int] = deque()
    alone: set[int] = set()
    under_way = 0
    for step in steps:
        assert len(batcher) == len(waiting)
        assert batcher.under_way == under_way
        if step in ("add", "alone"):
            number = next(numbers)
            taken_in = batcher.add(number, alone=step == "alone")
            assert taken_in == (len(waiting) < max_queue)
            if taken_in:
                waiting.append(number)
                if step == "alone":
                    alone.add(number)
        elif step == "take":
            ready = batcher.ready
            batch = batcher.take()
            assert bool(batch) == ready
            assert batch == [waiting.popleft() for _ in batch]
            assert len(batch) <= limit
            assert len(batch) == 1 or not alone.intersection(batch)
            held = alone.intersection(waiting) or alone.intersection(batch)
            if batch and not held and under_way:
                assert len(batch) == limit, "a batch that is not full left a busy link"
                assert under_way < window, "more batches than the window are under way"
            if not batch:
                assert not waiting or (under_way and not held), "something that should leave was held"
                assert under_way >= window or len(waiting) < limit
            under_way += bool(batch)
        elif step == "returned" and under_way:
            batcher.returned()
            under_way -= 1
        elif step == "clear":
            assert batcher.clear() == list(waiting)
            waiting.clear()
            under_way = 0


@given(
    items=st.lists(st.booleans(), max_size=60),
    limit=st.integers(1, 5),
    window=st.integers(1, 4),
)
def test_everything_leaves_in_the_end(items: list[bool], limit: int, window: int) -> None:
    """With batches that return, one after the other, the queue is emptied, in order."""
    batcher: Batcher[int] = Batcher(limit, window)
    for number, alone in enumerate(items):
        batcher.add(number, alone)
    found: list[int] = []
    while len(batcher):
        batches = list(iter(batcher.take, []))
        assert batches, "items wait and nothing is under way"
        for batch in batches:
            found += batch
            batcher.returned()
    assert found == list(range(len(items)))
    assert batcher.under_way == 0
