"""GLOBAL over whole histories: nothing is forgotten or told twice, nodes agree, and over-admission is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from sidecar.replica import Replicas
from sidecar.table import Table
from tests.helpers import DRAIN, INT64_MAX, LEAKY, RESET, TOKEN, O, T, U, fields
from tests.replicas import LONG, Node, cluster, sent, used
from tests.test_model import HISTORIES, SKEW, SOME, STARTS, Step

SLOW = settings(max_examples=150)

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["hit"] * 8 + ["take"] * 3 + ["deliver"] * 4 + ["answer"] * 4 + ["give back", "lose", "lose late", "flush"]
        ),
        st.integers(0, 2),
        st.sampled_from([1, 1, 1, 2, 3, 7, -1, -2, 0, 20]),
        st.sampled_from([10, 10, 10, 15]),
        st.sampled_from([0, 0, 1, 40]),
    ),
    max_size=80,
)


def _act(nodes: Sequence[Node], now: int, action: str, place: int, **values: Any) -> None:
    node = nodes[place]
    match action:
        case "hit":
            node.hit(now, **values)
        case "take":
            node.take(2 + place)
        case "deliver":
            node.deliver(now)
        case "answer":
            node.answer(now)
        case "give back":
            node.give_back()
        case "lose" | "lose late":
            node.lose(now, action == "lose late")
        case _:
            node.flush(now)


@given(actions=ACTIONS)
@SLOW
def test_nothing_admitted_is_forgotten_or_told_twice(actions: list[tuple[str, int, int, int, int]]) -> None:
    """Whatever is delayed, given back or lost: the owner comes to hold what all nodes admitted, less what was lost."""
    owner, nodes = cluster(3)
    now = T
    for action, place, hits, limit, wait in actions:
        now += wait
        _act(nodes, now, action, place, hits=hits, limit=limit)
    for node in nodes:
        node.flush(now)
    if owner.state("n", "k") is not None:
        assert used(owner) == sum(node.admitted - node.dropped for node in nodes)
    _agree(owner, nodes, now, {"duration": LONG})


def _agree(owner: Table, nodes: Sequence[Node], now: int, terms: dict[str, Any]) -> None:
    """After a quiet round, in which every node renews what it holds, all hold what the owner holds."""
    for _ in range(2):  # in the first one the terms of the peeks become the owner's
        for node in nodes:
            node.hit(now, hits=0, **terms)
        for node in nodes:
            node.flush(now)
    for node in nodes:
        state = node.replicas.state("n", "k")
        if state is not None:
            event("a copy to compare")
            assert state == owner.state("n", "k")
        assert node.replicas.counters.unsent == 0


@given(
    actions=ACTIONS,
    algorithm=st.sampled_from([TOKEN, LEAKY]),
    behaviors=st.lists(st.sampled_from([0, 0, 0, RESET, DRAIN]), min_size=1),
    duration=st.sampled_from([30, 100, LONG]),
)
@SLOW
def test_all_nodes_agree_after_a_quiet_round(
    actions: list[tuple[str, int, int, int, int]], algorithm: int, behaviors: list[int], duration: int
) -> None:
    """Also with resets, drains and windows that end meanwhile, every copy comes to be the owner's bucket."""
    owner, nodes = cluster(3)
    now = T
    for number, (action, place, hits, limit, wait) in enumerate(actions):
        now += wait
        values = {"hits": hits, "limit": limit, "algorithm": algorithm, "duration": duration}
        _act(nodes, now, action, place, behavior=behaviors[number % len(behaviors)], **values)
    for node in nodes:
        node.flush(now)
    _agree(owner, nodes, now, {"algorithm": algorithm, "duration": duration})


def _alone(start: int, steps: list[Step], reports: list[bool], leaky: bool) -> None:
    """One node and its owner against a table that decides by itself."""
    table, owner = Table(max_clock_skew=SKEW), Table(max_clock_skew=SKEW)
    node = Node(owner, Replicas(max_clock_skew=SKEW))
    now = start
    for step, report in zip(steps, reports, strict=False):
        now += step.wait
        request = ("n", "k", *step.request(now)[2:])
        wanted = table.decide(now, request)
        verdict = node.replicas.decide(now, request)
        if verdict is None:
            node.flush(now)
            verdict = owner.decide(now, request)
            node.replicas.adopt(now, "n", "k", sent(owner.state("n", "k")))
        else:
            event("by the copy")
        if not leaky:
            assert verdict == wanted
        if report:
            node.flush(now)


@given(start=st.sampled_from(STARTS), steps=HISTORIES, reports=st.lists(st.booleans(), min_size=30, max_size=30))
@SOME
def test_one_node_and_its_owner_are_one_table(start: int, steps: list[Step], reports: list[bool]) -> None:
    """Token buckets: however seldom is reported, every answer is the one that the owner alone would have given."""
    for step in steps:
        object.__setattr__(step, "algorithm", TOKEN)
        object.__setattr__(step, "lag", None)
    _alone(start, steps, reports, leaky=False)


@given(start=st.sampled_from(STARTS), steps=HISTORIES, reports=st.lists(st.booleans(), min_size=30, max_size=30))
@SOME
def test_no_history_breaks_a_copy(start: int, steps: list[Step], reports: list[bool]) -> None:
    """Both algorithms, dated requests and all behaviors: each request has an answer."""
    _alone(start, steps, reports, leaky=True)


@given(
    waits=st.lists(st.integers(0, 400), min_size=1, max_size=60),
    hits=st.lists(st.sampled_from([1, 1, 2, 3, -1]), min_size=60, max_size=60),
    reports=st.lists(st.sampled_from(["", "", "flush", "take", "give back"]), min_size=60, max_size=60),
    burst=st.sampled_from([0, 3, 40]),
)
@SOME
def test_a_leaky_bucket_is_told_to_a_token(waits: list[int], hits: list[int], reports: list[str], burst: int) -> None:
    """However its hits were spread over the time between reports, the owner's level is less than a token above."""
    table, owner = Table(), Table()
    node = Node(owner)
    terms: dict[str, Any] = {"algorithm": LEAKY, "duration": 1000, "burst": burst}
    now = T
    for wait, asked, report in zip(waits, hits, reports, strict=False):
        now += wait
        verdict = node.hit(now, hits=asked, **terms)
        if verdict is None:
            node.flush(now)
        elif verdict[0] == O:
            event("refused")
        if verdict is None or verdict[0] == U:
            table.charge(now, fields(hits=asked, **terms))
        if report == "take":
            node.take()
        elif report == "give back":
            node.give_back()
        elif report:
            node.flush(now)
            peek = fields(hits=0, **terms)
            owner.decide(now, peek)
            table.decide(now, peek)
            assert 0 <= used(owner) - used(table) < 1000


@given(
    nodes=st.integers(1, 4),
    limit=st.integers(1, 30),
    interval=st.integers(1, 10),
    round_trip=st.integers(0, 10),
    late=st.booleans(),
    asked=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=20, max_size=60),
)
@SLOW
def test_over_admission_is_bounded(
    nodes: int, limit: int, interval: int, round_trip: int, late: bool, asked: list[list[int]]
) -> None:
    """In one window, n nodes admit at most limit + (n - 1) x what one was asked for in an interval and a round trip.

    The owner is the first of the nodes and asks itself.  Messages take all of the round trip there, or all of it back.
    """
    owner, others = cluster(nodes - 1)
    round_trip = min(round_trip, interval)
    there, back = (round_trip, 0) if late else (0, round_trip)
    going: list[tuple[int, Node]] = []
    coming: list[tuple[int, Node]] = []
    admitted = 0

    def send(node: Node, tick: int) -> None:
        going.extend((tick + there, node) for _ in range(len(node.up) - sum(at is node for _, at in going)))

    def arrive(tick: int) -> None:
        while going and going[0][0] <= tick:
            _, node = going.pop(0)
            node.deliver(T + tick)
            coming.append((tick + back, node))
        while coming and coming[0][0] <= tick:
            _, node = coming.pop(0)
            node.answer(T + tick)

    for tick, hits in enumerate(asked):
        arrive(tick)
        for _ in range(hits[0]):
            admitted += owner.decide(T + tick, fields(limit=limit, duration=LONG))[0] == U
        for node, count in zip(others, hits[1:], strict=False):
            for _ in range(count):
                node.hit(T + tick, limit=limit)
                send(node, tick)
            if tick % interval == interval - 1:
                node.take()
                send(node, tick)
        arrive(tick)
    arrive(len(asked) + round_trip)
    span = interval + round_trip + 1  # a tick is asked for before and after what arrives in it
    most = max(sum(hits[node] for hits in asked[at : at + span]) for node in range(nodes) for at in range(len(asked)))
    admitted += sum(node.admitted for node in others)
    event(f"over by {max(0, admitted - limit)}")
    assert admitted <= limit + (nodes - 1) * most


def test_extreme_hits_are_reported_whole() -> None:
    """Sums that would leave int64 become two entries; an endless window travels."""
    owner, (node, _) = cluster()
    big = {"limit": INT64_MAX, "duration": INT64_MAX}
    node.ask(T, hits=0, **big)
    for hits in (2**62, -(2**62), INT64_MAX, -(2**63), -(2**63), -(2**63), 5):
        assert node.hit(T, hits=hits, **big) is not None
    node.flush(T)
    assert used(owner) == INT64_MAX - 3 * 2**63 + 5
    assert node.replicas.state("n", "k") == owner.state("n", "k")
