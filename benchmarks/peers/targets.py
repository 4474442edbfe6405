"""The targets, as ratios within rounds, and whether the records meet them.

Decides what is compared with what.  A target whose records are not there is not judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.peers.arithmetic import Record, chosen, ratios


class Target(NamedTuple):
    """`field` of `mine`, of that of `theirs`, in a scene: at least `bound` if `at_least`, else at most."""

    scene: int
    theirs: str
    field: str
    bound: float
    at_least: bool
    mine: str = "sidegate"


class Verdict(NamedTuple):
    """A target and what was measured: the median of the rounds' ratios, and all of them."""

    target: Target
    ratio: float
    all: tuple[float, ...]

    @property
    def met(self) -> bool:
        """Whether the median is within the bound."""
        return self.ratio >= self.target.bound if self.target.at_least else self.ratio <= self.target.bound


def _targets() -> Iterator[Target]:
    for scene in (1, 2, 3):
        for python in ("gubernator-grpc", "gubernator-aio"):
            yield Target(scene, python, "rate", 8, True)
            yield Target(scene, python, "p50", 0.15, False)
            yield Target(scene, python, "worker_cpu", 0.15, False)
        for strategy, most in (("redis-fixed", 0.5), ("redis-moving", 0.35)):
            yield Target(scene, strategy, "rate", 3, True)
            yield Target(scene, strategy, "p50", most, False)
    for python in ("gubernator-grpc", "gubernator-aio"):
        yield Target(5, python, "rate", 2.5, True)
        yield Target(5, python, "p50", 0.6, False)
        yield Target(5, python, "worker_cpu", 0.15, False)


TARGETS = tuple(_targets())
"""In the words of the issue: against Gubernator asked from Python at least 8 times the decisions/s and at most 0.15 of
the p50 in scenes 1 to 3, 2.5 times and 0.6 in scene 5, and at most 0.15 of the grpcio client's CPU a decision in the
worker; against Redis with limits at least 3 times and at most 0.5 (0.35 with moving window) in scenes 1 to 3."""


def verdicts(records: Sequence[Record]) -> Iterator[Verdict]:
    """Each target that the records can judge."""
    for target in TARGETS:
        mine = chosen(records, scene=target.scene, contender=target.mine)
        theirs = chosen(records, scene=target.scene, contender=target.theirs)
        found = ratios(mine, theirs, target.field)
        if found:
            yield Verdict(target, statistics.median(found), tuple(found))
