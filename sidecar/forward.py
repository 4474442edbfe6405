"""Requests that other nodes decide: who waits for what, and what becomes of it when no answer comes.

Decides the fallbacks (docs/cluster.md), and that each request is settled and each frame answered exactly once.
Knows no stream and no loop: links, timers and the clock for them are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sidecar.messages import Fallback, Status, error_answer
from sidecar.wire import DoesNotFit, Outcome, Packer

_UNDER, _OVER, _ERROR = int(Status.UNDER_LIMIT), int(Status.OVER_LIMIT), int(Status.ERROR)

_ANSWERED = int(Outcome.ANSWERED)
_DECIDED = (_UNDER, _OVER)
_STATUSES = (*_DECIDED, _ERROR)

FALLBACKS = {"error": Fallback.ERROR, "local": Fallback.LOCAL, "allow": Fallback.ALLOW, "deny": Fallback.DENY}


class Asker(Protocol):
    """Who sent a frame or made a call; `gone` once it cannot be answered any more."""

    @property
    def gone(self) -> bool: ...

    def send(self, data: Any) -> None: ...


class Frame:
    """One frame's answers as they come in; sent when the last one is there.

    answers: a place for each request, None where it is still to come, `left` of them.
    finish: (answers) -> what the asker is sent: the answer frame's bytes, if it is a client of the socket.
    """

    __slots__ = ("_answers", "_finish", "_left", "asker")

    def __init__(self, asker: Asker, answers: list[Any], left: int, finish: Callable[[list[Any]], Any]) -> None:
        self.asker = asker
        self._answers = answers
        self._left = left
        self._finish = finish

    def settle(self, index: int, answer: Any) -> None:
        """Take the answer to one request; the last one sends the frame."""
        self._answers[index] = answer
        self._left -= 1
        if not self._left:
            self.asker.send(self._finish(self._answers))


class Slot:
    """One forwarded request: its place in a frame, and what to answer if the owner does not.

    fall_back: (request, why) -> that answer.  count: told the status of the owner's answer.
    """

    __slots__ = ("_count", "_fall_back", "_frame", "_index", "_request", "settled")

    def __init__(
        self,
        frame: Frame,
        index: int,
        request: Any,
        fall_back: Callable[[Any, str], Any],
        count: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._frame = frame
        self._index = index
        self._request = request
        self._fall_back = fall_back
        self._count = count
        self.settled = False

    @property
    def waiting(self) -> bool:
        """Whether an answer would still be of use."""
        return not self.settled and not self._frame.asker.gone

    @property
    def trace(self) -> object:
        """The sampled trace that it is part of, as tracing.py has marked its asker; None for most."""
        return getattr(self._frame.asker, "trace", None)

    def answered(self, answer: Any, node: str) -> None:
        """The owner's answer; a plain decision gets the owner's name."""
        if not self.settled:
            if type(answer) is not tuple or not 5 <= len(answer) <= 8 or answer[0] not in _STATUSES:
                self.failed("what its owner sent is no decision", True)
                return
            self.settled = True
            self._count(answer[0])
            self._settle((*answer, node) if len(answer) == 5 else answer)

    def failed(self, why: str, sent: bool) -> None:
        """No answer will come; whether the owner may have counted the hits changes nothing here."""
        if not self.settled:
            self.settled = True
            self._settle(self._fall_back(self._request, why))

    def _settle(self, answer: Any) -> None:
        self._frame.settle(self._index, answer)


class LoneSlot(Slot):
    """The one request of a frame, which then needs no places: most frames are such."""

    __slots__ = ("_asker", "_packer", "_request_id")
    trace = None  # it follows a frame that was remembered, and none with a context is

    def __init__(
        self,
        asker: Asker,
        request_id: int,
        packer: Packer,
        request: Any,
        fall_back: Callable[[Any, str], Any],
        count: Callable[[int], None],
    ) -> None:
        self._asker = asker
        self._request_id = request_id
        self._packer = packer
        self._request = request
        self._fall_back = fall_back
        self._count = count
        self.settled = False

    @property
    def waiting(self) -> bool:
        """Whether an answer would still be of use."""
        return not self.settled and not self._asker.gone

    def answered(self, answer: Any, node: str) -> None:
        """The owner's answer: a plain decision in a few steps, anything else as every slot takes it."""
        if type(answer) is tuple and len(answer) == 5 and answer[0] in _DECIDED and not self.settled:
            try:
                data = self._packer.decided(self._request_id, answer, node)
            except DoesNotFit:
                pass
            else:
                self.settled = True
                self._count(answer[0])
                self._asker.send(data)
                return
        super().answered(answer, node)

    def _settle(self, answer: Any) -> None:
        self._asker.send(self._packer.answer(self._request_id, _ANSWERED, (answer,)))


class ResetSlot(Slot):
    """A forwarded reset, which is answered with whether there was a bucket, or with why there can be none."""

    __slots__ = ()

    def answered(self, answer: Any, node: str) -> None:
        """The owner's answer."""
        if not self.settled:
            self.settled = True
            self._settle(answer if type(answer) is bool else str(answer))


class Deadlines:
    """Slots by when their time is up, in steps: a place in a list costs a tenth of a timer of the loop's own.

    later: (seconds, callback), as the loop's call_later.  now: the seconds that it counts by.
    """

    def __init__(
        self,
        later: Callable[[float, Callable[[], None]], object],
        now: Callable[[], float],
        step: float = 0.005,
    ) -> None:
        self._later = later
        self._now = now
        self.step = step
        self._due: dict[int, list[Slot]] = {}

    def add(self, seconds: float, slots: Sequence[Slot]) -> None:
        """Fail these in `seconds`, up to a step later, unless they are settled by then."""
        due = int((self._now() + seconds) / self.step) + 1
        there = self._due.get(due)
        if there is not None:
            there.extend(slots)
            return
        if not self._due:
            self._later(self.step, self._tick)
        self._due[due] = list(slots)

    def _tick(self) -> None:
        passed = int(self._now() / self.step)
        over = [slot for due in sorted(due for due in self._due if due <= passed) for slot in self._due.pop(due)]
        if self._due:
            self._later(self.step, self._tick)
        fault: Exception | None = None
        for slot in over:
            if not slot.settled:
                try:
                    slot.failed("no answer in time", True)
                except Exception as error:  # told when every other one has had its answer
                    fault = fault or error
        if fault is not None:
            raise fault


def made_up(policy: int, request: Sequence[Any], why: str, decide: Callable[[Sequence[Any]], Any]) -> tuple[Any, ...]:
    """The answer of a fallback: a decision that says `degraded`, or an error."""
    if policy == Fallback.LOCAL:
        return (*decide(request), None, True, why)
    if policy == Fallback.ALLOW:
        return _UNDER, request[3], 0, 0, 0, None, True, why
    if policy == Fallback.DENY:
        return _OVER, request[3], 0, 0, 0, None, True, why
    return error_answer(why)
