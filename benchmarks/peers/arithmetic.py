"""What is made of measured numbers: percentiles, medians, ratios within rounds.

Knows no contender and no clock.  A record is a dict as it stands in the results file; its `scene`, `case`,
`contender` and `round` say which measurement it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
MOST_LATE = 0.01
"""The share of calls due that may go unmade at a rate that counts as held."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of sorted values: the least that `share` (0 to 1) of them do not exceed."""
    if not ordered:
        raise ValueError("no values have no percentile")
    # Rounded before it is raised, since 0.999 x 1000 is a hair more than 999 in binary.
    return ordered[max(0, math.ceil(round(share * len(ordered), 6)) - 1)]


def chosen(records: Iterable[Record], **what: object) -> list[Record]:
    """The records whose fields are these."""
    return [one for one in records if all(one.get(field) == value for field, value in what.items())]


def median(records: Iterable[Record], field: str) -> float | None:
    """The middle of a field over the records that have it; None where none has."""
    values = [one[field] for one in records if one.get(field) is not None]
    return statistics.median(values) if values else None


def ratios(mine: Iterable[Record], theirs: Iterable[Record], field: str) -> list[float]:
    """Of each round that both have: mine / theirs.  A round where theirs is 0 has no ratio."""
    others = {one["round"]: one[field] for one in theirs if one.get(field) is not None}
    return [
        one[field] / others[one["round"]] for one in mine if one.get(field) is not None and others.get(one["round"])
    ]


def highest_rate(records: Iterable[Record], most: float) -> float:
    """The highest rate tried at which the middle p99 is at most `most` us and calls are made when due; 0 if none."""
    every = list(records)
    held = []
    for rate in {one["tried"] for one in every}:
        p99, late = (median(chosen(every, tried=rate), field) for field in ("p99", "late"))
        if p99 is not None and p99 <= most and late is not None and late <= MOST_LATE:
            held.append(rate)
    return max(held, default=0.0)
