"""One node's way to one peer, without a socket: the real Batcher, with what a batch costs both cores.

Decides when a batch is written and settled.  Knows no ring and no limit.  Left out beside PeerClient: streams that
break, time-outs, `batch_wait`.  The asked side's cost of a batch counts half when it leaves and half when its answer
is back (how it is divided was not measured), each request's half when it is forwarded (who asks the link spends that)
and half when it is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from benchmarks.simulation.timeline import Core, Costs, Timeline
from cluster_link.batch import DEFAULT_LIMIT, DEFAULT_MAX_QUEUE, Batcher

Item = tuple[int, Any, Any, float]
"""(op, payload, waiter, when it was asked)."""


class Waiter(Protocol):
    """As PeerClient's."""

    def answered(self, answer: Any, node: str) -> None: ...

    def failed(self, why: str, sent: bool) -> None: ...


class Totals:
    """What all links of a cluster carried since `clear`: the sizes of the batches that left, and the longest that a
    request took from link to answer, us."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.longest = 0.0

    def clear(self) -> None:
        """Forget what the warm-up did."""
        self.sizes.clear()
        self.longest = 0.0

    @property
    def batches(self) -> int:
        """Batches that left."""
        return sum(self.sizes.values())

    @property
    def requests(self) -> int:
        """Requests in them."""
        return sum(size * count for size, count in self.sizes.items())


class Link:
    """serve: (op, payload) -> the owner's answer, asked when the owner has worked through the batch."""

    def __init__(
        self,
        timeline: Timeline,
        costs: Costs,
        here: Core,
        there: Core,
        serve: Callable[[int, Any], Any],
        totals: Totals,
        limit: int = DEFAULT_LIMIT,
        max_queue: int = DEFAULT_MAX_QUEUE,
    ) -> None:
        self._timeline = timeline
        self._costs = costs
        self._here = here
        self._there = there
        self._serve = serve
        self._totals = totals
        self._batcher: Batcher[Item] = Batcher(limit, max_queue=max_queue)
        self._writing = False

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way: the link is then as good as new."""
        return not (len(self._batcher) or self._batcher.under_way or self._writing)

    def ask(self, op: int, payload: Any, waiter: Waiter, alone: bool = False) -> None:
        """Queue a request; the waiter is settled once, at once if the queue is full."""
        if not self._batcher.add((op, payload, waiter, self._timeline.now), alone):
            waiter.failed("the queue is full", False)
            return
        self._look()

    def _look(self) -> None:
        if not self._writing and self._batcher.ready:
            self._writing = True
            half = self._costs.asked_batch / 2
            # The batch is taken when the core gets to it, so that what comes until then goes along.
            self._timeline.at(self._here.spend(self._timeline.now, half) - half, self._write)

    def _write(self) -> None:
        self._writing = False
        items = self._batcher.take()
        size = len(items)
        self._totals.sizes[size] = self._totals.sizes.get(size, 0) + 1
        leaves = self._timeline.now + self._costs.asked_batch / 2
        self._timeline.at(leaves + self._costs.wire, partial(self._arrive, items))
        self._look()

    def _arrive(self, items: list[Item]) -> None:
        cost = self._costs.owner_batch + len(items) * self._costs.owner_request
        self._timeline.at(self._there.spend(self._timeline.now, cost), partial(self._answer, items))

    def _answer(self, items: list[Item]) -> None:
        answers = [self._serve(op, payload) for op, payload, _, _ in items]
        self._timeline.at(self._timeline.now + self._costs.wire, partial(self._return, items, answers))

    def _return(self, items: list[Item], answers: list[Any]) -> None:
        cost = self._costs.asked_batch / 2 + len(items) * self._costs.asked_request / 2
        self._timeline.at(self._here.spend(self._timeline.now, cost), partial(self._settle, items, answers))

    def _settle(self, items: list[Item], answers: list[Any]) -> None:
        self._batcher.returned()
        now = self._timeline.now
        for (_, _, waiter, asked), answer in zip(items, answers, strict=True):
            self._totals.longest = max(self._totals.longest, now - asked)
            waiter.answered(answer, "")
        self._look()
