"""GLOBAL's errands: asks owners for what has no replica yet, and carries what replicas admitted to them.

Decides who is told what in one message, and what a failed one becomes: told again if it was certainly not sent, else
lost and counted.  Knows no stream and no arithmetic (replica.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cluster_link.membership import Peer
from sidecar.errors import InvalidRequest
from sidecar.forward import Slot
from sidecar.messages import Verdict
from sidecar.replica import Replicas, Report, settle
from sidecar.table import Table
from sidecar.wire import Op

_MOST_ENTRIES = 1_000
"""Entries in one message: what a frame may hold."""
_ASK, _REPORT = int(Op.ASK), int(Op.REPORT)


class GlobalSync:
    """One node's replicas and their errands.

    now: epoch ms.  table: this node's own buckets, for reports on keys that have become its own.
    owner: (name, key) -> the peer that owns it, None if this node does.  link: the way to a peer.
    """

    def __init__(
        self,
        replicas: Replicas,
        now: Callable[[], int],
        table: Table,
        owner: Callable[[str, str], Peer | None],
        link: Callable[[Peer], Any],
        report_trouble: Callable[..., None],
    ) -> None:
        self.replicas = replicas
        self._now = now
        self._table = table
        self._owner = owner
        self._link = link
        self._report_trouble = report_trouble
        self.reports = 0

    def decide(self, now: int, request: Sequence[Any]) -> Verdict | None:
        """The replica's verdict; None if the owner has to be asked (`ask`)."""
        return self.replicas.decide(now, request)

    def ask(self, peer: Peer, request: Sequence[Any], slot: Slot) -> None:
        """Have the owner decide, and keep a replica of the bucket as it is then."""
        self._link(peer).ask(_ASK, request, _Cold(self, request, slot), alone=True)

    def flush(self) -> None:
        """Report everything that is due, one message an owner."""
        due, taken = self.replicas.due, 0
        by_owner: dict[Peer, list[Report]] = {}
        while taken < due:
            reports = self.replicas.take(_MOST_ENTRIES)
            if not reports:
                break
            taken += len(reports)
            for report in reports:
                peer = self._owner(report.name, report.unique_key)
                if peer is None:
                    self.replicas.settled(report, settle(self._table, self._now(), report))
                else:
                    by_owner.setdefault(peer, []).append(report)
        for peer, reports in by_owner.items():
            for part in _parts(reports):
                self.reports += 1
                self._link(peer).ask(_REPORT, part, _Told(self, part), alone=True)

    def settled(self, reports: list[Report], states: Any) -> None:
        """The owner has charged these and says how its buckets stand."""
        if type(states) is not tuple or len(states) != len(reports):
            self.failed(reports, "the owner's answer is none to these reports", sent=True)
            return
        for report, state in zip(reports, states, strict=True):
            try:
                self.replicas.settled(report, state)
            except InvalidRequest as error:
                self._report_trouble("report_lost", reason=str(error), reports=1)

    def failed(self, reports: list[Report], why: str, sent: bool) -> None:
        """The owner gave no answer to these."""
        if not sent:
            self.replicas.returned(reports)
            return
        self.replicas.lost(reports)
        self._report_trouble("report_lost", reason=why, reports=len(reports))

    def arrived(self, request: Sequence[Any], state: Any) -> None:
        """The owner's bucket, as it stands behind an answer."""
        try:
            self.replicas.adopt(self._now(), request[0], request[1], state)
        except InvalidRequest as error:
            self._report_trouble("report_lost", reason=str(error), reports=0)


def settle_all(table: Table, now: int, reports: Any) -> list[Any]:
    """The owner's side: charge every report; the buckets' states, None for a report that is none."""
    states = []
    for report in reports:
        try:
            states.append(settle(table, now, report))
        except InvalidRequest:
            states.append(None)
    return states


def _parts(reports: list[Report]) -> list[list[Report]]:
    """Reports in messages of at most so many reports and entries."""
    parts: list[list[Report]] = [[]]
    entries = 0
    for report in reports:
        if len(parts[-1]) == _MOST_ENTRIES or entries + len(report.entries) > _MOST_ENTRIES:
            parts.append([])
            entries = 0
        parts[-1].append(report)
        entries += len(report.entries)
    return parts


class _Cold:
    """Waits for an owner's decision with its bucket's state."""

    __slots__ = ("_request", "_slot", "_sync")

    def __init__(self, sync: GlobalSync, request: Sequence[Any], slot: Slot) -> None:
        self._sync = sync
        self._request = request
        self._slot = slot

    @property
    def waiting(self) -> bool:
        return self._slot.waiting

    @property
    def trace(self) -> object:
        return self._slot.trace

    def answered(self, answer: Any, node: str) -> None:
        if type(answer) is not tuple or len(answer) != 2:
            self._slot.failed("the owner's answer is none to this request", sent=True)
            return
        decision, state = answer
        if state is not None:
            self._sync.arrived(self._request, state)
        self._slot.answered(decision, node)

    def failed(self, why: str, sent: bool) -> None:
        self._slot.failed(why, sent)


class _Told:
    """Waits for an owner to have charged reports."""

    __slots__ = ("_reports", "_sync")
    waiting = True
    trace = None  # a report holds the hits of many callers, long after they had their answers

    def __init__(self, sync: GlobalSync, reports: list[Report]) -> None:
        self._sync = sync
        self._reports = reports

    def answered(self, answer: Any, node: str) -> None:
        self._sync.settled(self._reports, answer)

    def failed(self, why: str, sent: bool) -> None:
        self._sync.failed(self._reports, why, sent)
