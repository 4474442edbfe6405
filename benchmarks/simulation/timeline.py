"""What happens next: events in the order of their times, and cores that do one thing after the other.

Decides order alone.  Knows no node and no link.  Times are microseconds since the start, floats.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple


class Costs(NamedTuple):
    """Microseconds of a core's time.

    owned: a request decided where it is asked.  asked_batch, asked_request: the asked daemon's part of a batch, and of
    each request in it.  owner_batch, owner_request: the owner's.  wire: from one daemon to the other, each way, with
    nobody's core busy.
    """

    owned: float
    asked_batch: float
    asked_request: float
    owner_batch: float
    owner_request: float
    wire: float


def split(alone: float, together: float, size: int) -> tuple[float, float]:
    """What a batch costs, and each request in it, from two measurements: a request in a batch by itself, and a request
    in a batch of `size`.

    Raises ValueError where no such split exists: a batch of less than 2, or one that would give something back.
    """
    if size < 2:
        raise ValueError(f"a batch of {size} tells nothing beside a batch of 1")
    request = (size * together - alone) / (size - 1)
    if request < 0 or request > alone:
        raise ValueError(
            f"{alone:g} us alone and {together:g} us in batches of {size} are no cost a batch and a request"
        )
    return alone - request, request


class Core:
    """One daemon's event loop: work waits for the work before it.

    spent: microseconds of work given to it so far, also of what it has not done yet.
    """

    __slots__ = ("_free", "spent")

    def __init__(self) -> None:
        self._free = 0.0
        self.spent = 0.0

    def spend(self, now: float, cost: float) -> float:
        """When work that is given now is done."""
        self.spent += cost
        self._free = (self._free if self._free > now else now) + cost
        return self._free


class Timeline:
    """The clock and what is to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Call `do` at `when`; of two at one time, the one that was asked for first comes first."""
        self._asked += 1
        heapq.heappush(self._heap, (when, self._asked, do))

    def run(self, until: float) -> None:
        """Let everything happen that is due up to and at `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, do = heapq.heappop(heap)
            do()
        self.now = max(self.now, until)
