"""What time it is: epoch ms that never run backwards, or a clock that a test moves by hand.

The only room that reads the machine's clocks for a decision.  Everything else is handed an instant.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sidecar.calendar import LAST_INSTANT


class SystemClock:
    """Wall time that never runs backwards.

    It is the monotonic clock plus an offset.  `adjust`, called about once a second, follows the wall
    clock: forward at once; backward (the wall clock was set back) by running at half speed until the two
    agree again, so that windows neither freeze nor end twice.
    """

    manual = False

    def __init__(
        self,
        monotonic: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._adjusted = monotonic()
        self._offset = wall() - self._adjusted
        self._last = 0

    def now(self) -> int:
        """Epoch ms, never less than the answer before."""
        now = (self._monotonic() + self._offset) // 1_000_000
        if now < self._last:
            return self._last
        self._last = now
        return now

    def adjust(self) -> int:
        """Follow the wall clock; how many ms this clock is ahead of it (0 unless that was set back)."""
        monotonic = self._monotonic()
        ahead = monotonic + self._offset - self._wall()
        if ahead <= 0:
            self._offset -= ahead
            ahead = 0
        else:
            self._offset -= min(ahead, (monotonic - self._adjusted) // 2)
        self._adjusted = monotonic
        return ahead // 1_000_000


class ManualClock:
    """A clock for tests, frozen until moved; `set` may also go back, which is a test's choice."""

    manual = True

    def __init__(self, epoch_ms: int) -> None:
        self._now = epoch_ms

    def now(self) -> int:
        """Epoch ms as last set."""
        return self._now

    def adjust(self) -> int:
        """Nothing to follow."""
        return 0

    def move(self, epoch_ms: int) -> int:
        """Set the clock to `epoch_ms`; raises ValueError outside 0..LAST_INSTANT."""
        if not 0 <= epoch_ms <= LAST_INSTANT:
            raise ValueError(f"the clock can be set to 0..{LAST_INSTANT}, not {epoch_ms}")
        self._now = epoch_ms
        return epoch_ms


Clock = SystemClock | ManualClock
