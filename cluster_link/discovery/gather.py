"""When a changed set of members is worth a new ring: once its source has been quiet for a moment.

Decides how long changes are gathered, and that an unchanged set is none.  Knows no source, no loop and no clock.
"""

from __future__ import annotations

from cluster_link.membership import Peer

QUIET, LONGEST = 0.05, 0.2
"""Seconds: a rollout or a scale-up comes as a burst of single changes, each of which would move keys."""


class Gather:
    """Sets on their way to the ring.  quiet: seconds without a change after which the last one is due.
    longest: seconds after the first change at which the last one is due, quiet or not."""

    def __init__(self, quiet: float = QUIET, longest: float = LONGEST) -> None:
        self._quiet = quiet
        self._longest = longest
        self._taken: frozenset[Peer] | None = None
        self._waiting: frozenset[Peer] | None = None
        self._first = self._last = 0.0

    def offer(self, members: frozenset[Peer], now: float) -> None:
        """A set that the source told at `now` (seconds)."""
        if self._waiting is None:
            if members == self._taken:
                return
            self._first = now
        elif members == self._waiting:
            return
        self._waiting = members
        self._last = now

    def took(self, members: frozenset[Peer]) -> None:
        """This set is routed by already, as somebody else has it from the same source."""
        self._taken = members
        self._waiting = None

    @property
    def due(self) -> float | None:
        """When `take` will give a set; None while there is none."""
        if self._waiting is None:
            return None
        return min(self._last + self._quiet, self._first + self._longest)

    def take(self, now: float) -> frozenset[Peer] | None:
        """The set to route by from now on; None if none is due, or if all changes were taken back."""
        due = self.due
        if due is None or now < due:
            return None
        members, self._waiting = self._waiting, None
        if members == self._taken:
            return None
        self._taken = members
        return members
