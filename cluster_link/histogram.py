"""How values are spread over fixed bounds: a list of counts, for whoever reads them now and then.

Knows no unit and no metric.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """bounds: ascending; a value equal to one counts as within it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        # The last is for what lies beyond all bounds.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def see(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
