"""GLOBAL's copies one by one: who answers, what is reported, what bounds them, and what is no state or report."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.errors import InvalidRequest
from sidecar.replica import Report, settle
from sidecar.table import Table
from tests.helpers import DRAIN, GREGORIAN, LEAKY, NOON, RESET, TOKEN, O, T, U, fields
from tests.replicas import LONG, Node, cluster, sent, used

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
