"""Which keys change their owner when a node joins or leaves, by the real ring.

Decides what counts as moved rightly: to the newcomer alone, from the leaver alone.  Knows no link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cluster_link.ring import DEFAULT_POINTS

Key = tuple[str, str]


class Moved(NamedTuple):
    """share: of the keys, those with another owner.  expected: 1/n, of the larger of the two rings.  astray: keys that
    moved between two nodes that are in both rings, which none may.  sigmas: how far `share` is from `expected`, in
    standard deviations of what the ring's points and the number of keys leave to chance."""

    share: float
    expected: float
    astray: int
    sigmas: float


def moved(before: Sequence[str], after: Sequence[str], nodes: int, who: str, points: int = DEFAULT_POINTS) -> Moved:
    """Compare the owners of the same keys, by name.

    nodes: of the larger ring.  who: came or went.
    """
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    astray = sum(who not in pair for pair in changed)
    share, expected = len(changed) / len(before), 1 / nodes
    # A node's part of the ring is its points' arcs, nearly exponential each; and the keys are a sample of the ring.
    deviation = math.sqrt(expected**2 / points + expected * (1 - expected) / len(before))
    return Moved(share, expected, astray, (share - expected) / deviation)
