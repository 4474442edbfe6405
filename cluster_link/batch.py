"""When a batch leaves for a peer: at once while the link is free, gathering while it is busy.

Decides order, size and the moment; carries anything, and has no timer or stream of its own: whoever owns
those asks `take` when something was added, when a batch has come back, and when `wait` is over.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")

DEFAULT_LIMIT = 1_000
DEFAULT_WINDOW = 4
DEFAULT_MAX_QUEUE = 20_000


class Batcher(Generic[Item]):
    """The items on their way to one peer, in the order they came.

    limit: most items in a batch.  window: most full batches under way; one that is not full waits until none is.
    max_queue: most items waiting; `add` refuses more.
    """

    def __init__(
        self, limit: int = DEFAULT_LIMIT, window: int = DEFAULT_WINDOW, max_queue: int = DEFAULT_MAX_QUEUE
    ) -> None:
        self._limit = limit
        self._window = window
        self._max_queue = max_queue
        self._queue: deque[Item] = deque()
        self._alone: deque[int] = deque()
        self._added = 0
        self._taken = 0
        self.under_way = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, item: Item, alone: bool = False) -> bool:
        """Queue an item; False if the queue is full.  `alone`: in a batch of its own, which does not wait for the
        link to be free, and neither do those before it, so that the order is kept."""
        if len(self._queue) >= self._max_queue:
            return False
        if alone:
            self._alone.append(self._added)
        self._added += 1
        self._queue.append(item)
        return True

    @property
    def urgent(self) -> bool:
        """Whether something waits that is to leave alone and at once."""
        return bool(self._alone)

    @property
    def ready(self) -> bool:
        """Whether `take` would give a batch now."""
        waiting = len(self._queue)
        if self._alone or not self.under_way:
            return bool(waiting)
        return waiting >= self._limit and self.under_way < self._window

    def take(self) -> list[Item]:
        """The next batch to send now, or nothing."""
        if not self.ready:
            return []
        size = min(len(self._queue), self._limit)
        if self._alone:
            before = self._alone[0] - self._taken
            if before == 0:
                self._alone.popleft()
            size = min(size, before or 1)
        self._taken += size
        self.under_way += 1
        if size == len(self._queue):
            items = list(self._queue)
            self._queue.clear()
            return items
        return [self._queue.popleft() for _ in range(size)]

    def returned(self) -> None:
        """A batch has come back, or never will."""
        self.under_way -= 1

    def clear(self) -> list[Item]:
        """Everything that has not left, taken out; nothing is under way any more."""
        items = list(self._queue)
        self._queue.clear()
        self._alone.clear()
        self._taken = self._added
        self.under_way = 0
        return items
