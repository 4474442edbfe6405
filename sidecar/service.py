"""What a request frame asks for, and its answer: bytes in, bytes out, in one plain call.

Decides how each operation is carried out on this node.  Knows no socket and reads no clock: the server
hands it a frame's body and the instant.  On this path there is no task, no future and no log line a hit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sidecar.clock import Clock, SystemClock
from sidecar.errors import InvalidRequest
from sidecar.messages import MAX_REQUESTS, Status, int_fault, text_fault
from sidecar.table import Known, Table
from sidecar.wire import BadFrame, Op, Outcome, Packer, frame, open_request, split_id

_CHECK = int(Op.CHECK)
_ANSWERED = int(Outcome.ANSWERED)
_ERROR = int(Status.ERROR)
_DEFAULTS = (0, 0, 0, None)
_REQUIRED = 5
_MAX_KNOWN = 16_384
"""Frames remembered, of about 300 bytes each; past it the memory starts anew."""
_FIELDS = _REQUIRED + len(_DEFAULTS)

CLOCK_SET = 0
CLOCK_ADVANCE = 1


class Service:
    """The operations of one node.

    node: this node's name, told with every answer as the owner of what it decides.
    facts: a callback for what INFO reports beyond the table's own counters.
    """

    def __init__(self, table: Table, clock: Clock, node: str, facts: Callable[[], Mapping[str, object]]) -> None:
        self._table = table
        self._decide = table.decide
        self._clock = clock
        self._facts = facts
        packer = Packer(node)
        self.pack = packer.answer
        self._decided = packer.decided
        self._judge = table.judge
        self._known: dict[bytes, Known] = {}
        self.decisions = 0
        self.over_limit = 0
        self.errors = 0

    def answer_again(self, data: bytes, now: int) -> bytes | None:
        """The answer to a frame that is, but for its id, one that was answered before; None if it is not.

        Workers ask of the same keys again and again, so that most frames need no decoding.
        """
        request_id, rest = split_id(data)
        known = self._known.get(rest)
        if known is None or not request_id:
            return None
        entry, hits, terms = known
        verdict = self._judge(entry, hits, terms, now)
        if verdict is None:
            del self._known[rest]
            return None
        self.decisions += 1
        if verdict[0]:
            self.over_limit += 1
        return self._decided(request_id, verdict)

    def answer(self, body: bytes, now: int) -> bytes:
        """The answer frame to a request frame's body at `now` (epoch ms); raises BadFrame."""
        request_id, op, payload = open_request(body)
        if op != _CHECK:
            return self._answer_other(request_id, op, payload, now)
        if type(payload) is not tuple or not 0 < len(payload) <= MAX_REQUESTS:
            raise BadFrame(f"a check's payload is an array of 1 to {MAX_REQUESTS} requests", request_id)
        answers: list[tuple[object, ...]] = []
        for request in payload:
            try:
                if type(request) is not tuple or len(request) != _FIELDS:
                    request = _filled(request)
                verdict = self._decide(now, request)
                if verdict[0]:
                    self.over_limit += 1
                answers.append(verdict)
            except InvalidRequest as error:
                self.errors += 1
                answers.append((_ERROR, 0, 0, 0, 0, None, False, str(error)))
        self.decisions += len(answers)
        if len(payload) == 1 and answers[0][0] != _ERROR:
            self._learn(body, request)
        return self.pack(request_id, _ANSWERED, answers)

    def _learn(self, body: bytes, request: Sequence[Any]) -> None:
        """Remember a decided frame, so that `answer_again` knows it."""
        known = self._table.find(request)
        _, rest = split_id(frame(body))
        if rest and known is not None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[rest] = known

    def _answer_other(self, request_id: int, op: int, payload: Any, now: int) -> bytes:
        if op == Op.RESET:
            return self._reset(request_id, payload)
        if op == Op.PING:
            return self.pack(request_id, _ANSWERED, None)
        if op == Op.INFO:
            return self.pack(request_id, _ANSWERED, self._info(now))
        if op == Op.CLOCK:
            return self._move_clock(request_id, payload)
        raise BadFrame(f"unknown op {op}", request_id)

    def _reset(self, request_id: int, payload: Any) -> bytes:
        if type(payload) is not tuple or len(payload) != 2:
            raise BadFrame("a reset's payload is [name, unique_key]", request_id)
        name, unique_key = payload
        why = text_fault("name", name) or text_fault("unique_key", unique_key)
        if why:
            return self.pack(request_id, Outcome.REFUSED, why)
        return self.pack(request_id, _ANSWERED, self._table.forget(name, unique_key))

    def _info(self, now: int) -> dict[str, object]:
        counters = {
            "under_limit": self.decisions - self.over_limit - self.errors,
            "over_limit": self.over_limit,
            "errors": self.errors,
            **self._table.counters._asdict(),
        }
        return {
            "now": now,
            "clock": "manual" if self._clock.manual else "system",
            "counters": counters,
            **self._facts(),
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


def _filled(request: Any) -> tuple[Any, ...]:
    """The request with its defaults written out; raises InvalidRequest if it is no array of 5 to 9 elements."""
    if type(request) is not tuple or not _REQUIRED <= len(request) <= _FIELDS:
        raise InvalidRequest(f"a request is an array of {_REQUIRED} to {_FIELDS} elements")
    return request + _DEFAULTS[len(request) - _REQUIRED :]
