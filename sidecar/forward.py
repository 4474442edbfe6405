"""A frame some of whose requests other nodes decide: who waits for what, and what becomes of it when no answer comes.

Decides the fallbacks (docs/cluster.md), and that each request is settled and each frame answered exactly once.
Knows no stream and no loop: a link and a timer are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sidecar.messages import Fallback, Status

_UNDER, _OVER, _ERROR = int(Status.UNDER_LIMIT), int(Status.OVER_LIMIT), int(Status.ERROR)


FALLBACKS = {"error": Fallback.ERROR, "local": Fallback.LOCAL, "allow": Fallback.ALLOW, "deny": Fallback.DENY}


class Timer(Protocol):
    """What the loop's call_later gives."""

    def cancel(self) -> None: ...


class Asker(Protocol):
    """The client that sent a frame; `gone` once it cannot be answered any more."""

    gone: bool

    def send(self, data: bytes) -> None: ...


class Frame:
    """One frame's answers as they come in; sent when the last one is there.

    answers: a place for each request, None where it is still to come.
    finish: (answers) -> the answer frame's bytes.
    """

    __slots__ = ("_answers", "_asker", "_finish", "_left", "_slots", "timer")

    def __init__(
        self, asker: Asker, answers: list[Any], finish: Callable[[list[Any]], bytes], slots: Sequence[Slot]
    ) -> None:
        self._asker = asker
        self._answers = answers
        self._finish = finish
        self._left = len(slots)
        self._slots = slots
        self.timer: Timer | None = None
        for slot in slots:
            slot.frame = self

    @property
    def gone(self) -> bool:
        """Whether nobody waits for this frame any more."""
        return self._asker.gone

    def settle(self, index: int, answer: Any) -> None:
        """Take the answer to one request; the last one sends the frame."""
        self._answers[index] = answer
        self._left -= 1
        if not self._left:
            self._slots = ()  # they know this frame; the collector is kept from such circles
            if self.timer is not None:
                self.timer.cancel()
            self._asker.send(self._finish(self._answers))

    def expire(self) -> None:
        """The time is up: what has not come falls back."""
        for slot in self._slots:
            if not slot.settled:
                slot.failed("no answer in time")


class Slot:
    """One forwarded request: its place in a frame, and what to answer if the owner does not."""

    __slots__ = ("_fall_back", "_index", "frame", "peer", "request", "settled")

    frame: Frame

    def __init__(self, index: int, peer: Any, request: Any, fall_back: Callable[[Any, str], Any]) -> None:
        self._index = index
        self._fall_back = fall_back
        self.settled = False
        self.peer = peer
        self.request = request

    @property
    def waiting(self) -> bool:
        """Whether an answer would still be of use."""
        return not self.settled and not self.frame.gone

    def answered(self, answer: Any, node: str) -> None:
        """The owner's answer; a plain decision gets the owner's name."""
        if not self.settled:
            self.settled = True
            named = (*answer, node) if type(answer) is tuple and len(answer) == 5 else answer
            self.frame.settle(self._index, named)

    def failed(self, why: str) -> None:
        """No answer will come."""
        if not self.settled:
            self.settled = True
            self.frame.settle(self._index, self._fall_back(self.request, why))


def made_up(
    policy: int, request: Sequence[Any], why: str, decide_here: Callable[[Sequence[Any]], Any]
) -> tuple[Any, ...]:
    """The answer of a fallback: a decision that says `degraded`, or an error."""
    if policy == Fallback.LOCAL:
        return (*decide_here(request), None, True, why)
    if policy == Fallback.ALLOW:
        return _UNDER, request[3], 0, 0, 0, None, True, why
    if policy == Fallback.DENY:
        return _OVER, request[3], 0, 0, 0, None, True, why
    return _ERROR, 0, 0, 0, 0, None, False, why
