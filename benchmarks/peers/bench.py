"""One measurement: workers set upon an endpoint, and the record that is kept of it.

Decides what a record holds.  Knows no scene and no target.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.arithmetic import percentile
from benchmarks.peers.contenders import Contender
from benchmarks.peers.driver import Part, Plan, work
from benchmarks.peers.owners import LINKED, await_linked
from benchmarks.peers.systems import Endpoint, started
from benchmarks.processes import resident, together


@dataclass
class Bench:
    """How long and how often is measured, who takes part, and the records so far.

    seconds: of one measurement; hold: of scene 9's; keys: of scene 7's two sizes.
    """

    contenders: list[Contender]
    rounds: int
    seconds: float
    hold: float
    keys: tuple[int, int]
    folder: Path
    note: Callable[[str], None]
    records: list[dict[str, Any]] = field(default_factory=list)

    def those(self, *names: str, **what: bool) -> list[Contender]:
        """Of these names (if none is given, all but those that must be `named`) who takes part and is `what`."""
        return [
            one
            for one in self.contenders
            if (one.name in names if names else not one.named)
            and all(getattr(one, name) is value for name, value in what.items())
        ]

    @contextmanager
    def servers(self, contenders: Sequence[Contender], nodes: int) -> Iterator[dict[str, Endpoint]]:
        """Each system that these ask, started; by its name."""
        with ExitStack() as stack:
            names = dict.fromkeys(one.system for one in contenders)
            endpoints = {name: stack.enter_context(started(name, nodes, self.folder)) for name in names}
            for name, endpoint in endpoints.items():
                if name in LINKED and nodes > 1:
                    await_linked(name, endpoint)
            yield endpoints

    def measure(
        self,
        scene: int,
        case: str,
        contender: Contender,
        round_number: int,
        endpoint: Endpoint,
        plans: Sequence[Plan],
        **more: object,
    ) -> dict[str, Any]:
        """Let a worker follow each plan, all at once; keep the record, and give it."""
        within = max(plan.seconds for plan in plans) + 120
        parts = together(work, [(contender.name, endpoint, plan) for plan in plans], within)
        record = summary(parts)
        record = {"scene": scene, "case": case, "contender": contender.name, "round": round_number, **record, **more}
        self.records.append(record)
        self.note(f"{scene} {case} {contender.name}: {record['rate']:,.0f}/s, p50 {record['p50']:.0f} us")
        return record

    def fill(
        self,
        scene: int,
        case: str,
        contender: Contender,
        round_number: int,
        endpoint: Endpoint,
        fillers: Sequence[Plan],
        probe: Plan,
        empty: int,
    ) -> None:
        """Fill, and probe beside it; the record's times are the probe's, its rate that of filling, and it has the
        memory a bucket: what the servers hold beyond `empty` bytes."""
        within = fillers[0].seconds + 120
        parts = together(work, [(contender.name, endpoint, plan) for plan in (*fillers, probe)], within)
        filled = summary(parts[:-1])
        times = {name: value for name, value in summary(parts[-1:]).items() if name in ("p50", "p99", "p999", "worst")}
        grown = sum(map(resident, endpoint.pids)) - empty
        record = {"scene": scene, "case": case, "contender": contender.name, "round": round_number, **filled, **times}
        record["bucket"] = grown / filled["decisions"]
        self.records.append(record)
        self.note(
            f"{scene} {case} {contender.name}: {record['bucket']:.0f} bytes a bucket, worst {record['worst']:.0f} us"
        )


def summary(parts: Sequence[Part]) -> dict[str, Any]:
    """What workers did at once, together.

    rate: decisions a second.  p50 to worst: us a call.  worker_cpu, server_cpu: CPU seconds a million decisions.
    over: the share over their limit.  late: the share of calls due that were not made.  others: CPU seconds a second of
    all else on the machine (the kernel's softirq among it).
    """
    trips = array("d")
    for part in parts:
        trips.frombytes(part.trips)
    ordered = sorted(trips)
    decisions = sum(part.decisions for part in parts)
    calls = sum(part.calls for part in parts)
    late = sum(part.late for part in parts)
    first = parts[0]
    cpu = sum(part.cpu for part in parts)
    return {
        "workers": len(parts),
        "decisions": decisions,
        "seconds": max(part.seconds for part in parts),
        "rate": sum(part.decisions / part.seconds for part in parts if part.seconds),
        "p50": percentile(ordered, 0.5) * 1e6,
        "p99": percentile(ordered, 0.99) * 1e6,
        "p999": percentile(ordered, 0.999) * 1e6,
        "worst": ordered[-1] * 1e6,
        # CPU seconds a million decisions are the same number as us a decision.
        "worker_cpu": cpu / decisions * 1e6,
        "server_cpu": first.servers / decisions * 1e6,
        "over": sum(part.over for part in parts) / decisions,
        "late": late / (calls + late),
        "others": max(0.0, first.busy - first.servers - cpu) / first.seconds,
        "load": os.getloadavg()[0],
    }
