"""What a request frame asks for, and its answer: bytes in, bytes out, in one plain call.

Decides how each operation is carried out on this node.  Knows no socket and reads no clock: the server
hands it a frame's body and the instant.  On this path there is no task, no future and no log line a hit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sidecar.clock import Clock, SystemClock
from sidecar.errors import InvalidRequest
from sidecar.forward import Asker
from sidecar.hot import NEVER, HotKeys
from sidecar.messages import MAX_REQUESTS, Status, error_answer, int_fault, text_fault
from sidecar.router import Course, Router, is_global
from sidecar.sync import settle_all
from sidecar.table import Table
from sidecar.tally import Counts, Tally
from sidecar.wire import BadFrame, Op, Outcome, Packer, filled, frame, open_request, split_id

if TYPE_CHECKING:
    from cluster_link.membership import Peer
    from cluster_link.peer_client import Span, Waiter

_CHECK = int(Op.CHECK)
_ANSWERED = int(Outcome.ANSWERED)
_ERROR = int(Status.ERROR)
_MAX_KNOWN = 16_384
"""Frames remembered, of about 300 bytes each; past it a new memory begins, and of the one before, which is kept till
then, what is asked for again moves over."""
_FIELDS = 9
_TOLD, _MOST_TOLD = 20, 100
"""Hottest names and keys told, by default and at most: the longest there are then fill a third of a frame."""

_Known = tuple[Any, int, Any, Counts]
"""What `Table.find` found, and the counts of the limit's name."""

CLOCK_SET = 0
CLOCK_ADVANCE = 1


class Tracing(Protocol):
    """How requests whose callers are traced are followed (tracing.py)."""

    def asked(self, context: str, asker: Asker) -> Asker:
        """The asker, marked with its sampled trace, if the frame's context names one."""

    def forwarded(self, peer: Peer, op: int, waiters: Sequence[Waiter]) -> Span | None:
        """The span of a batch that leaves for a peer."""

    def answering(self, op: int, payload: Any, context: str) -> Span | None:
        """The span of a batch from a peer, from its coming to its answer."""

    def counts(self) -> Mapping[str, int]:
        """What INFO tells of it."""


class Service:
    """The operations of one node.

    node: this node's name, told with every answer as the owner of what it decides.
    facts: a callback for what INFO reports beyond the table's own counters.  tally: where answers are counted.
    """

    def __init__(
        self,
        table: Table,
        clock: Clock,
        node: str,
        facts: Callable[[], Mapping[str, object]],
        tally: Tally | None = None,
    ) -> None:
        self.table = table
        self._decide = table.decide
        self._clock = clock
        self._facts = facts
        self._packer = Packer(node)
        self.pack = self._packer.answer
        self._decided = self._packer.decided
        self._router: Router | None = None
        self.peers: Callable[[], object] = dict
        self.tracing: Tracing | None = None
        self._judge = table.judge
        self._known: dict[bytes, _Known | Course] = {}
        self._known_before: dict[bytes, _Known | Course] = {}
        self._hot: HotKeys | None = None
        self._look_at = NEVER
        self._look: Callable[[tuple[str, str], int], int]
        self._seconds: Callable[[], float]
        self.decisions = 0
        self.tally = tally or Tally()

    def answer_again(self, data: bytes, now: int, asker: Asker) -> bytes | None:
        """The answer to a frame that is, but for its id, one that was answered before; None if it is not.

        Workers ask of the same keys again and again, so that most frames need no decoding.  Empty if the asker is
        sent the answer when the key's owner has given it.
        """
        request_id, rest = split_id(data)
        known = self._known.get(rest)
        if known is None or not request_id:
            known = self._known_before.pop(rest, None) if request_id else None
            if known is None:
                return None
            self._remember(rest, known)
        if isinstance(known, Course):
            assert self._router is not None
            self._router.forward(known, asker, request_id, self._packer)
            return b""
        entry, hits, terms, counts = known
        verdict = self._judge(entry, hits, terms, now)
        if verdict is None:
            del self._known[rest]
            return None
        number = self.decisions = self.decisions + 1
        if number >= self._look_at:
            self._look_at = self._look(entry.key, number)
        if verdict[0]:
            counts.over_limit += 1
        else:
            counts.under_limit += 1
        return self._decided(request_id, verdict)

    def count_hot(self, hot: HotKeys, now: Callable[[], float]) -> None:
        """Count which keys are asked for most, of those decided here.  now: seconds, of the clock that `hot` has."""
        self._hot = hot
        self._look = hot.look
        self._seconds = now
        self._look_at = hot.next_look(self.decisions)

    def route_by(self, router: Router | None) -> None:
        """Route by a new ring from now on; None while this node is alone."""
        self._router = router
        self._known.clear()
        self._known_before.clear()

    def decide_here(self, requests: Sequence[Any]) -> list[Any]:
        """Decide requests at this node's own time."""
        return self._decide_all(requests, self._clock.now())

    def answer(self, body: bytes, now: int, asker: Asker) -> bytes | None:
        """The answer frame to a request frame's body at `now` (epoch ms); raises BadFrame.

        None if other nodes decide a part of it: the asker is sent the answer when all is there.
        """
        request_id, op, payload, budget, context = open_request(body)
        if context is not None:
            asker = self.traced(context, asker)
        if op != _CHECK:
            return self._answer_other(request_id, op, payload, now, asker, budget)
        if type(payload) is not tuple or not 0 < len(payload) <= MAX_REQUESTS:
            raise BadFrame(f"a check's payload is an array of 1 to {MAX_REQUESTS} requests", request_id)
        finish = partial(self.pack, request_id, _ANSWERED)
        answers = self.check(payload, now, asker, budget, finish)
        # A frame with a context comes once: the next one names another span.
        if len(payload) == 1 and context is None:
            self._learn(body, payload[0], answers, budget)
        return None if answers is None else finish(answers)

    def traced(self, context: str, asker: Asker) -> Asker:
        """The asker, marked with the trace of its traceparent; as it was, if that is not followed."""
        return asker if self.tracing is None else self.tracing.asked(context, asker)

    def check(
        self, requests: Sequence[Any], now: int, asker: Asker, budget: int | None, finish: Callable[[list[Any]], Any]
    ) -> list[Any] | None:
        """The answers to requests as they stand in a frame; None if other nodes decide a part of them: the asker is
        sent what `finish` makes of all answers when the last is there.  budget: ms that the asker waits, or None."""
        if self._router is None:
            return self._decide_all(requests, now)
        return self._router.check(requests, now, asker, budget, finish)

    def answer_peer(self, body: bytes, now: int) -> bytes:
        """The answer to a batch from a peer: decided here, whatever this node's ring says of its keys.

        Raises ValueError (BadFrame is one) for what is no batch.
        """
        request_id, op, payload, _, context = open_request(body)
        span = None if context is None or self.tracing is None else self.tracing.answering(op, payload, context)
        if span is None:
            return self._answer_batch(request_id, op, payload, now)
        try:
            answer = self._answer_batch(request_id, op, payload, now)
        except Exception as error:
            span.end(str(error) or repr(error))
            raise
        span.end("")
        return answer

    def _answer_batch(self, request_id: int, op: int, payload: Any, now: int) -> bytes:
        if op == _CHECK and type(payload) is tuple:
            return self._packer.answer_body(request_id, _ANSWERED, self._decide_all(payload, now))
        if op == Op.REPORT and type(payload) is tuple:
            return self._packer.answer_body(request_id, _ANSWERED, settle_all(self.table, now, payload))
        if op == Op.ASK and type(payload) is tuple:
            return self._packer.answer_body(request_id, _ANSWERED, self._decide_with_state(payload, now))
        if op == Op.PING:
            return self._packer.answer_body(request_id, _ANSWERED, None)
        if op == Op.RESET:
            return self._packer.answer_body(request_id, _ANSWERED, self._reset_here(request_id, payload))
        raise BadFrame(f"op {op} is none of a peer's", request_id)

    def _decide_with_state(self, request: tuple[Any, ...], now: int) -> tuple[Any, Any]:
        """The decision on one request, and its bucket's state after it (None if there is none)."""
        (decision,) = self._decide_all((request,), now)
        return decision, None if decision[0] == _ERROR else self.table.state(request[0], request[1])

    def _decide_all(self, requests: Sequence[Any], now: int) -> list[tuple[Any, ...]]:
        """Decide every request here, in order."""
        answers: list[tuple[Any, ...]] = []
        decide, owned = self._decide, self.tally.owned
        for request in requests:
            try:
                if type(request) is not tuple or len(request) != _FIELDS:
                    request, _ = filled(request)
                verdict = decide(now, request)
            except InvalidRequest as error:
                self.tally.other.owned.error += 1
                answers.append(error_answer(str(error)))
                continue
            try:
                counts = owned[request[0]]
            except KeyError:
                counts = self.tally.row(request[0]).owned
            if verdict[0]:
                counts.over_limit += 1
            else:
                counts.under_limit += 1
            answers.append(verdict)
        before = self.decisions
        self.decisions = before + len(answers)
        while self._look_at <= self.decisions:
            assert self._hot is not None
            index = self._look_at - before - 1
            if answers[index][0] == _ERROR:
                self._look_at = self._hot.next_look(self._look_at)
            else:
                self._look_at = self._hot.look((requests[index][0], requests[index][1]), self._look_at)
        return answers

    def _learn(self, body: bytes, request: Any, answers: list[Any] | None, budget: int | None) -> None:
        """Remember who decides a frame's one request, so that `answer_again` knows."""
        known: _Known | Course | None = None
        peer = self._router.route(request) if self._router is not None else None
        if peer is None:
            if answers is None or answers[0][0] == _ERROR:
                return
            found = self.table.find(filled(request)[0])
            known = None if found is None else (*found, self.tally.row(request[0]).owned)
        elif not is_global(request):
            assert self._router is not None
            known = self._router.course(peer, request, budget)
        _, rest = split_id(frame(body))
        if rest and known is not None:
            self._remember(rest, known)

    def _remember(self, rest: bytes, known: _Known | Course) -> None:
        if len(self._known) >= _MAX_KNOWN:
            self._known, self._known_before = {}, self._known
        self._known[rest] = known

    def _answer_other(
        self, request_id: int, op: int, payload: Any, now: int, asker: Asker, budget: int | None
    ) -> bytes | None:
        if op == Op.RESET:
            return self._reset(request_id, payload, asker, budget)
        if op == Op.PING:
            return self.pack(request_id, _ANSWERED, None)
        if op == Op.INFO:
            return self.pack(request_id, _ANSWERED, self._info(now))
        if op == Op.CLOCK:
            return self._move_clock(request_id, payload)
        if op == Op.PEERS:
            return self.pack(request_id, _ANSWERED, self.peers())
        if op == Op.TOP:
            return self._top(request_id, payload, now)
        raise BadFrame(f"unknown op {op}", request_id)

    def _reset(self, request_id: int, payload: Any, asker: Asker, budget: int | None) -> bytes | None:
        if self._router is not None and type(payload) is tuple and len(payload) == 2:
            peer = self._router.owner(*payload)
            if peer is not None:
                self._router.reset(peer, *payload, asker, budget, partial(self._pack_reset, request_id))
                return None
        return self._pack_reset(request_id, [self._reset_here(request_id, payload)])

    def _pack_reset(self, request_id: int, answers: list[bool | str]) -> bytes:
        outcome = Outcome.REFUSED if isinstance(answers[0], str) else Outcome.ANSWERED
        return self.pack(request_id, outcome, answers[0])

    def _reset_here(self, request_id: int, payload: Any) -> bool | str:
        """Whether there was such a bucket, or why the payload names none."""
        if type(payload) is not tuple or len(payload) != 2:
            raise BadFrame("a reset's payload is [name, unique_key]", request_id)
        name, unique_key = payload
        return text_fault("name", name) or text_fault("unique_key", unique_key) or self.table.forget(name, unique_key)

    def _info(self, now: int) -> dict[str, object]:
        owned = self.tally.total("owned")
        counters = {
            "under_limit": owned.under_limit,
            "over_limit": owned.over_limit,
            "errors": owned.error,
            **self.table.counters._asdict(),
        }
        return {
            "now": now,
            "clock": "manual" if self._clock.manual else "system",
            "counters": counters,
            **({} if self.tracing is None else {"tracing": dict(self.tracing.counts())}),
            **self._facts(),
        }

    def _top(self, request_id: int, payload: Any, now: int) -> bytes:
        """What INFO and PEERS tell, and the hottest keys with what is left of them; nothing is changed by it."""
        most = _TOLD if payload is None else payload
        why = int_fault("count", most, 1, _MOST_TOLD)
        if why:
            return self.pack(request_id, Outcome.REFUSED, why)
        return self.pack(
            request_id, _ANSWERED, {**self._info(now), "cluster": self.peers(), "hot": self._hottest(most, now)}
        )

    def _hottest(self, most: int, now: int) -> dict[str, object] | None:
        if self._hot is None:
            return None
        found = self._hot.hottest(self._seconds(), most)
        keys = []
        for (name, unique_key), at_least, at_most in found.keys:
            # As a peek would find it; nil if the bucket is gone.
            verdict = self.table.peek(now, name, unique_key)
            keys.append((name, unique_key, at_least, at_most, None if verdict is None else verdict[:4]))
        names = [(hot.key, hot.at_least, hot.at_most) for hot in found.names]
        return {
            "window_ms": round(found.seconds * 1000),
            "every": self._hot.every,
            "requests": found.requests,
            "names": names,
            "keys": keys,
        }

    def _move_clock(self, request_id: int, payload: Any) -> bytes:
        if type(payload) is not tuple or len(payload) != 2:
            raise BadFrame("a clock's payload is [0, epoch ms] or [1, ms to advance]", request_id)
        how, amount = payload
        clock = self._clock
        if isinstance(clock, SystemClock):
            why = "this daemon has the system's clock; start it with --clock manual:<epoch ms> to move it"
            return self.pack(request_id, Outcome.REFUSED, why)
        why = int_fault("how", how, CLOCK_SET, CLOCK_ADVANCE) or int_fault("amount", amount)
        if not why:
            try:
                now = clock.move(amount + clock.now() if how == CLOCK_ADVANCE else amount)
                return self.pack(request_id, _ANSWERED, now)
            except ValueError as error:
                why = str(error)
        return self.pack(request_id, Outcome.REFUSED, why)
