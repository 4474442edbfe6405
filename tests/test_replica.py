"""GLOBAL in one process: nodes with copies, one owner, links that delay, and a clock moved by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from sidecar.errors import InvalidRequest
from sidecar.messages import Verdict
from sidecar.replica import Replicas, Report, settle
from sidecar.table import Table
from tests.helpers import DRAIN, GREGORIAN, INT64_MAX, LEAKY, NOON, RESET, TOKEN, O, T, U, fields
from tests.test_model import HISTORIES, SKEW, SOME, STARTS, Step

GLOBAL = 2
LONG = 1_000_000
SLOW = settings(max_examples=150)


def sent(value: Any) -> Any:
    """What comes out at the other end of a link."""
    return msgpack.unpackb(msgpack.packb(value), use_list=False)


@dataclass
class Node:
    """One node's copies, and its link to the owner: messages and answers, each in order."""

    owner: Table
    replicas: Replicas = field(default_factory=Replicas)
    up: deque[tuple[str, Any]] = field(default_factory=deque)
    down: deque[tuple[str, Any, Any]] = field(default_factory=deque)
    admitted: int = 0
    dropped: int = 0

    def hit(self, now: int, **values: Any) -> Verdict | None:
        """Ask for `fields(**values)`: by the copy, or else by way of the owner, whose answer comes later."""
        request: tuple[Any, ...] = fields(**{"duration": LONG, **values})
        verdict = self.replicas.decide(now, request)
        if verdict is None:
            self.up.append(("ask", request))
        elif verdict[0] == U:
            self.admitted += values.get("hits", 1)
        return verdict

    def take(self, limit: int = 100) -> None:
        """Send the next reports."""
        self.up.extend(("report", report) for report in self.replicas.take(limit))

    def deliver(self, now: int) -> None:
        """The owner gets this node's oldest message."""
        if not self.up:
            return
        kind, what = self.up.popleft()
        if kind == "report":
            self.down.append((kind, what, sent(settle(self.owner, now, sent(what)))))
            return
        verdict = self.owner.decide(now, what)
        if verdict[0] == U:
            self.admitted += what[2]
        self.down.append((kind, what, sent(self.owner.state(*what[:2]))))

    def answer(self, now: int) -> None:
        """This node gets the owner's oldest answer."""
        if not self.down:
            return
        kind, what, state = self.down.popleft()
        if kind == "report":
            self.replicas.settled(what, state)
        else:
            self.replicas.adopt(now, what[0], what[1], state)

    def give_back(self) -> None:
        """The link breaks: no report in it was sent.  What was asked is answered by a fallback, and forgotten."""
        self.replicas.returned([what for kind, what in self.up if kind == "report"])
        self.up.clear()

    def lose(self, now: int, arrived: bool) -> None:
        """The oldest message is not heard of again, whether it had arrived or not."""
        if not self.up or self.up[0][0] != "report":
            return
        _, report = self.up.popleft()
        if arrived:
            settle(self.owner, now, sent(report))
        else:
            self.dropped += sum(entry[0] for entry in report.entries)
        self.replicas.lost([report])

    def flush(self, now: int) -> None:
        """All is delivered and answered, and nothing is left to report."""
        while self.up or self.down or self.replicas.due:
            self.take()
            while self.up:
                self.deliver(now)
            while self.down:
                self.answer(now)

    def ask(self, now: int, **values: Any) -> Verdict:
        """The verdict, the owner's where the copy gives none."""
        verdict = self.hit(now, **values)
        if verdict is None:
            request = self.up.pop()[1]
            verdict = self.owner.decide(now, request)
            if verdict[0] == U:
                self.admitted += request[2]
            self.replicas.adopt(now, request[0], request[1], sent(self.owner.state(request[0], request[1])))
        return verdict


def cluster(nodes: int = 2, **options: Any) -> tuple[Table, list[Node]]:
    """An owner, and nodes that ask it."""
    owner = Table()
    return owner, [Node(owner, Replicas(**options)) for _ in range(nodes)]


def used(table: Table, name: str = "n", unique_key: str = "k") -> int:
    """What the owner holds as consumed."""
    state = table.state(name, unique_key)
    assert state is not None
    return state[7] if isinstance(state[7], int) else int.from_bytes(state[7], "big", signed=True)


# --- Who answers


@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_a_cold_node_asks_first_and_admits_nothing_that_is_exhausted(algorithm: int) -> None:
    """A node without a copy has no answer; with the owner's state, it refuses what the owner would refuse."""
    owner, (first, cold) = cluster()
    first.ask(T, hits=10, algorithm=algorithm)
    assert cold.hit(T, algorithm=algorithm) is None
    cold.flush(T)
    verdict = cold.hit(T, algorithm=algorithm)
    assert verdict is not None
    assert verdict == owner.decide(T, fields(duration=LONG, algorithm=algorithm))
    assert verdict[0] == O


def test_a_copy_counts_and_refuses_as_the_owner_would() -> None:
    """All or nothing, remaining and retry_after are those of a bucket; the owner learns of what was admitted."""
    owner, (node, _) = cluster()
    node.ask(T, hits=1)
    assert node.hit(T, hits=4) == (U, 10, 5, T + LONG, 0)
    assert node.hit(T, hits=6) == (O, 10, 5, T + LONG, LONG)
    assert node.hit(T, hits=5) == (U, 10, 0, T + LONG, 0)
    assert node.hit(T, hits=1) == (O, 10, 0, T + LONG, LONG)
    assert used(owner) == 1
    node.flush(T)
    assert used(owner) == 10
    assert owner.decide(T, fields(hits=0, duration=LONG))[0] == O, "the refusal is known too"


def test_reset_time_is_the_owners_on_all_nodes() -> None:
    """Nodes that ask at other times, and by other clocks, tell the same end, and no copy outlives it."""
    _, nodes = cluster(3)
    for late, node in enumerate(nodes):
        node.ask(T + 100 * late)
        skewed = T + 100 * late + 7 * late
        verdict = node.hit(skewed)
        assert verdict is not None
        assert verdict[3] == T + LONG
        assert node.hit(T + LONG - 1) is not None
        assert node.hit(T + LONG) is None
        assert node.hit(T + LONG, behavior=RESET) is None


def test_a_shorter_duration_that_is_over_is_for_the_owner() -> None:
    """A window that has ended under the request's own terms is opened by nobody but the owner."""
    _, (node, _) = cluster()
    node.ask(T)
    assert node.hit(T + 100, duration=100) is None
    assert node.hit(T + 99, duration=100) is not None


@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_a_window_of_no_length_is_for_the_owner(algorithm: int) -> None:
    """Nothing is remembered of it, so a copy would be of no use."""
    _, (node, _) = cluster()
    node.ask(T, algorithm=algorithm)
    assert node.hit(T, duration=0, algorithm=algorithm) is None
    assert node.hit(T, duration=0, algorithm=algorithm, behavior=RESET) is None


def test_a_gregorian_copy_ends_with_its_interval() -> None:
    """The last millisecond is the copy's, the next one the owner's."""
    _, (node, _) = cluster()
    node.ask(NOON, duration=0, behavior=GREGORIAN)
    verdict = node.hit(NOON + 59_999, duration=0, behavior=GREGORIAN)
    assert verdict is not None
    assert verdict[3] == NOON + 59_999
    assert node.hit(NOON + 60_000, duration=0, behavior=GREGORIAN) is None


@pytest.mark.parametrize(
    "odd", [{"hits": 1.0}, {"hits": 2**63}, {"limit": True}, {"algorithm": 3}, {"created_at": "x"}, {"duration": []}]
)
def test_values_that_are_no_request_are_refused(odd: dict[str, object]) -> None:
    """As by a table, also where a copy is held and the terms are known."""
    _, (node, _) = cluster()
    node.ask(T, limit=1, duration=1)
    before = node.replicas.state("n", "k")
    with pytest.raises(InvalidRequest):
        node.hit(T, **odd)
    assert node.replicas.state("n", "k") == before


def test_another_algorithm_is_for_the_owner_unless_hits_are_unsent() -> None:
    """Unsent hits on the old bucket must come before those on the new one, or they would bring the old one back."""
    owner, (node, _) = cluster()
    node.ask(T)
    assert node.hit(T, algorithm=LEAKY) is None
    node.up.clear()
    node.hit(T)
    assert node.hit(T, hits=4, algorithm=LEAKY) == (U, 10, 6, T + 400_000, 0)
    node.flush(T)
    assert owner.decide(T, fields(hits=0, duration=LONG, algorithm=LEAKY))[2] == 6
    assert node.replicas.state("n", "k") == owner.state("n", "k")


# --- What is reported


def reported(node: Node) -> list[tuple[int, int, int, bool]]:
    """hits, limit, behavior and refused of the entries of the next report."""
    (report,) = node.replicas.take(100)
    return [(entry[0], entry[1], entry[4], entry[7]) for entry in report.entries]


def test_hits_of_the_same_terms_are_summed() -> None:
    """A thousand hits are one entry; what was refused and what only peeked is none."""
    _, (node, _) = cluster()
    node.ask(T, limit=2000)
    for _ in range(1000):
        node.hit(T, limit=2000)
        node.hit(T, limit=2000, hits=1999)
        node.hit(T, limit=2000, hits=0)
    assert reported(node) == [(1000, 2000, 0, False)]


def test_refunds_resets_and_limits_keep_their_order() -> None:
    """They travel as they came, since they would do something else in another order."""
    _, (node, _) = cluster()  # fmt: skip
    node.ask(T)
    for values in ({"hits": 3}, {"limit": 20}, {"limit": 20}, {"hits": 2}, {"behavior": RESET}, {"hits": 4}):
        node.hit(T, **values)
    assert reported(node) == [
        (3, 10, 0, False),
        (2, 20, 0, False),
        (2, 10, 0, False),
        (0, 10, RESET, False),
        (4, 10, 0, False),
    ]


def test_a_refusal_is_told_once_and_a_drain_by_what_it_is() -> None:
    """The owner remembers a refusal while nothing is left, and empties the bucket where the node did."""
    _, (node, _) = cluster()
    node.ask(T, hits=10)
    for _ in range(5):
        node.hit(T)
    assert reported(node) == [(0, 10, 0, True)]
    _, (drained, _) = cluster()
    drained.ask(T, hits=1)
    drained.hit(T, hits=3)
    drained.hit(T, hits=7, behavior=DRAIN)
    drained.flush(T)
    assert drained.owner.state("n", "k") == (0, 10, LONG, 0, 0, True, T + LONG, 10)


def test_a_refund_ends_the_memory_of_a_refusal_at_the_owner_too() -> None:
    """Refused, given back, taken: the bucket is empty again, and nothing was refused since."""
    owner, (node, _) = cluster()
    node.ask(T, hits=10)
    node.hit(T)
    node.hit(T, hits=-1)
    node.hit(T, hits=1)
    node.flush(T)
    assert owner.decide(T, fields(hits=0, duration=LONG))[:3] == (U, 10, 0)


def test_unsent_hits_are_not_summed_with_a_refund_that_ends_a_refusal() -> None:
    """The owner's answer says that hits were refused there while some of ours were on their way."""
    owner, (node, _) = cluster()
    node.ask(T, hits=5)
    node.hit(T)
    node.take()
    node.hit(T)
    assert owner.decide(T, fields(hits=5, duration=LONG))[0] == U
    assert owner.decide(T, fields(hits=1, duration=LONG))[0] == O
    node.deliver(T)
    node.answer(T)
    assert node.hit(T, hits=-3) == (U, 10, 1, T + LONG, 0)
    assert node.hit(T, hits=1) == (U, 10, 0, T + LONG, 0)
    node.flush(T)
    assert owner.decide(T, fields(hits=0, duration=LONG))[:3] == (U, 10, 0)


@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_a_peek_under_other_terms_is_told(algorithm: int) -> None:
    """It moves the window's end, or changes the rate of the leak, for the owner as well."""
    _, (node, _) = cluster()
    node.ask(T, algorithm=algorithm)
    node.hit(T, hits=0, duration=100, algorithm=algorithm)
    node.flush(T)
    assert node.owner.state("n", "k") == node.replicas.state("n", "k")
    state = node.owner.state("n", "k")
    assert state is not None
    assert state[2] == 100


def test_a_copy_that_is_used_is_renewed() -> None:
    """A peek or a refusal has the owner asked for its state, so that another node's refund is seen here."""
    _, (node, other) = cluster()
    node.ask(T, hits=10)
    other.ask(T, hits=-5)
    assert node.hit(T, hits=0) == (U, 10, 0, T + LONG, 0)
    assert [report.entries for report in node.replicas.take(10)] == [()]
    node.replicas.lost([Report("n", "k", ())])  # none of ours
    _, (node, other) = cluster()
    node.ask(T, hits=10)
    other.ask(T, hits=-5)
    assert node.hit(T, hits=1) == (O, 10, 0, T + LONG, LONG)
    node.flush(T)
    assert node.hit(T, hits=5) == (U, 10, 0, T + LONG, 0)
    assert node.replicas.due == 1
    node.flush(T)
    assert node.replicas.due == 0, "an idle copy is left in peace"


def test_a_bucket_has_one_report_under_way() -> None:
    """What is admitted meanwhile waits for its end, so that whatever becomes of it, the order is kept."""
    owner, (node, _) = cluster()
    node.ask(T, hits=1)
    node.hit(T, hits=2)
    node.take()
    node.hit(T, hits=3)
    node.take()
    assert len(node.up) == 1
    assert node.replicas.counters.unsent == 2
    node.deliver(T)
    assert used(owner) == 3
    node.answer(T)
    assert node.replicas.state("n", "k") == (0, 10, LONG, 0, 0, False, T + LONG, 6), "3 are charged on top"
    node.flush(T)
    assert used(owner) == 6
    assert node.replicas.counters.unsent == 0


def test_a_report_given_back_is_told_before_what_came_later() -> None:
    """A reset stays before the hits that followed it; what says the same becomes one entry again."""
    owner, (node, _) = cluster()
    node.ask(T, hits=5)
    node.hit(T, hits=2)
    node.hit(T, hits=0, behavior=RESET)
    node.hit(T, hits=3)
    node.take()
    node.hit(T, hits=1)
    node.give_back()
    node.hit(T, hits=1)
    assert node.replicas.counters.unsent == 3
    node.flush(T)
    assert used(owner) == 5


def test_a_reset_after_a_report_that_comes_back_is_told_after_it() -> None:
    """In another order, the hits would be charged to the bucket that was reset."""
    owner, (node, _) = cluster()
    node.ask(T, hits=5)
    node.hit(T, hits=2)
    node.take()
    node.hit(T, hits=0, behavior=RESET)
    node.give_back()
    node.flush(T)
    assert used(owner) == 0


def test_what_is_under_way_stays_charged_when_another_answer_comes() -> None:
    """The answer to an earlier question knows nothing of the report behind it."""
    _, (node, _) = cluster()
    node.hit(T, hits=1)
    node.hit(T, hits=1)
    node.deliver(T)
    node.answer(T)
    node.hit(T, hits=4)
    node.take()
    node.deliver(T)
    node.answer(T)
    assert node.hit(T, hits=0) == (U, 10, 4, T + LONG, 0)
    node.flush(T)
    assert node.hit(T, hits=0) == (U, 10, 4, T + LONG, 0)


def test_hits_of_two_windows_are_two_entries() -> None:
    """Unsent hits of the window before are told apart from those of this one, which count."""
    owner, (node, _) = cluster()
    node.ask(T)
    node.hit(T, hits=5)
    node.ask(T + LONG)
    node.hit(T + LONG, hits=3)
    node.flush(T + LONG)
    assert used(owner) == 4


def test_an_unreachable_owner_costs_no_memory() -> None:
    """Given back a thousand times, with hits between, a bucket still has one entry; other buckets are not held up."""
    for algorithm in (TOKEN, LEAKY):
        _, (node, _) = cluster()
        node.ask(T, limit=10_000, algorithm=algorithm)
        node.ask(T, unique_key="other")
        for tick in range(1000):
            node.hit(T + tick, limit=10_000, algorithm=algorithm)
            node.take()
            node.hit(T + tick, limit=10_000, algorithm=algorithm)
            node.give_back()
        assert node.replicas.counters.unsent == 1
        node.hit(T, unique_key="other")
        assert [report.unique_key for report in node.replicas.take(4)] == ["k", "other"]


def test_a_report_that_may_have_arrived_is_not_told_again() -> None:
    """Its hits are counted as lost; the copy keeps them until the owner's state comes, for which it asks."""
    owner, (node, _) = cluster()
    node.ask(T, hits=1)
    node.hit(T, hits=2)
    node.take()
    node.lose(T, arrived=False)
    assert node.replicas.counters[3:] == (1, 2)
    assert node.hit(T, hits=0) == (U, 10, 7, T + LONG, 0)
    node.flush(T)
    assert used(owner) == 1
    assert node.hit(T, hits=0) == (U, 10, 9, T + LONG, 0)


def test_the_end_of_a_report_counts_once() -> None:
    """A report that was given back and is then answered, or lost, changes nothing."""
    owner, (node, _) = cluster()
    node.ask(T, hits=1)
    node.hit(T, hits=2)
    (report,) = node.replicas.take(10)
    node.replicas.returned([report])
    node.replicas.returned([report])
    node.replicas.lost([report])
    node.replicas.settled(report, owner.state("n", "k"))
    assert node.replicas.counters.lost_hits == 0
    assert node.replicas.due == 1
    assert used(owner) == 1
    node.flush(T)
    assert used(owner) == 3


def test_an_owner_that_lost_its_bucket_has_copies_forgotten() -> None:
    """Without a bucket there is no state to hold; unsent hits bring it back, with its window."""
    owner, (node, _) = cluster()
    node.ask(T)
    node.hit(T, hits=0)
    owner.forget("n", "k")
    node.flush(T)
    assert len(node.replicas) == 0
    node.ask(T, hits=2)
    node.hit(T + 5, hits=0)
    node.take()
    owner.forget("n", "k")
    node.deliver(T)
    node.hit(T + 5, hits=4)
    node.answer(T)
    assert len(node.replicas) == 1
    node.flush(T + 5)
    assert owner.state("n", "k") == (0, 10, LONG, 0, 0, False, T + LONG, 4)


def test_hits_of_an_ended_window_do_not_fill_the_next() -> None:
    """A report that comes after a new window has opened is charged to none, at the owner and in the copy."""
    owner, (node, _) = cluster()
    node.ask(T)
    node.hit(T, hits=5)
    node.take()
    node.hit(T, hits=2)
    assert node.ask(T + LONG)[2:4] == (9, T + 2 * LONG)
    assert node.hit(T + LONG, hits=0) == (U, 10, 9, T + 2 * LONG, 0)
    node.flush(T + LONG)
    assert used(owner) == 1
    assert node.replicas.counters.unsent == 0


def test_take_bounds_a_batch() -> None:
    """At most so many entries at once; a bucket with more is told in parts, in order."""
    owner, (node, _) = cluster()
    for key in range(10):
        node.ask(T, unique_key=f"k{key}")
    for turn in range(6):
        for key in range(10):
            node.hit(T, unique_key=f"k{key}", limit=10 + turn % 2)
    taken = 0
    while reports := node.replicas.take(4):
        assert sum(len(report.entries) or 1 for report in reports) <= 4
        taken += sum(len(report.entries) for report in reports)
        for report in reports:
            node.replicas.settled(report, settle(owner, T, sent(report)))
    assert taken == 60
    assert used(owner, "n", "k9") == 7
    assert node.replicas.counters.unsent == 0


# --- Bounds


def test_new_keys_are_for_the_owner_when_there_is_no_room() -> None:
    """No copy is dropped for a new one unless it has ended with nothing to tell."""
    _, (node, _) = cluster(max_replicas=2)
    for key in "abc":
        node.ask(T, unique_key=key, duration=1000)
    assert [node.replicas.state("n", key) is not None for key in "abc"] == [True, True, False]
    assert node.hit(T, unique_key="c", duration=1000) is None
    node.hit(T, unique_key="a", duration=1000)
    node.ask(T + 1000, unique_key="d")
    assert [node.replicas.state("n", key) is not None for key in "abcd"] == [True, False, False, True]


def test_no_more_is_admitted_than_can_be_remembered() -> None:
    """At the bound of unsent runs, what needs another one is for the owner; what joins one goes on."""
    owner, (node, _) = cluster(max_replicas=3)
    node.ask(T, limit=100)
    admitted = 1
    for turn in range(20):
        verdict = node.hit(T, limit=100 + turn % 2)
        admitted += verdict is not None and verdict[0] == U
    assert node.hit(T, limit=100) is not None
    assert node.hit(T, limit=100, hits=0) is not None
    counters = node.replicas.counters
    assert counters.unsent == 3
    assert counters.turned_away > 0
    node.up.clear()
    node.flush(T)
    assert used(owner) == admitted + 1


def test_a_refusal_past_the_bound_is_not_noted() -> None:
    """It is no hit that could be lost, and the bound holds; one that would drain is for the owner."""
    _, (node, _) = cluster(max_replicas=1)
    node.ask(T, hits=8)
    node.hit(T, hits=1)
    assert node.hit(T, hits=1) == (U, 10, 0, T + LONG, 0)
    node.replicas.returned(node.replicas.take(10))
    assert node.hit(T, hits=0) == (U, 10, 0, T + LONG, 0)
    assert node.hit(T, hits=1) == (O, 10, 0, T + LONG, LONG)
    assert node.replicas.counters.unsent == 1
    assert node.hit(T, hits=1, behavior=DRAIN) is None


def test_the_sweep_is_bounded_and_forgets_only_what_is_told() -> None:
    """Ended copies go, a few at a time; one with unsent hits or a report under way stays."""
    _, (node, _) = cluster()
    for key in range(10):
        node.ask(T, unique_key=f"k{key}", duration=100)
    node.ask(T, unique_key="long")
    node.hit(T, unique_key="k0", duration=100)
    node.take()
    node.hit(T, unique_key="k1", duration=100)
    assert node.replicas.sweep(T + 99, 100) == 0
    assert sum(node.replicas.sweep(T + 100, 3) for _ in range(8)) == 8
    assert len(node.replicas) == 3
    node.flush(T + 100)
    assert sum(node.replicas.sweep(T + 100, 3) for _ in range(8)) == 2
    assert len(node.replicas) == 1


def test_a_leaky_copy_ends_a_window_after_it_was_full() -> None:
    """It is full after 100 ms, and 1000 ms later the owner is asked, swept or not."""
    _, (node, _) = cluster()
    node.ask(T, duration=1000, algorithm=LEAKY)
    assert node.replicas.sweep(T + 1099, 10) == 0
    assert node.hit(T + 1099, hits=0, duration=1000, algorithm=LEAKY) is not None
    assert node.hit(T + 2099, hits=0, duration=1000, algorithm=LEAKY) is None
    node.up.clear()
    node.flush(T + 2099)
    assert node.replicas.sweep(T + 3100, 10) == 1


# --- Odd answers and reports


@pytest.mark.parametrize("state", [(), 1, "x", (0, 10, 1000, 0, 0, False, T, None)])
def test_an_answer_that_is_no_state_changes_no_copy(state: object) -> None:
    """The report counts as lost, and the next one is sent."""
    _, (node, _) = cluster()
    node.ask(T)
    node.hit(T)
    before = node.replicas.state("n", "k")
    (report,) = node.replicas.take(10)
    with pytest.raises(InvalidRequest):
        node.replicas.settled(report, state)
    with pytest.raises(InvalidRequest):
        node.replicas.adopt(T, "n", "k", state)
    assert node.replicas.state("n", "k") == before
    assert node.replicas.counters.lost_hits == 1
    assert node.replicas.due == 1


ENTRY = (1, 10, 1000, 0, 0, 0, T + 1000, False)


@pytest.mark.parametrize(
    "report",
    [
        None,
        (),
        ("n", "k"),
        ("n", "k", 1),
        ("n", "k", (1,)),
        ("n", "k", (ENTRY[:7],)),
        ("n", "k", ((*ENTRY[:7], 0),)),
        ("n", "k", ((*ENTRY[:6], None, False),)),
        ("n", "k", ((*ENTRY[:6], 1.5, False),)),
        ("n", "k", ((1.0, *ENTRY[1:]),)),
        ("n", "k", ((1, 10, 1000, 7, *ENTRY[4:]),)),
        ("", "k", (ENTRY,)),
        ("n", 1, ()),
        (["n"], "k", ()),
    ],
)
def test_what_is_no_report_charges_nothing(report: Any) -> None:
    """An owner refuses nonsense from a peer as it does from a client."""
    table = Table()
    with pytest.raises(InvalidRequest):
        settle(table, T, report)
    assert len(table) == 0


# --- Whole clusters

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
