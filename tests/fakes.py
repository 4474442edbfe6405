"""Fakes for the unit tests of the forwarding: a clock, a client, a link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sidecar.forward import Slot


class FakeClock:
    """Seconds that pass when told, and the loop's call_later by them."""

    def __init__(self, start: float = 1_000.0) -> None:
        self.seconds = start
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.seconds

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((self.seconds + seconds, callback))

    def pass_by(self, seconds: float) -> None:
        """Let time pass; what is due is called in its order, at its moment."""
        end = self.seconds + seconds
        while due := [timer for timer in self.timers if timer[0] <= end]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.seconds = max(self.seconds, first[0])
            first[1]()
        self.seconds = end


class FakeAsker:
    """A client; `sent` is what it was sent."""

    def __init__(self) -> None:
        self.gone = False
        self.sent: list[Any] = []

    def send(self, data: Any) -> None:
        self.sent.append(data)


class FakeLink:
    """A link that remembers who waits, or settles at once as `reply` does."""

    def __init__(self, reply: Callable[[Slot], None] | None = None) -> None:
        self.node = ""
        self.asked: list[tuple[int, Any, Slot, bool]] = []
        self._reply = reply

    def ask(self, op: int, payload: Any, waiter: Slot, alone: bool = False) -> None:
        self.asked.append((op, payload, waiter, alone))
        if self._reply is not None:
            self._reply(waiter)

    @property
    def waiters(self) -> list[Slot]:
        return [slot for _, _, slot, _ in self.asked]
