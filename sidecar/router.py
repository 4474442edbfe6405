"""Who answers a request: this node, or the peer that owns its key; and the forwarding of what is others'.

Decides by the ring.  A plain call: what is owned here is decided at once, the rest is handed to links and comes
back through forward.py.  Knows no stream, no loop and no clock; links, deadlines and the deciding are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from cluster_link.membership import Peer
from cluster_link.ring import Ring
from sidecar.errors import InvalidRequest
from sidecar.forward import Asker, Deadlines, Frame, LoneSlot, ResetSlot, Slot, made_up
from sidecar.messages import MAX_FALLBACK, MAX_KEY_BYTES, Behavior, Fallback, error_answer, validate
from sidecar.sync import GlobalSync
from sidecar.tally import Tally
from sidecar.wire import Op, Packer, filled

_CHECK, _RESET = int(Op.CHECK), int(Op.RESET)
_GLOBAL = int(Behavior.GLOBAL)
_OF_BUDGET = 0.8
"""The part of a caller's budget that an owner may take."""
_ALONE = int(Behavior.NO_BATCHING)


class Link(Protocol):
    """The way to one peer: settles the waiter exactly once.  node: what it calls itself; "" before it answered."""

    node: str

    def ask(self, op: int, payload: Any, waiter: Slot, alone: bool = False) -> None: ...


class Course(NamedTuple):
    """How one request, alone in its frame, goes to its owner: found once, then followed as often as it comes."""

    link: Link
    request: Any
    payload: Any
    alone: bool
    seconds: float


class Router:
    """The routing of one ring; a new ring gets a new one.

    me: this node on the ring.  link: the way to a peer.  replicas: GLOBAL's.  deadlines: fail what has waited too long.
    decide: requests -> their answers, decided here now.  decide_alone: the same for a fallback's own buckets.
    fallback: what becomes of a request whose owner does not answer; may be set anew at any time.
    timeout: seconds to wait for owners at most.  tally: where answers are counted.
    """

    def __init__(
        self,
        me: Peer,
        ring: Ring,
        link: Callable[[Peer], Link],
        replicas: GlobalSync,
        deadlines: Deadlines,
        decide: Callable[[Sequence[Any]], list[Any]],
        decide_alone: Callable[[Sequence[Any]], Any],
        fallback: Fallback,
        timeout: float,
        tally: Tally | None = None,
    ) -> None:
        self._me = me.name
        self.ring = ring
        self._link = link
        self._replicas = replicas
        self._deadlines = deadlines
        self._decide = decide
        self._decide_alone = decide_alone
        self.fallback = fallback
        self._timeout = timeout
        self._tally = tally or Tally()
        self.forwarded = 0
        self.fallbacks = 0

    def owner(self, name: object, unique_key: object) -> Peer | None:
        """The peer that owns the bucket; None if this node does, or if these are no name and key at all."""
        if type(name) is not str or type(unique_key) is not str:
            return None
        if len(name) > MAX_KEY_BYTES or len(unique_key) > MAX_KEY_BYTES:
            return None
        peer = self.ring.owner(name, unique_key)
        return None if peer.name == self._me else peer

    def check(
        self, requests: Sequence[Any], now: int, asker: Asker, budget: int | None, finish: Callable[[list[Any]], Any]
    ) -> list[Any] | None:
        """The answers, if all are decided here; else None, and the asker is sent them when the last is there."""
        own: list[Any] = []
        places: list[int] = []
        others: list[tuple[int, Peer, Any]] = []
        for index, request in enumerate(requests):
            peer = self.route(request)
            if peer is None:
                own.append(request)
                places.append(index)
            else:
                others.append((index, peer, request))
        if len(own) == len(requests):
            return self._decide(own)
        answers: list[Any] = [None] * len(requests)
        for index, answer in zip(places, self._decide(own), strict=True):
            answers[index] = answer
        others = [other for other in others if not self._answer_from_replica(now, *other, answers)]
        if not others:
            return answers
        frame = Frame(asker, answers, len(others), finish)
        slots = [
            Slot(frame, index, request, self._fall_back, self._tally.forwarded.see) for index, _, request in others
        ]
        self._watch(slots, budget)
        for slot, (_, peer, request) in zip(slots, others, strict=True):
            self._ask(peer, request, slot)
        return None

    def course(self, peer: Peer, request: Any, budget: int | None) -> Course:
        """The way of a request of which `check` has found that `peer` is to be asked, within budget ms."""
        return Course(self._link(peer), request, request[:9], _is_alone(request), self._seconds(budget))

    def forward(self, course: Course, asker: Asker, request_id: int, packer: Packer) -> None:
        """Forward one request, alone in its frame; the asker is sent what `packer` makes of the answer."""
        link, request, payload, alone, seconds = course
        slot = LoneSlot(asker, request_id, packer, request, self._fall_back, self._tally.forwarded.see)
        self._deadlines.add(seconds, (slot,))
        self.forwarded += 1
        link.ask(_CHECK, payload, slot, alone)

    def reset(
        self,
        peer: Peer,
        name: str,
        unique_key: str,
        asker: Asker,
        budget: int | None,
        finish: Callable[[list[Any]], bytes],
    ) -> None:
        """Have the owner forget a bucket; the asker is sent what `finish` makes of its bool, or of a text why not."""
        slot = ResetSlot(Frame(asker, [None], 1, finish), 0, None, lambda _, why: why)
        self._watch([slot], budget)
        self._link(peer).ask(_RESET, (name, unique_key), slot, alone=True)

    def _watch(self, slots: list[Slot], budget: int | None) -> None:
        self._deadlines.add(self._seconds(budget), slots)
        self.forwarded += len(slots)

    def _seconds(self, budget: int | None) -> float:
        """How long owners may take, so that the fallback's answer is there before the caller gives up, a step of the
        deadlines later at worst."""
        if budget is None:
            return self._timeout
        return max(0.0, min(self._timeout, budget * _OF_BUDGET / 1000 - self._deadlines.step))

    def _answer_from_replica(self, now: int, index: int, peer: Peer, request: Any, answers: list[Any]) -> bool:
        """Answer a GLOBAL request from the replica; False if it is not GLOBAL, or its owner has to be asked."""
        if not is_global(request):
            return False
        try:
            verdict = self._replicas.decide(now, filled(request)[0])
        except InvalidRequest as error:
            self._tally.other.replica.error += 1
            answers[index] = error_answer(str(error))
            return True
        if verdict is None:
            return False
        self._tally.row(request[0]).replica.see(verdict[0])
        # As the owner would say it itself; on the ring it may be called by a uid.
        answers[index] = (*verdict, self._link(peer).node or peer.name)
        return True

    def _ask(self, peer: Peer, request: Any, slot: Slot) -> None:
        if is_global(request):
            self._replicas.ask(peer, filled(request)[0], slot)
            return
        self._link(peer).ask(_CHECK, request[:9], slot, _is_alone(request))

    def route(self, request: Any) -> Peer | None:
        """The peer to ask; None for what is decided here, which is also where odd values get their error."""
        if type(request) is not tuple or not 5 <= len(request) <= 10:
            return None
        peer = self.owner(request[0], request[1])
        if peer is None:
            return None
        for value in request[2:8]:
            if type(value) is not int:
                return None
        if len(request) > 8 and request[8] is not None and type(request[8]) is not int:
            return None
        if len(request) == 10 and (type(request[9]) is not int or not 0 <= request[9] <= MAX_FALLBACK):
            return None
        return peer

    def _fall_back(self, request: Sequence[Any], why: str) -> Any:
        self.fallbacks += 1
        request, policy = filled(request)
        try:
            validate(request)  # what its owner would have refused is no one's to admit
            answer = made_up(policy or self.fallback, request, why, self._decide_share)
            self._tally.row(request[0]).fallback.see(answer[0])
        except InvalidRequest as error:
            self._tally.other.fallback.error += 1
            answer = error_answer(str(error))
        return answer

    def _decide_share(self, request: Sequence[Any]) -> Any:
        """Decide with an equal share of the limit, in buckets that are kept apart from owned ones."""
        nodes = len(self.ring.peers)
        name, unique_key, hits, limit, duration, algorithm, behavior, burst, created_at = request
        limit, burst = (max(1, value // nodes) if value > 0 else value for value in (limit, burst))
        return self._decide_alone((name, unique_key, hits, limit, duration, algorithm, behavior, burst, created_at))


def is_global(request: Sequence[Any]) -> bool:
    """Whether a request that `Router.route` gave a peer is to be answered from a replica."""
    return len(request) > 6 and bool(request[6] & _GLOBAL)


def _is_alone(request: Sequence[Any]) -> bool:
    return len(request) > 6 and bool(request[6] & _ALONE)
