"""What every source of members is, and what is known of the source itself.

Decides nothing of members: a source tells them as it finds them, and the last set it told stands until the next.
Knows no loop and no clock: the seconds are handed in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from cluster_link.membership import Peer

_TELL_AGAIN = 60.0
"""Seconds after which a trouble that lasts is told again."""


class Source(Protocol):
    """Tells who is in the cluster, for as long as it is listened to."""

    def members(self) -> AsyncIterator[frozenset[Peer]]:
        """The set, as soon as it is known, and again whenever it may have changed; the same one twice does no harm.

        This daemon is in it, also where the source does not list it yet (`Standing.heard` is told so); a set without
        it says that it is leaving.  Ends only by being closed, and gives back then all it holds.  What goes wrong
        with the source is told to its Standing and tried again, at moments of its own that no other daemon shares.
        """

    async def leave(self) -> None:
        """Have other daemons find this one no more; it is about to stop.  Raises nothing."""


class Standing:
    """How a source does.  To be told from the loop's thread.

    name: the source's kind, as SIDEGATE_DISCOVERY has it.  now: seconds.
    report: told "discovery_away" when it is first not reached, for each further reason and once a minute while that
    lasts; "discovery_back" when it is again.  It may hold back what repeats.
    """

    def __init__(self, name: str, now: Callable[[], float], report: Callable[..., None]) -> None:
        self.name = name
        self._now = now
        self._report = report
        self._heard_at: float | None = None
        self._changed_at: float | None = None
        self._failed = 0
        self._told_at = 0.0
        self.why = ""
        self.listed = False

    def heard(self, listed: bool = True) -> None:
        """The source has answered, or shown otherwise that what it told still holds.

        listed: whether it names this daemon.
        """
        self._heard_at = self._now()
        self.listed = listed
        if self.why:
            self.why = ""
            self._report("discovery_back", source=self.name)

    def lost(self, why: str) -> None:
        """The source was not reached, or what it said is of no use; one line for operators."""
        self._failed += 1
        now = self._now()
        if why == self.why and now - self._told_at < _TELL_AGAIN:
            return
        self.why = why
        self._told_at = now
        self._report("discovery_away", source=self.name, reason=why)

    def tell(self, event: str, **fields: object) -> None:
        """Something else that operators should know of what the source says; `peer`: whom it is about."""
        self._report(event, source=self.name, **fields)

    def changed(self) -> None:
        """A set that it told has been taken over."""
        self._changed_at = self._now()

    @property
    def failures(self) -> int:
        """How often the source was not reached."""
        return self._failed

    @property
    def provisional(self) -> bool:
        """Whether the ring is this daemon's own guess: nothing was heard yet, or it is not listed itself."""
        return self._changed_at is None or not self.listed

    @property
    def state(self) -> str:
        """waiting: nothing was heard yet; away: not reached now; current."""
        if self.why:
            return "away"
        return "waiting" if self._heard_at is None else "current"

    @property
    def age(self) -> float | None:
        """Seconds since the source was last heard."""
        return None if self._heard_at is None else self._now() - self._heard_at

    @property
    def ring_age(self) -> float | None:
        """Seconds since the ring last changed by it."""
        return None if self._changed_at is None else self._now() - self._changed_at
