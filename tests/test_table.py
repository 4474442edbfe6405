"""Which buckets a table keeps: how many, which go first, and that forgetting shows in no answer."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import InvalidRequest
from sidecar.table import Table
from tests.helpers import INT64_MAX, INT64_MIN, LEAKY, RESET, TOKEN, O, T, U, ask, decide, fields

SKEW = 50
LONG = 1_000_000


def fill(table: Table, keys: range, now: int = T, **values: object) -> None:
    """One request for each key, in order."""
    for key in keys:
        ask(table, now, unique_key=f"k{key}", **values)


def held(table: Table, keys: range, name: str = "n") -> list[int]:
    """Which of these keys have a bucket.  Asking forgets them, so it is a test's last step."""
    return [key for key in keys if table.forget(name, f"k{key}")]


# --- A full table


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_a_table_never_holds_more_than_it_may(size: int) -> None:
    """However many keys come, no more than max_buckets are held, and the newest is among them."""
    table = Table(size)
    fill(table, range(3 * size), duration=LONG)
    assert len(table) == table.counters.buckets == size
    assert table.counters.evicted == 2 * size
    assert held(table, range(3 * size)) == list(range(2 * size, 3 * size))


@pytest.mark.parametrize("hits", [1, 10], ids=["with tokens left", "exhausted"])
@pytest.mark.parametrize("size", [2, 40, 64])
@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_an_ended_bucket_goes_before_any_live_one(algorithm: int, size: int, hits: int) -> None:
    """A full table forgets what has ended before it loses a live bucket; it looks at 64 buckets for one."""
    middle = size // 2
    for trial in range(20):  # where a bucket lies depends on its name
        table, name = Table(size, SKEW), f"n{trial}"
        fill(table, range(middle), duration=LONG, name=name, algorithm=algorithm)
        fill(table, range(middle, middle + 1), duration=10, hits=hits, name=name, algorithm=algorithm)
        fill(table, range(middle + 1, size), duration=LONG, name=name, algorithm=algorithm)
        fill(table, range(size, size + 1), now=T + 10 + SKEW, duration=LONG, name=name, algorithm=algorithm)
        counters = table.counters
        assert (counters.ended, counters.evicted, counters.evicted_exhausted) == (1, 0, 0)
        assert held(table, range(size + 1), name) == [key for key in range(size + 1) if key != middle]


def test_a_bucket_that_a_late_request_may_ask_for_has_not_ended() -> None:
    """Within the clock skew after its window, a bucket still counts as live, and its loss is counted."""
    table = Table(2, SKEW)
    fill(table, range(2), duration=10)
    fill(table, range(2, 3), now=T + 10 + SKEW - 1, duration=10)
    assert table.counters.evicted == 1
    assert table.counters.ended == 0


def test_the_least_recently_used_goes_first() -> None:
    """Of buckets with tokens left, the one goes that was asked for longest ago; a peek and a refusal are uses."""
    table = Table(4)
    fill(table, range(4), duration=LONG)
    ask(table, T, unique_key="k0", hits=0, duration=LONG)
    ask(table, T, unique_key="k1", hits=99, duration=LONG)
    fill(table, range(4, 6), duration=LONG)
    assert held(table, range(6)) == [0, 1, 4, 5]


def test_exhausted_buckets_go_last() -> None:
    """An exhausted bucket outlives all that have tokens, or a flood of new keys would buy it a fresh start."""
    table = Table(3)
    fill(table, range(2), duration=LONG, hits=10)
    fill(table, range(2, 100), duration=LONG)
    assert table.counters.evicted_exhausted == 0
    assert ask(table, T, unique_key="k0", duration=LONG)[0] == O
    assert ask(table, T, unique_key="k1", duration=LONG)[0] == O
    fill(table, range(200, 203), duration=LONG, hits=10)  # only now is there nothing else to lose
    assert table.counters.evicted_exhausted == 2
    assert held(table, range(203)) == [200, 201, 202]


@pytest.mark.parametrize("how", [{"hits": -1}, {"limit": 11}, {"behavior": RESET}])
def test_an_exhausted_bucket_with_tokens_again_is_an_ordinary_one(how: dict[str, int]) -> None:
    """A refund, a raised limit or a reset puts a bucket back among those that may go."""
    table = Table(2)
    fill(table, range(2), duration=LONG, hits=10)
    ask(table, T, unique_key="k1", duration=LONG, **{"hits": 0, **how})
    fill(table, range(2, 3), duration=LONG)
    assert held(table, range(3)) == [0, 2]


@dataclass
class Lru:
    """What a table of token buckets must do: a list in order of use, and what each key consumed of 10."""

    size: int
    order: list[int] = field(default_factory=list)
    used: dict[int, int] = field(default_factory=dict)
    created: int = 0
    evicted: int = 0
    evicted_exhausted: int = 0

    def ask(self, key: int, hits: int) -> tuple[int, int]:
        """Status and remaining."""
        if key in self.order:
            self.order.remove(key)
        else:
            self._make_room()
            self.used[key] = 0
            self.created += 1
        self.order.append(key)
        if hits > 10 - self.used[key]:
            return O, 10 - self.used[key]
        self.used[key] += hits
        return U, 10 - self.used[key]

    def _make_room(self) -> None:
        if len(self.order) < self.size:
            return
        spare = [key for key in self.order if self.used[key] < 10]
        if spare:
            self.evicted += 1
        else:
            self.evicted_exhausted += 1
        self.order.remove(spare[0] if spare else self.order[0])


@given(size=st.integers(1, 6), asked=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 11)), max_size=80))
def test_eviction_is_exact(size: int, asked: list[tuple[int, int]]) -> None:
    """Whatever is asked for, just the right bucket is lost each time, and every loss is counted."""
    table, wanted = Table(size), Lru(size)
    for key, hits in asked:
        answer = ask(table, T, unique_key=f"k{key}", hits=hits, duration=LONG)
        assert (answer[0], answer[2]) == wanted.ask(key, hits)
        counters = table.counters
        assert (counters.buckets, counters.created) == (len(wanted.order), wanted.created)
        assert (counters.evicted, counters.evicted_exhausted) == (wanted.evicted, wanted.evicted_exhausted)
    assert held(table, range(10)) == sorted(wanted.order)


@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "forget", "sweep"]), st.integers(0, 12), st.sampled_from([1, 10, 100, LONG])),
        max_size=120,
    )
)
def test_no_bucket_is_lost_uncounted(steps: list[tuple[str, int, int]]) -> None:
    """Buckets made are those held, ended, evicted and reset, whatever happens."""
    table = Table(5, 3)
    now = T
    for what, number, duration in steps:
        now += number
        if what == "ask":
            ask(table, now, unique_key=f"k{number}", hits=number, limit=8, duration=duration)
        elif what == "forget":
            table.forget("n", f"k{number}")
        else:
            table.sweep(now, number * 10)
        counts = table.counters
        gone = counts.ended + counts.evicted + counts.evicted_exhausted + counts.reset
        assert counts.created == counts.buckets + gone
        assert counts.buckets == len(table) <= 5


def test_a_changed_algorithm_needs_no_room() -> None:
    """In a full table, a bucket that changes its algorithm takes its own place and pushes nobody out."""
    table = Table(2)
    fill(table, range(2), duration=LONG)
    assert ask(table, T, unique_key="k0", duration=LONG, algorithm=LEAKY)[2] == 9
    assert table.counters.evicted == 0
    assert held(table, range(2)) == [0, 1]


# --- Sweeping


@pytest.mark.parametrize("budget", [1, 10, 1000])
def test_a_sweep_is_bounded_and_reaches_everything(budget: int) -> None:
    """One sweep forgets no more than its budget; repeated, they forget all that ended and nothing that lives."""
    table = Table(10_000, SKEW)
    fill(table, range(500), duration=10)
    fill(table, range(500, 600), duration=LONG)
    fill(table, range(600, 700), duration=10, algorithm=LEAKY, hits=10)
    forgotten = 0
    for _ in range(1 + 2000 // budget):
        found = table.sweep(T + 10 + SKEW, budget)
        assert 0 <= found <= budget
        forgotten += found
    assert forgotten == table.counters.ended == 600
    assert held(table, range(700)) == list(range(500, 600))


def test_a_sweep_without_a_budget_does_nothing() -> None:
    """A budget of 0 looks at nothing."""
    table = Table(10, 0)
    fill(table, range(10), duration=1)
    assert table.sweep(T + LONG, 0) == 0
    assert len(table) == 10


def test_a_sweep_of_an_empty_table_ends() -> None:
    """A sweep with a budget larger than the table comes back."""
    assert Table().sweep(T, 100_000) == 0


@pytest.mark.parametrize(
    ("terms", "ended"),
    [
        ({"duration": 1000}, 1000),
        ({"duration": 1000, "hits": 10}, 1000),
        ({"duration": 0}, 0),
        ({"duration": 0, "behavior": 4}, 40_000),  # T is at second 20 of its minute
        ({"duration": 1000, "algorithm": LEAKY}, 100),
        ({"duration": 1000, "algorithm": LEAKY, "hits": 0}, 0),
        ({"duration": 1000, "algorithm": LEAKY, "hits": 20, "burst": 20}, 2000),  # burst > limit: past the duration
        ({"duration": 1000, "algorithm": LEAKY, "hits": 1, "limit": 0}, 1000),  # remembers a refusal until reset_time
        ({"duration": 1000, "algorithm": LEAKY, "hits": 0, "limit": 0}, 0),
    ],
)
def test_when_a_bucket_may_be_forgotten(terms: dict[str, int], ended: int) -> None:
    """A token bucket is kept until its window ends, a leaky one until it is full, both for the clock skew longer."""
    table = Table(10, SKEW)
    ask(table, T, **terms)
    assert table.sweep(T + ended + SKEW - 1, 1000) == 0
    assert table.sweep(T + ended + SKEW, 1000) == 1


def test_a_bucket_that_came_back_is_not_swept_for_its_predecessor() -> None:
    """Between two sweeps buckets may go and come anew under the same keys; the new ones stay."""
    table = Table(1000, 0)
    keys = range(300)
    fill(table, keys, duration=1)
    later = T + 10
    while not table.sweep(later, 2):
        pass
    for key in keys:
        table.forget("n", f"k{key}")
    fill(table, keys, now=later, duration=LONG)
    assert table.sweep(later, 10_000) == 0
    assert held(table, keys) == list(keys)


# --- Forgetting by name, keys and memories


def test_forget_drops_one_bucket() -> None:
    """`forget` tells whether there was a bucket, counts it, and the next request opens a new one."""
    table = Table()
    ask(table, T, unique_key="k", hits=10)
    ask(table, T, unique_key="other", hits=4)
    assert not table.forget("n", "unknown")
    assert not table.forget("k", "n")
    assert table.forget("n", "k")
    assert not table.forget("n", "k")
    assert table.counters.reset == 1
    assert ask(table, T, unique_key="k", hits=0)[2] == 10
    assert ask(table, T, unique_key="other", hits=0)[2] == 6


@pytest.mark.parametrize(
    ("one", "other"), [(("a_b", "c"), ("a", "b_c")), (("a", "b"), ("b", "a")), (("ab", "c"), ("a", "bc"))]
)
def test_a_bucket_is_known_by_the_pair(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Name and key that read the same when glued together are two buckets."""
    table = Table()
    assert ask(table, T, name=one[0], unique_key=one[1], hits=10)[2] == 0
    assert ask(table, T, name=other[0], unique_key=other[1], hits=1)[2] == 9
    assert len(table) == 2


def test_a_large_table_finds_all_its_buckets() -> None:
    """With more shards than the least, each of many keys has its own bucket."""
    table = Table(4_000_000)
    for key in range(5000):
        ask(table, T, unique_key=f"k{key}", hits=key, limit=10_000, duration=LONG)
    assert len(table) == 5000
    for key in range(5000):
        assert ask(table, T, unique_key=f"k{key}", hits=0, limit=10_000, duration=LONG)[2] == 10_000 - key


@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_more_terms_and_names_than_are_remembered(algorithm: int) -> None:
    """Past thousands of distinct limits and names, every bucket still answers by its own terms."""
    table = Table()
    for number in range(1, 5001):
        answer = ask(table, T, name=f"n{number}", limit=number, hits=1, duration=LONG, algorithm=algorithm)
        assert answer[:3] == (U, number, number - 1)
    for number in range(1, 5001):
        answer = ask(table, T, name=f"n{number}", limit=number, hits=number, duration=LONG, algorithm=algorithm)
        assert answer[:3] == (O, number, number - 1)
    assert len(table) == 5000


# --- Requests that are none

WRONG_TYPES: list[object] = [True, False, 1.0, 0.0, float("nan"), None, "1", b"k", [1], {}, (), 2**63, INT64_MIN - 1]
ONES = fields(hits=1, limit=1, duration=1, algorithm=1, behavior=1, burst=1)
ZEROS = fields(hits=0, limit=0, duration=0, algorithm=0, behavior=0, burst=0)
WRONG = [
    pytest.param(place, wrong, id=f"{place}-{wrong!r}")
    for place in range(8)
    for wrong in WRONG_TYPES
    if not (place < 2 and isinstance(wrong, str))
]


@pytest.mark.parametrize(("place", "wrong"), WRONG)
def test_a_table_takes_no_wrong_value(place: int, wrong: object) -> None:
    """A wrong value is refused, also where it equals the right one of a bucket that exists, and changes nothing."""
    for good in (ONES, ZEROS):
        for asked_before in (False, True):
            table, untouched = Table(), Table()
            if asked_before:
                assert decide(table, T, good) == decide(untouched, T, good)
            with pytest.raises(InvalidRequest, match="field"):
                decide(table, T, (*good[:place], wrong, *good[place + 1 :]))
            assert table.counters == untouched.counters
            assert decide(table, T, good) == decide(untouched, T, good)


@pytest.mark.parametrize("wrong", [True, 1.0, "1", b"", (), 2**63, INT64_MIN - 1], ids=repr)
def test_a_table_takes_no_wrong_created_at(wrong: object) -> None:
    """created_at is an int64 or missing."""
    table = Table()
    decide(table, T, ONES)
    with pytest.raises(InvalidRequest, match="created_at"):
        decide(table, T, (*ONES[:8], wrong))


@pytest.mark.parametrize("hits", [INT64_MIN, INT64_MAX])
def test_a_table_takes_every_int64_of_hits(hits: int) -> None:
    """The ends of int64 are valid hits, of a new bucket and of a known one."""
    table = Table()
    assert ask(table, T, hits=hits)[0] == ask(table, T, hits=hits)[0] == (U if hits < 0 else O)


def test_a_forgotten_bucket_is_freed_at_once() -> None:
    """Swept, evicted and reset buckets leave no cycle behind: the daemon never runs a full collection."""
    table = Table(max_buckets=20, max_clock_skew=0)
    gc.collect()
    gc.disable()
    try:
        for number in range(100):
            decide(table, T, ("name", f"key {number}", 1, 10, 1000, number % 2, 0, 0, None))
        table.forget("name", "key 99")
        table.sweep(T + 10_000, 1000)
        assert len(table) == 0
        assert gc.collect() == 0
    finally:
        gc.enable()
