"""A frame whose requests others decide: each is settled once, and the frame is answered once, whatever happens.

Links and timers are fakes here, so that each path is taken on purpose.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_link.membership import Peer
from cluster_link.ring import Ring
from sidecar.forward import FALLBACKS, Deadlines, Slot, made_up
from sidecar.messages import Fallback
from sidecar.router import Router
from sidecar.sync import GlobalSync
from sidecar.wire import Op
from tests.fakes import FakeAsker, FakeClock, FakeLink
from tests.helpers import T, fields

ME, NEAR, FAR = Peer("me", "h:1"), Peer("near", "h:2"), Peer("far", "h:3")
RING = Ring([ME, NEAR, FAR])
VERDICT = (0, 10, 9, 77, 0)
TIMEOUT = 0.5


def keys(owner: Peer, amount: int) -> list[str]:
    """So many keys of the limit "n" that this peer owns."""
    every = (f"k{number}" for number in itertools.count())
    return list(itertools.islice((key for key in every if RING.owner("n", key) == owner), amount))


MINE, NEARS, FARS = keys(ME, 5)[0], keys(NEAR, 5), keys(FAR, 5)


class Bench:
    """A router between fakes; `decided` and `shares` are what was decided here and as a fallback's share."""

    def __init__(self, fallback: Fallback = Fallback.ERROR, reply: Callable[[Slot], None] | None = None) -> None:
        self.links = {NEAR: FakeLink(reply), FAR: FakeLink(reply)}
        self.clock = FakeClock()
        self.decided: list[Any] = []
        self.shares: list[Any] = []
        self.asker = FakeAsker()
        deadlines = Deadlines(self.clock.later, self.clock.now)
        self.router = Router(
            me=ME,
            ring=RING,
            link=self.links.__getitem__,
            replicas=cast(GlobalSync, None),  # nothing here is GLOBAL
            deadlines=deadlines,
            decide=self._decide,
            decide_alone=self._share,
            fallback=fallback,
            timeout=TIMEOUT,
        )

    def expire(self) -> None:
        """Let more time pass than anything waits for."""
        self.clock.pass_by(2 * TIMEOUT)

    def _decide(self, requests: Sequence[Any]) -> list[Any]:
        self.decided += requests
        return [("here", request[1]) for request in requests]

    def _share(self, request: Sequence[Any]) -> Any:
        self.shares.append(request)
        return VERDICT

    def check(self, *requests: Any, budget: int | None = None) -> list[Any] | None:
        """Ask; the frame that is sent later is the list of answers itself."""
        return self.router.check(requests, now=T, asker=self.asker, budget=budget, finish=whole)

    @property
    def sent(self) -> Any:
        """The answers of the one frame that was sent."""
        (answers,) = self.asker.sent
        return answers


def whole(answers: list[Any]) -> Any:
    """Where a daemon makes bytes of a frame's answers, here they are sent as they stand."""
    return list(answers)


def request(key: str, fallback: object = None, **values: object) -> tuple[object, ...]:
    """A request of ten values, or of nine without a fallback."""
    plain = fields(unique_key=key, **values)
    return plain if fallback is None else (*plain, fallback)


# --- Who is asked


def test_a_frame_of_own_keys_is_decided_at_once() -> None:
    """No link, no deadline, and the answers come back from the call itself."""
    bench = Bench()
    assert bench.check(request(MINE), request(MINE)) == [("here", MINE)] * 2
    assert not any(link.asked for link in bench.links.values())
    assert not bench.clock.timers
    assert not bench.asker.sent


def test_each_request_goes_to_its_owner_and_comes_back_in_its_place() -> None:
    """Own ones are decided here, the others handed to the links of their owners, in the frame's order."""
    bench = Bench()
    order = [FARS[0], MINE, NEARS[0], FARS[1], NEARS[0], MINE]
    assert bench.check(*(request(key, hits=number) for number, key in enumerate(order))) is None
    assert [asked[1] for asked in bench.decided] == [MINE, MINE]
    assert [payload[1:3] for _, payload, _, _ in bench.links[FAR].asked] == [(FARS[0], 0), (FARS[1], 3)]
    assert [payload[1:3] for _, payload, _, _ in bench.links[NEAR].asked] == [(NEARS[0], 2), (NEARS[0], 4)]
    for peer in (NEAR, FAR):
        for _, payload, slot, _ in reversed(bench.links[peer].asked):
            slot.answered((*VERDICT[:4], payload[2]), peer.name)
    assert bench.sent == [
        (*VERDICT[:4], 0, "far"),
        ("here", MINE),
        (*VERDICT[:4], 2, "near"),
        (*VERDICT[:4], 3, "far"),
        (*VERDICT[:4], 4, "near"),
        ("here", MINE),
    ]
    assert bench.router.forwarded == 4
    assert bench.router.fallbacks == 0


def test_what_travels_is_the_request_without_its_fallback() -> None:
    """The policy is this node's own business; the owner is sent nine values at most."""
    bench = Bench()
    bench.check(request(NEARS[0], int(Fallback.ALLOW)), fields(unique_key=NEARS[1])[:5])
    assert [payload for _, payload, _, _ in bench.links[NEAR].asked] == [
        fields(unique_key=NEARS[0]),
        fields(unique_key=NEARS[1])[:5],
    ]


@pytest.mark.parametrize(("behavior", "alone"), [(0, False), (1, True), (33, True), (32, False)])
def test_no_batching_leaves_alone(behavior: int, alone: bool) -> None:
    """NO_BATCHING, among other bits or not, has its request leave in a batch of its own."""
    bench = Bench()
    bench.check(request(NEARS[0], behavior=behavior))
    assert [found for _, _, _, found in bench.links[NEAR].asked] == [alone]


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param("text", id="no array"),
        pytest.param((), id="empty"),
        pytest.param(("n", NEARS[0], 1, 10), id="four values"),
        pytest.param((*fields(unique_key=NEARS[0]), 0, 0), id="eleven values"),
        pytest.param(request(NEARS[0], hits="1"), id="hits is text"),
        pytest.param(request(NEARS[0], limit=1.5), id="limit is a float"),
        pytest.param(request(NEARS[0], duration=None), id="duration is nil"),
        pytest.param(request(NEARS[0], behavior=True), id="behavior is a bool"),
        pytest.param(request(NEARS[0], created_at="now"), id="created_at is text"),
        pytest.param(request(NEARS[0], 5), id="no such fallback"),
        pytest.param(request(NEARS[0], -1), id="a negative fallback"),
        pytest.param(request(NEARS[0], "allow"), id="fallback is text"),
        pytest.param(request(NEARS[0], True), id="fallback is a bool"),
        pytest.param(request(NEARS[0], 1.0), id="fallback is a float"),
        pytest.param(request(NEARS[0], {}), id="fallback is a map"),
        pytest.param(request(NEARS[0], ()), id="fallback is an array"),
        pytest.param(fields(name=5), id="name is an integer"),
        pytest.param(fields(unique_key=b"k"), id="key is bytes"),
        pytest.param(fields(unique_key=()), id="key is an array"),
        pytest.param(fields(unique_key="k" * 5_000), id="key is too long"),
    ],
)
def test_what_is_no_request_never_travels(odd: Any) -> None:
    """It is handed to this node's own deciding, which says what is wrong with it; its neighbours travel."""
    bench = Bench()
    bench.router._decide = lambda requests: [("wrong", each) for each in requests]
    assert bench.check(request(NEARS[0]), odd) is None
    (slot,) = bench.links[NEAR].waiters
    slot.answered(VERDICT, "near")
    assert bench.sent == [(*VERDICT, "near"), ("wrong", odd)]


# --- The time


@pytest.mark.parametrize(
    ("budget", "seconds"), [(None, 0.5), (100, 0.075), (1, 0.0), (500, 0.395), (700, 0.5), (2**63 - 1, 0.5)]
)
@pytest.mark.parametrize("start", [0.0, 0.0049, 12_345.678])
def test_the_shorter_of_time_out_and_budget_counts(budget: int | None, seconds: float, start: float) -> None:
    """An owner has four fifths of the caller's budget less a step of 5 ms, so that the policy's answer is there before
    the caller gives up, and never more than the daemon's time-out; it may be two steps late."""
    bench = Bench()
    bench.clock.seconds = start
    bench.check(request(NEARS[0]), request(FARS[0]), budget=budget)
    bench.clock.pass_by(max(0.0, seconds - 0.001))
    assert not bench.asker.sent
    bench.clock.pass_by(0.012)
    assert [answer[0] for answer in bench.sent] == [2, 2]


def test_expiry_falls_back_for_what_has_not_come_and_keeps_what_has() -> None:
    """One slow owner costs the requests of its keys, not the frame."""
    bench = Bench()
    bench.check(request(NEARS[0]), request(MINE), request(FARS[0]))
    near, far = bench.links[NEAR].waiters[0], bench.links[FAR].waiters[0]
    near.answered(VERDICT, "near")
    assert not bench.asker.sent
    bench.expire()
    assert bench.sent[:2] == [(*VERDICT, "near"), ("here", MINE)]
    assert bench.sent[2][0] == 2
    assert bench.sent[2][-1]
    assert bench.router.fallbacks == 1
    assert not far.waiting


@pytest.mark.parametrize("late", ["answered", "failed", "expired"])
@pytest.mark.parametrize("first", ["answered", "failed", "expired"])
def test_only_the_first_outcome_of_a_request_counts(first: str, late: str) -> None:
    """An answer, a failure and the end of the time, each before each: the frame is sent once, as the first has it."""
    bench = Bench(Fallback.DENY)
    bench.check(request(NEARS[0]))
    (slot,) = bench.links[NEAR].waiters
    assert slot.waiting
    outcomes: dict[str, Callable[[], None]] = {
        "answered": lambda: slot.answered(VERDICT, "near"),
        "failed": lambda: slot.failed("the link broke", True),
        "expired": bench.expire,
    }
    outcomes[first]()
    found = list(bench.sent)
    assert not slot.waiting
    outcomes[late]()
    assert bench.sent == found
    assert bench.router.fallbacks == (0 if first == "answered" else 1)
    assert found[0][0] == (0 if first == "answered" else 1)


@given(st.data())
def test_every_order_of_outcomes_settles_each_request_once(data: st.DataObject) -> None:
    """Any frame, any outcomes in any order, any of them again: one frame is sent, each place as its first outcome
    has it."""
    where = data.draw(st.lists(st.sampled_from([MINE, *NEARS, *FARS]), min_size=1, max_size=8))
    bench = Bench(Fallback.ALLOW)
    at_once = bench.check(*(request(key) for key in where))
    slots = [*bench.links[NEAR].waiters, *bench.links[FAR].waiters]
    assert (at_once is not None) == (not slots)
    events = data.draw(
        st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["answered", "failed", "expired"])), max_size=20)
    )
    first: dict[int, str] = {}
    for number, event in [*events, (0, "expired")] if slots else []:
        if event == "expired":
            bench.expire()
            first.update({each: "failed" for each in range(len(slots)) if each not in first})
        else:
            slot = slots[number % len(slots)]
            first.setdefault(number % len(slots), event)
            if event == "answered":
                slot.answered(VERDICT, "owner")
            else:
                slot.failed("why", True)
        assert len(bench.asker.sent) == (len(first) == len(slots))
    if slots:
        kinds = {id(slot): first[number] for number, slot in enumerate(slots)}
        waiting = {NEAR: iter(bench.links[NEAR].waiters), FAR: iter(bench.links[FAR].waiters)}
        for key, answer in zip(where, bench.sent, strict=True):
            owner = RING.owner("n", key)
            if owner == ME:
                assert answer == ("here", key)
            elif kinds[id(next(waiting[owner]))] == "answered":
                assert answer == (*VERDICT, "owner")
            else:
                assert answer[6] is True


# --- A link that settles inside `ask`


def test_a_link_that_fails_at_once_gets_the_frame_answered_once() -> None:
    """An owner known to be away: no time is waited, and the frame is sent from within the call."""
    bench = Bench(Fallback.DENY, reply=lambda slot: slot.failed("away", True))
    assert bench.check(request(NEARS[0]), request(MINE), request(FARS[0])) is None
    assert [answer[0] for answer in bench.sent if answer[0] != "here"] == [1, 1]
    assert bench.sent[1] == ("here", MINE)
    bench.expire()
    assert bench.sent


def test_one_link_that_fails_at_once_leaves_the_other_to_answer() -> None:
    """The frame waits for the good owner."""
    bench = Bench()
    bench.links[FAR] = FakeLink(reply=lambda slot: slot.failed("away", True))
    bench.check(request(FARS[0]), request(NEARS[0]), request(FARS[1]))
    assert not bench.asker.sent
    bench.links[NEAR].waiters[0].answered(VERDICT, "near")
    assert [answer[0] for answer in bench.sent] == [2, 0, 2]


# --- A client that has gone


def test_a_client_that_has_gone_is_waited_for_no_more() -> None:
    """A link sees that nobody waits and need not send; the frame is still settled, once, at its time."""
    bench = Bench()
    bench.check(request(NEARS[0]), request(FARS[0]))
    slots = [*bench.links[NEAR].waiters, *bench.links[FAR].waiters]
    assert all(slot.waiting for slot in slots)
    bench.asker.gone = True
    assert not any(slot.waiting for slot in slots)
    bench.expire()
    assert len(bench.asker.sent) == 1


# --- What a fallback answers


SETTINGS = [
    pytest.param(Fallback.ERROR, (2, 0, 0, 0, 0, None, False, "why"), id="error"),
    pytest.param(Fallback.LOCAL, (*VERDICT, None, True, "why"), id="local"),
    pytest.param(Fallback.ALLOW, (0, 10, 0, 0, 0, None, True, "why"), id="allow"),
    pytest.param(Fallback.DENY, (1, 10, 0, 0, 0, None, True, "why"), id="deny"),
]


@pytest.mark.parametrize(("policy", "answer"), SETTINGS)
@pytest.mark.parametrize("setting", [Fallback.ERROR, Fallback.LOCAL, Fallback.ALLOW, Fallback.DENY])
@pytest.mark.parametrize("where", ["setting", "request", "no wish"])
def test_the_policy_of_the_request_counts_else_the_daemons(
    policy: Fallback, answer: tuple[object, ...], setting: Fallback, where: str
) -> None:
    """All but error say degraded; each says why.  A request's own policy, 0 meaning none, goes before the setting."""
    daemons = policy if where != "request" else setting
    bench = Bench(daemons)
    own = {"setting": None, "request": int(policy), "no wish": 0}[where]
    bench.check(request(NEARS[0], own))
    bench.links[NEAR].waiters[0].failed("why", True)
    assert bench.sent == [answer]


@pytest.mark.parametrize(("policy", "answer"), SETTINGS)
def test_made_up_answers(policy: Fallback, answer: tuple[object, ...]) -> None:
    """What each policy makes of a request, whatever made it necessary; only `local` decides anything."""
    asked: list[object] = []

    def decide(request: Sequence[Any]) -> Any:
        asked.append(request)
        return VERDICT

    assert made_up(policy, fields(), "why", decide) == answer
    assert asked == ([fields()] if policy == Fallback.LOCAL else [])


def test_every_setting_has_its_policy() -> None:
    """The words of the daemon's setting are the policies a request may name."""
    assert {word.upper() for word in FALLBACKS} == set(Fallback.__members__) - {"DAEMONS"}
    assert all(FALLBACKS[word] is Fallback[word.upper()] for word in FALLBACKS)


@pytest.mark.parametrize(
    ("limit", "burst", "share"),
    [(90, 0, (30, 0)), (91, 31, (30, 10)), (2, 1, (1, 1)), (1, 0, (1, 0)), (0, 0, (0, 0)), (0, 9, (0, 3))],
)
def test_a_local_decision_has_an_equal_share_of_the_limit(limit: int, burst: int, share: tuple[int, int]) -> None:
    """limit // nodes, but never 0 where the limit is not; so with the burst; all else as it was asked."""
    bench = Bench(Fallback.LOCAL)
    bench.check(fields(unique_key=NEARS[0], hits=3, limit=limit, burst=burst, duration=7, algorithm=1, created_at=5))
    bench.links[NEAR].waiters[0].failed("why", True)
    assert bench.shares == [
        fields(unique_key=NEARS[0], hits=3, limit=share[0], burst=share[1], duration=7, algorithm=1, created_at=5)
    ]
    assert not bench.decided


@pytest.mark.parametrize("values", [{"limit": -1}, {"burst": -1}])
def test_a_share_of_a_bad_number_is_a_bad_number(values: dict[str, object]) -> None:
    """A negative limit is no limit of 1: it gets its error and no share."""
    bench = Bench(Fallback.LOCAL)
    bench.check(request(NEARS[0], **values))
    bench.links[NEAR].waiters[0].failed("why", True)
    assert not bench.shares
    ((status, *_, error),) = bench.sent
    assert status == 2
    assert next(iter(values)) in error


# --- An owner's answer


@pytest.mark.parametrize(
    ("answer", "settled"),
    [
        (VERDICT, (*VERDICT, "near")),
        ((2, 0, 0, 0, 0, None, False, "bad"), (2, 0, 0, 0, 0, None, False, "bad")),
        ((*VERDICT, "other", False, ""), (*VERDICT, "other", False, "")),
    ],
)
def test_a_plain_decision_gets_its_owners_name(answer: tuple[object, ...], settled: tuple[object, ...]) -> None:
    """Five values are a decision of the peer that answered; a longer answer says itself what it is."""
    bench = Bench()
    bench.check(request(NEARS[0]))
    bench.links[NEAR].waiters[0].answered(answer, "near")
    assert bench.sent == [settled]


# --- A reset


@pytest.mark.parametrize("answer", [True, False, "the owner says why not"])
def test_a_reset_is_asked_of_the_owner_alone_and_its_answer_passed_on(answer: object) -> None:
    """It leaves in a batch of its own, since a batch has one op."""
    bench = Bench()
    bench.router.reset(NEAR, "n", NEARS[0], bench.asker, None, whole)
    assert [(op, payload, alone) for op, payload, _, alone in bench.links[NEAR].asked] == [
        (Op.RESET, ("n", NEARS[0]), True)
    ]
    bench.links[NEAR].waiters[0].answered(answer, "near")
    assert bench.sent == [answer]


@pytest.mark.parametrize("fallback", FALLBACKS.values())
def test_a_reset_that_gets_no_answer_says_why_whatever_the_policy(fallback: Fallback) -> None:
    """There is no decision to make up."""
    bench = Bench(fallback)
    bench.router.reset(NEAR, "n", NEARS[0], bench.asker, 100, whole)
    bench.clock.pass_by(0.12)
    (why,) = bench.sent
    assert isinstance(why, str)
    assert why


# --- Nothing is left behind


@contextmanager
def no_cycles() -> Iterator[None]:
    """Fails if what is made inside needs the cycle collector to be freed."""
    gc.collect()
    gc.disable()
    try:
        yield
        assert gc.collect() == 0
    finally:
        gc.enable()


def _settle(bench: Bench, how: str) -> None:
    near, far = bench.links[NEAR].waiters[0], bench.links[FAR].waiters[0]
    if how == "answered":
        near.answered(VERDICT, "near")
        far.answered(VERDICT, "far")
    elif how == "failed":
        near.failed("why", True)
        far.failed("why", True)
    elif how == "mixed":
        near.answered(VERDICT, "near")
        bench.expire()
        far.answered(VERDICT, "far")
    elif how == "expired":
        bench.expire()


@pytest.mark.parametrize("how", ["answered", "failed", "expired", "mixed", "at once"])
def test_a_frame_that_is_done_leaves_no_circle(how: str) -> None:
    """The daemon's collector is kept off old objects, so that a circle for each frame would fill the memory."""
    bench = Bench(Fallback.LOCAL, reply=(lambda slot: slot.failed("away", True)) if how == "at once" else None)
    with no_cycles():
        for _ in range(10):
            bench.check(request(NEARS[0]), request(MINE), request(FARS[0]))
            _settle(bench, how)
            assert len(bench.asker.sent) == 1
            bench.asker.sent.clear()
            bench.expire()
            for link in bench.links.values():
                link.asked.clear()


@pytest.mark.parametrize("policy", [Fallback.LOCAL, Fallback.ALLOW, Fallback.DENY], ids=lambda policy: policy.name)
def test_no_fallback_answers_what_is_no_request(policy: Fallback) -> None:
    """An unknown algorithm is an error whoever is away: a policy makes no decision on it."""
    bench = Bench()
    bench.check((*fields(unique_key=NEARS[0], algorithm=7), int(policy)))
    (slot,) = bench.links[NEAR].waiters
    slot.failed("away", False)
    ((status, *_, error),) = bench.sent
    assert status == 2
    assert "unknown algorithm 7" in error
