"""The arithmetic of the comparison with peers: what a table says follows from the records and from nothing else."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import hits
from benchmarks.peers.arithmetic import Record, chosen, highest_rate, median, percentile, ratios
from benchmarks.peers.bench import summary
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.driver import Part
from benchmarks.peers.report import markdown
from benchmarks.peers.scenes import SCENES, paced
from benchmarks.peers.targets import TARGETS, verdicts
from benchmarks.processes import together

FACTS = {
    "machine": "2 cores",
    "versions": {"Python": "3.11"},
    "load": 0.5,
    "began": "then",
    "ended": "now",
    "rounds": 3,
    "seconds": 1.0,
    "hold": 60.0,
    "keys": (100_000, 1_000_000),
    "quick": False,
}


def record(contender: str, rate: float, number: int = 0, scene: int = 1, case: str = "", **more: Any) -> dict[str, Any]:
    """A record as a run keeps it."""
    usual = {"p50": 10.0, "p99": 20.0, "p999": 30.0, "worst": 1500.0, "worker_cpu": 4.0, "server_cpu": 5.0}
    where = {"scene": scene, "case": case, "contender": contender, "round": number}
    return {**where, "rate": rate, **usual, "others": 0.0, "load": 1.0, **more}


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [
        (1, 0.5, 1),
        (1, 0.999, 1),
        (2, 0.5, 1),
        (3, 0.5, 2),
        (100, 0.99, 99),
        (101, 0.99, 100),
        (1000, 0.999, 999),
        (999, 0.999, 999),
        (10, 0.0, 1),
        (10, 1.0, 10),
    ],
)
def test_a_percentile_is_the_nearest_rank(count: int, share: float, expected: int) -> None:
    """Of 1, 2, ... count: the least that the share of them does not exceed; never a value that was not measured."""
    assert percentile(range(1, count + 1), share) == expected


@given(st.lists(st.integers(), min_size=1), st.integers(0, 1000))
def test_a_percentile_covers_its_share_and_no_more_than_it_must(values: list[int], thousandths: int) -> None:
    """At least the share is at or below it, and less than the share strictly below."""
    ordered = sorted(values)
    found = percentile(ordered, thousandths / 1000)
    assert sum(value <= found for value in ordered) * 1000 >= thousandths * len(ordered)
    assert thousandths == 0 or sum(value < found for value in ordered) * 1000 < thousandths * len(ordered)


def test_nothing_has_no_percentile() -> None:
    """Asked of nothing, it does not make up a figure."""
    with pytest.raises(ValueError, match="no percentile"):
        percentile([], 0.5)


def test_ratios_are_made_within_rounds() -> None:
    """A round's figure is only ever divided by the same round's; one that either side lacks, or is 0, makes none."""
    mine = [record("a", 10, 0), record("a", 30, 1), record("a", 50, 2), record("a", 70, 3)]
    theirs = [record("b", 10, 1), record("b", 5, 0), record("b", 0, 2)]
    assert ratios(mine, theirs, "rate") == [2.0, 3.0]
    assert ratios(mine, [], "rate") == []


def test_a_median_is_of_the_records_that_have_the_field() -> None:
    """Memory stands in some records of a scene only."""
    records: list[Record] = [{"bucket": 3}, {"bucket": 1}, {"bucket": 2}, {}, {"bucket": None}]
    assert median(records, "bucket") == 2
    assert median(records, "rate") is None
    assert chosen(records, bucket=1) == [{"bucket": 1}]


def at_rate(rate: float, p99: float, late: float = 0.0, **more: Any) -> dict[str, Any]:
    """What scene 10 keeps of one rate."""
    return record("sidegate", 1, scene=10, tried=rate, p99=p99, late=late, **more)


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        ([], 0),
        ([at_rate(1000, 1001)], 0),
        ([at_rate(1000, 900), at_rate(2000, 1000), at_rate(4000, 1001)], 2000),
        # The middle of the rounds: one lucky or unlucky run changes nothing.
        ([at_rate(1000, 900), at_rate(1000, 5000), at_rate(1000, 900), at_rate(2000, 2000), at_rate(2000, 9)], 1000),
        # Fast, but not as many calls as were due.
        ([at_rate(1000, 900), at_rate(2000, 900, late=0.02)], 1000),
    ],
)
def test_the_highest_rate_is_one_that_held(tried: list[dict[str, object]], expected: float) -> None:
    """By the middle p99 of a rate's rounds, with its calls made when they were due."""
    assert highest_rate(tried, 1000) == expected


def test_workers_are_summed_as_they_worked_at_once() -> None:
    """Rates add up, round trips are taken together, CPU is a decision's, and the servers' is counted once."""
    one = Part(2, 4, 1, 2.0, 0.5, 3.0, array("d", [0.001, 0.003]).tobytes(), 0, 5.0)
    two = Part(2, 4, 1, 1.0, 0.5, 2.9, array("d", [0.002, 0.004]).tobytes(), 4, 4.9)
    found = summary([one, two])
    assert found["rate"] == pytest.approx(4 / 2 + 4 / 1)
    assert (found["p50"], found["worst"]) == (pytest.approx(2000), pytest.approx(4000))
    assert found["worker_cpu"] == pytest.approx(1.0 / 8 * 1e6)
    assert found["server_cpu"] == pytest.approx(3.0 / 8 * 1e6)
    assert (found["over"], found["late"]) == (0.25, 0.5)
    assert found["others"] == pytest.approx((5.0 - 3.0 - 1.0) / 2.0)


@pytest.mark.parametrize(("theirs", "met"), [(100.0, True), (125.0, True), (126.0, False)])
def test_a_target_is_judged_by_the_median_of_its_rounds(theirs: float, met: bool) -> None:
    """8 times the decisions/s: met at 8, missed below, whatever a single round says."""
    mine = [record("sidegate", 1000, number) for number in range(3)]
    others = [record("gubernator-grpc", rate, number) for number, rate in enumerate([1.0, theirs, 1000.0])]
    verdict = next(one for one in verdicts(mine + others) if one.target.field == "rate")
    assert verdict.ratio == pytest.approx(1000 / theirs)
    assert verdict.met is met
    assert len(verdict.all) == 3


def test_every_target_names_a_scene_and_contenders_that_exist() -> None:
    """A mistyped name would be a target that nobody judges."""
    for target in TARGETS:
        assert target.scene in SCENES
        assert {target.mine, target.theirs} <= set(CONTENDERS)
        assert CONTENDERS[target.theirs].shared
    assert {target.scene for target in TARGETS} == {1, 2, 3, 5}


def test_the_page_says_met_and_missed_and_shows_each_contender() -> None:
    """Against the same records: targets met and missed, figures in their columns, no row for who was not there."""
    records = [
        record("sidegate", 900),
        record("gubernator-grpc", 100, p50=20.0, worker_cpu=400.0),
        record("redis-fixed", 100, scene=7, case="10 keys, filling", bucket=99.6),
    ]
    page = markdown(FACTS, records)
    assert "| 1 | Gubernator, grpcio | decisions/s | 9 (9 to 9) | >= 8 | yes |" in page
    assert "| 1 | Gubernator, grpcio | p50 | 0.5 (0.5 to 0.5) | <= 0.15 | **missed** |" in page
    assert "| 1 | Gubernator, grpcio | workers' CPU a decision | 0.01 (0.01 to 0.01) | <= 0.15 | yes |" in page
    assert "| Sidegate, Client | 900 | 10 | 20 | 30 | 1.5 | 4.0 | 5.0 | 0.00 |" in page
    assert (
        "| Redis, limits fixed window, 10 keys, filling | 100 | 10 | 20 | 30 | 1.5 | 100 | 4.0 | 5.0 | 0.00 |" in page
    )
    assert "grpc.aio" not in page
    assert "quick run" not in page
    assert "quick run" in markdown({**FACTS, "quick": True}, records)


def test_each_rate_of_scene_10_is_shown() -> None:
    """p50 and p99 at each rate, where a system did not keep up, and the highest rate under a millisecond."""
    records = [
        at_rate(1000, 300, case="owned"),
        at_rate(2000, 700, case="owned"),
        at_rate(4000, 5e5, 0.4, case="owned"),
    ]
    records.append(at_rate(1000, 1500, case="forwarded"))
    page = markdown(FACTS, records)
    assert "| p50 / p99 us | 1,000/s | 2,000/s | 4,000/s | highest with p99 under 1 ms |" in page
    assert "| Sidegate, Client, owned | 10 / 300 | 10 / 700 | not held | 2,000/s |" in page
    assert "| Sidegate, Client, forwarded | 10 / 1,500 |  |  | none of these |" in page


def test_abuse_is_95_in_100() -> None:
    """In any 20 calls' worth: 19 of keys whose limit the warm-up uses up, and the same for each contender."""
    spend, calls = hits.abuse(3, 2_000)
    spent = {call[0].key for call in spend}
    assert sum(call[0].key in spent for call in calls) == 1_900
    assert {call[0].limit for call in calls if call[0].key in spent} == {1}
    assert (spend, calls) == hits.abuse(3, 2_000)


@pytest.mark.parametrize(("keys", "size"), [(10_000, 1_000), (10_500, 1_000), (3, 2)])
def test_filling_opens_each_live_key_once(keys: int, size: int) -> None:
    """Two workers' shares together are all keys, and those that the random load asks are among them."""
    shares = [hits.filling(keys, first, 2, size) for first in range(2)]
    opened = [hit.key for share in shares for call in share for hit in call]
    assert len(opened) == len(set(opened)) == keys
    assert {call[0].key for call in hits.live(keys, 1, 50)} <= set(opened)


def test_scattered_keys_are_one_to_one() -> None:
    """No two numbers share a key, and the first letters of neighbours tell them apart."""
    keys = [hits.scattered(number) for number in range(100_000)]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {16}
    assert all(one[:2] != other[:2] for one, other in itertools.pairwise(keys))


def test_batches_ask_each_key_once_before_any_again() -> None:
    """Calls are whole, and no key comes twice in a round of them."""
    calls = hits.batches(100, 1_000)
    assert [len(call) for call in calls] == [100] * 10
    assert len({hit.key for call in calls for hit in call}) == 1_000


def _work(start: Callable[[], object], how: str) -> str:
    start()
    if how == "raise":
        raise ValueError("no answer from the server")
    if how == "die":
        os._exit(1)
    if how == "hang":
        signal.pause()
    return how


def test_workers_results_come_in_order() -> None:
    """Whoever is done first."""
    assert together(_work, [(str(number),) for number in range(5)]) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("how", "why"), [("raise", "no answer from the server"), ("die", "load process 1 ended without a result")]
)
def test_a_worker_that_fails_fails_the_measurement(how: str, why: str) -> None:
    """With its own words, and no other worker is waited for or left behind."""
    with pytest.raises(RuntimeError, match=why):
        together(_work, [("well",), (how,), ("well",)])
    assert multiprocessing.active_children() == []


def test_a_worker_that_hangs_is_ended() -> None:
    """Loads are bounded: with no result in time, all of them are ended."""
    with pytest.raises(RuntimeError, match=r"no result after 0\.5 s"):
        together(_work, [("hang",), ("well",)], within=0.5)
    assert multiprocessing.active_children() == []


def test_paced_workers_take_turns() -> None:
    """8 workers at 800 calls/s: 100 each, the next worker's first call an eight-hundredth after the last one's."""
    plans = paced([[[hits.Hit("n", "k")]]] * 8, 800.0, 2.0)
    assert [plan.rate for plan in plans] == [100.0] * 8
    assert [plan.offset for plan in plans] == pytest.approx([who / 800 for who in range(8)])
