"""What else ran beside a measurement: a figure is worth as much as the machine was quiet.

Knows nothing of what is measured.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)
"""The fields of /proc/stat's first line that are no work: idle, and waiting for a disk."""


class Others:
    """CPU time of the machine since this was made that neither this process nor its ended children took."""

    def __init__(self) -> None:
        self._before = (*_machine(), _own())

    def share(self) -> float:
        """Their part of all cores' time, 0 to 1; children that still run count as others."""
        busy, whole, own = self._before
        busy_now, whole_now = _machine()
        passed = whole_now - whole
        return max(0.0, (busy_now - busy - (_own() - own)) / passed) if passed else 0.0


def _machine() -> tuple[float, float]:
    """Seconds of all cores so far: at work, and in all."""
    fields = [int(text) / _TICKS for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    whole = sum(fields)
    return whole - sum(fields[at] for at in _IDLE), whole


def _own() -> float:
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )
