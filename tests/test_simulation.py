"""The simulator's arithmetic, by small cases worked out by hand; that its parts agree with what they simulate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks import simulate
from benchmarks.simulation.forwarding import Load, forwarding, percentile, weights
from benchmarks.simulation.link import Link, Totals
from benchmarks.simulation.moving import moved
from benchmarks.simulation.shared import NAME, Plan, SharedCluster, judge, most_within, shared
from benchmarks.simulation.timeline import Core, Costs, Timeline, split
from cluster_link.membership import Peer
from cluster_link.ring import Ring

COSTS = Costs(owned=10, asked_batch=200, asked_request=20, owner_batch=100, owner_request=5, wire=50)
FREE = Costs(0, 0, 0, 0, 0, 0)
A, B, C = (Peer(name, f"{name}.example:1051") for name in "abc")


class Waiter:
    """Notes when it was answered, and with what."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.got: list[tuple[float, Any]] = []
        self.why = ""

    def answered(self, answer: Any, node: str) -> None:
        self.got.append((self.timeline.now, answer))

    def failed(self, why: str, sent: bool) -> None:
        self.why = why


@pytest.mark.parametrize(
    ("alone", "together", "size", "batch", "request_"),
    [
        (110, 60, 2, 100, 10),  # 2 x 60 = 100 + 2 x 10
        (283, 26, 24, 283 - 341 / 23, 341 / 23),
        (10, 10, 5, 0, 10),  # nothing is shared
        (10, 2, 5, 10, 0),  # everything is
    ],
)
def test_a_cost_is_split_by_two_measurements(
    alone: float, together: float, size: int, batch: float, request_: float
) -> None:
    """A batch's and a request's part reproduce both measurements."""
    assert split(alone, together, size) == pytest.approx((batch, request_))


@pytest.mark.parametrize(("alone", "together", "size"), [(10, 5, 1), (10, 1, 5), (10, 11, 2)])
def test_measurements_that_contradict_each_other_are_refused(alone: float, together: float, size: int) -> None:
    """No part of a cost is negative."""
    with pytest.raises(ValueError, match="batch"):
        split(alone, together, size)


def test_events_come_in_order() -> None:
    """By time, then in the order asked for; what an event asks for is in its turn, and nothing past the end comes."""
    timeline, seen = Timeline(), []
    timeline.at(5, lambda: seen.append("later"))
    timeline.at(1, lambda: timeline.at(2, lambda: seen.append("asked meanwhile")))
    timeline.at(5, lambda: seen.append("last"))
    timeline.at(5.5, lambda: seen.append("never"))
    timeline.run(5)
    assert seen == ["asked meanwhile", "later", "last"]
    assert timeline.now == 5


def test_a_core_does_one_thing_after_the_other() -> None:
    """Work waits for what was given before, and an idle core begins at once."""
    core = Core()
    assert [core.spend(0, 10), core.spend(4, 10), core.spend(100, 1)] == [10, 20, 101]
    assert core.spent == 21


def test_a_lone_request_takes_the_sum_of_its_costs() -> None:
    """100 to write + 50 on the way + 105 at the owner + 50 back + 110 to answer."""
    timeline, here, there, totals = Timeline(), Core(), Core(), Totals()
    waiter = Waiter(timeline)
    link = Link(timeline, COSTS, here, there, lambda op, payload: (op, payload), totals)
    link.ask(1, "hit", waiter)
    timeline.run(10_000)
    assert waiter.got == [(415, (1, "hit"))]
    assert (here.spent, there.spent, totals.longest) == (210, 105, 415)
    assert (totals.batches, totals.requests, link.idle) == (1, 1, True)


def test_what_comes_while_a_batch_is_under_way_shares_the_next() -> None:
    """Asked at 0, 10 and 20: the first leaves alone, the two others together once it is back, at 415.

    The second batch takes 100 + 50 + 110 + 50 + 120 = 430.
    """
    timeline, totals = Timeline(), Totals()
    link = Link(timeline, COSTS, Core(), Core(), lambda op, payload: None, totals)
    waiters = [Waiter(timeline) for _ in range(3)]
    for number, waiter in enumerate(waiters):
        timeline.at(10 * number, lambda waiter=waiter: link.ask(1, None, waiter))  # type: ignore[misc]
    timeline.run(10_000)
    assert [waiter.got for waiter in waiters] == [[(415, None)], [(845, None)], [(845, None)]]
    assert totals.sizes == {1: 1, 2: 1}


def test_what_comes_before_a_busy_core_writes_goes_along() -> None:
    """The batch is taken when the core gets to it: at 1,000, with both requests; answered at 1,430."""
    timeline, here, totals = Timeline(), Core(), Totals()
    here.spend(0, 1_000)
    link = Link(timeline, COSTS, here, Core(), lambda op, payload: None, totals)
    waiter = Waiter(timeline)
    link.ask(1, None, waiter)
    timeline.at(900, lambda: link.ask(1, None, waiter))
    timeline.run(10_000)
    assert totals.sizes == {2: 1}
    assert waiter.got == [(1_430, None)] * 2


def test_what_is_to_leave_alone_does() -> None:
    """Reports wait for no batch under way; and a full queue refuses."""
    timeline, totals = Timeline(), Totals()
    link = Link(timeline, COSTS, Core(), Core(), lambda op, payload: None, totals, max_queue=2)
    waiters = [Waiter(timeline) for _ in range(3)]
    for waiter in waiters:
        link.ask(2, None, waiter, alone=True)
    assert [waiter.why for waiter in waiters] == ["", "", "the queue is full"]
    timeline.run(10_000)
    assert totals.sizes == {1: 2}


def test_a_cluster_of_two_forwards_what_the_other_owns() -> None:
    """Two nodes, two keys, one each: half of what is asked is forwarded; a core is busy with what that costs.

    At a low rate each is in a batch by itself: 10 for an owned request, 220 + 105 for a forwarded one, 425 its time.
    """
    got = forwarding([0, 1], 2, COSTS, Load(rate=20, seconds=200), weights(2, 0), Random(7))
    assert got.requests == pytest.approx(2 * 20 * 200, rel=0.05)
    assert got.share == pytest.approx(0.5, abs=0.03)
    assert got.messages == pytest.approx(20 * got.share, rel=0.05)
    assert got.batch_p99 == 1
    assert got.kept_up == pytest.approx(1, abs=0.001)
    assert got.batch == pytest.approx(1, abs=0.02)
    assert got.p50 == 425
    assert got.core == pytest.approx(20e-6 * (got.share * 325 + (1 - got.share) * 10), rel=0.05)


def test_a_lone_node_forwards_nothing() -> None:
    """All keys are its own."""
    got = forwarding([0, 0, 0], 1, COSTS, Load(rate=1_000, seconds=1), weights(3, 1), Random(7))
    assert (got.share, got.messages, got.p99) == (0, 0, 0)
    assert got.core == pytest.approx(got.requests * 10 / 1e6)


def test_more_than_a_core_can_do_is_seen() -> None:
    """10,000 requests a second of 325 us each, of which batches save a part, are more than two cores do."""
    costs = COSTS._replace(asked_request=200, owner_request=100)
    got = forwarding([0, 1], 2, costs, Load(rate=10_000, seconds=0.2), weights(2, 0), Random(7))
    assert got.kept_up < 0.9
    assert got.batch > 2


def test_the_same_seed_gives_the_same_run() -> None:
    """Figures can be had again."""
    first, again, other = (
        forwarding([0, 1, 2], 3, COSTS, Load(500, 0.5), weights(3, 1.1), Random(seed)) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("keys", "zipf", "summed"), [(3, 0, [1, 2, 3]), (4, 1, [1, 1.5, 1.5 + 1 / 3, 1.75 + 1 / 3]), (2, 2, [1, 1.25])]
)
def test_keys_are_drawn_by_their_weights(keys: int, zipf: float, summed: list[float]) -> None:
    """The k-th by 1 / k ** zipf."""
    assert weights(keys, zipf) == pytest.approx(summed)


@pytest.mark.parametrize(
    ("values", "percent", "found"),
    [([], 99, 0), ([7], 50, 7), ([1, 2, 3, 4], 50, 2), ([1, 2, 3, 4], 51, 3), ([1, 2, 3, 4], 100, 4), ([1, 2], 0, 1)],
)
def test_percentiles(values: list[float], percent: float, found: float) -> None:
    """What so many percent do not exceed."""
    assert percentile(values, percent) == found


@pytest.mark.parametrize(
    ("times", "span", "most"),
    [([], 10, 0), ([5], 0, 1), ([0, 10, 20], 10, 2), ([0, 10, 20], 9, 1), ([0, 1, 2, 50, 51, 52, 53], 3, 4)],
)
def test_the_most_that_is_asked_for_within_a_span(times: list[float], span: float, most: int) -> None:
    """Both ends count."""
    assert most_within(times, span) == most


def _cluster(costs: Costs = FREE) -> SharedCluster:
    """Three nodes, and of these the owner of account:0 first."""
    cluster = SharedCluster(Ring([A, B, C]), costs, interval=100)
    owner = cluster.ring.owner(NAME, "account:0")
    cluster.nodes = {
        peer: cluster.nodes[peer] for peer in sorted(cluster.nodes, key=lambda peer: (peer != owner, peer))
    }
    return cluster


def test_over_admission_by_hand() -> None:
    """Limit 4, three nodes, reports at 100 ms.  The two others ask once each for their replicas: 2 admitted, and the
    first sees 3 left, the second 2.  Within the interval the first is asked 3 times more, the second 5, the owner 3.

    The replicas admit 3 and 2, the owner 2: 9 in all, 5 beyond.  The bound: 2 others x 6 that one was asked for.
    """
    cluster = _cluster()
    owner, first, second = cluster.nodes.values()
    for node in (first, second):
        cluster.timeline.at(cluster.timeline.now, lambda node=node: node.hit("account:0", 4))  # type: ignore[misc]
        cluster.timeline.run(cluster.timeline.now + 1_000)
    assert cluster.admitted["account:0"] == 2
    for node, hits in ((first, 3), (second, 5), (owner, 3)):
        for _ in range(hits):
            node.hit("account:0", 4)
    assert cluster.admitted["account:0"] == 9
    got = judge(cluster, Plan(1, 1, 4, 100, 1), ["account:0"])
    assert (got.hits, got.over, got.bound) == (13, 5, 12)
    assert got.worst == pytest.approx(5 / 12)
    assert got.asked == pytest.approx(2 / 13)


def test_reports_end_the_over_admission() -> None:
    """After an interval all nodes know what was admitted, and refuse."""
    cluster = _cluster()
    owner, first, second = cluster.nodes.values()
    for node in (first, second):
        cluster.report_from(node, 100_000)
        node.hit("account:0", 10)
    cluster.timeline.run(1_000)
    for node in (owner, first, second):
        for _ in range(8):
            node.hit("account:0", 10)
    before = cluster.admitted["account:0"]
    assert before > 10
    cluster.timeline.run(100_000)
    for node in (owner, first, second):
        node.hit("account:0", 10)
    assert cluster.admitted["account:0"] == before
    state = owner.table.state(NAME, "account:0")
    assert state is not None
    assert before in state  # the owner holds all that was admitted


def test_a_round_trip_longer_than_the_interval_is_told() -> None:
    """The bound takes it for granted that it is not."""
    costs = FREE._replace(wire=60_000)
    got = shared(Ring([A, B, C]), costs, Plan(1, 20, 30, 100, 2), Random(3))
    assert not got.in_time
    assert got.round_trip == pytest.approx(120)
    assert shared(Ring([A, B, C]), FREE, Plan(1, 20, 30, 100, 2), Random(3)).in_time


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds(seed: int) -> None:
    """Where messages take less than an interval, one window admits no more than docs/cluster.md says."""
    got = shared(Ring([A, B, C]), COSTS, Plan(2, 200, 100, 100, 1), Random(seed))
    assert got.in_time
    assert got.admitted > 200
    assert 0 < got.worst <= 1


def test_moved_keys_are_counted() -> None:
    """Of eight keys two went to the newcomer d and one astray; a quarter was expected."""
    got = moved(list("aabbccaa"), list("adbbdcab"), 4, "d")
    assert (got.share, got.expected, got.astray) == (3 / 8, 1 / 4, 1)
    deviation = (1 / 16 / 512 + 3 / 16 / 8) ** 0.5
    assert got.sigmas == pytest.approx(1 / 8 / deviation)


def test_nothing_moved() -> None:
    """The same owners."""
    assert moved(["a", "b"], ["a", "b"], 2, "c")[::2] == (0, 0)


@pytest.mark.parametrize(
    ("scene", "result", "found"),
    [
        ("global, limit grows", {"in_time": True, "worst": 1.0, "over": 5, "bound": 5}, ""),
        ("global, limit grows", {"in_time": True, "worst": 1.2, "over": 6, "bound": 5}, "6 beyond, bound 5"),
        ("global, limit grows", {"in_time": False, "worst": 1.2, "over": 6, "bound": 5}, ""),
        ("join", {"astray": 0, "sigmas": 4.9}, ""),
        ("join", {"astray": 2, "sigmas": 0.0}, "2 keys moved between others"),
        ("leave", {"astray": 0, "sigmas": -6.0}, "-6.0 standard deviations from 1/n"),
    ],
)
def test_a_broken_promise_is_told(scene: str, result: dict[str, Any], found: str) -> None:
    """By the run that broke it."""
    said = simulate.faults([simulate.Row(scene, 10, {}, result)])
    assert said == ([f"10 nodes, {scene}: {found}"] if found else [])


def test_the_bytes_of_a_thing_count_what_it_leads_to_once() -> None:
    """Shared parts once, and no types."""
    part = ["x" * 1_000]
    assert simulate.held([part, part]) == sys.getsizeof([0, 0]) + sys.getsizeof(part) + sys.getsizeof("x" * 1_000)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nodes", "1"], "2 to 60,000"),
        (["--many", "1"], "tells nothing"),
        (["--asked-many-us", "1"], "no cost a batch"),
        (["--round-trip-us", "100"], "--round-trip-us"),
    ],
)
def test_bad_inputs_are_refused_in_a_line(words: list[str], why: str, tmp_path: Path) -> None:
    """Before anything is run."""
    run = _run("--out", str(tmp_path / "out"), *words)
    assert run.returncode != 0
    assert why in run.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_run_writes_its_inputs_and_figures(tmp_path: Path) -> None:
    """Tables and raw data; charts are matplotlib's, which tests do not need."""
    small = ["--nodes", "3,5", "--requests", "300", "--least-ms", "1", "--keys", "2000", "--rates", "500"]
    run = _run("--out", str(tmp_path), *small, "--global-seconds", "0.3", "--global-limit", "20")
    assert run.returncode == 0, run.stderr
    raw = json.loads((tmp_path / "scale.json").read_text())
    assert raw["inputs"]["nodes"] == [3, 5]
    assert raw["costs_us"]["wire"] == 13
    scenes = [row["scene"] for row in raw["rows"] if row["nodes"] == 5]
    assert sorted(set(scenes)) == sorted(
        ["ring", "join", "leave", "forwarding", "global, limit grows", "global, limit fixed", "global, many keys"]
    )
    text = (tmp_path / "scale.md").read_text()
    assert "Promises: none broken." in text
    assert text.count("zipf 1.1") == 2


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.simulate", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
