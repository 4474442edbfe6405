"""What GLOBAL costs and lets through: replicas on every node, reports to the owners, limits that are asked for on all.

Decides who is asked when; answers are Replicas', GlobalSync's and Table's own.  Compares what was admitted with the
bound of docs/cluster.md.  Left out: time-outs of requests and of peers, the ends of windows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

from benchmarks.simulation.link import Link, Totals
from benchmarks.simulation.timeline import Core, Costs, Timeline
from cluster_link.membership import Peer
from cluster_link.ring import Ring
from sidecar.forward import Frame, Slot
from sidecar.messages import Behavior, Status, Verdict
from sidecar.replica import Replicas
from sidecar.sync import GlobalSync, settle_all
from sidecar.table import Table
from sidecar.wire import Op

EPOCH = 1_700_000_000_000
"""The nodes' clocks at the start, epoch ms."""
WINDOW = 3_600_000
NAME = "requests_per_sec"
_REPORT = int(Op.REPORT)
_UNDER = int(Status.UNDER_LIMIT)
_GLOBAL = int(Behavior.GLOBAL)


class Plan(NamedTuple):
    """keys: GLOBAL limits, each node asks for one of them at random.  rate: hits a second that each node is asked for.
    limit: of each key, for the one window that is simulated.  interval: global_sync_interval, ms.  seconds: simulated.
    """

    keys: int
    rate: float
    limit: int
    interval: float
    seconds: float


class Shared(NamedTuple):
    """What one run came to.

    over: admitted beyond the limits, all keys together; bound: what docs/cluster.md allows beyond them.
    worst: of the keys, the most of its bound that one used.  round_trip: the longest, ms.  in_time: whether it was
    shorter than the interval, which the bound takes for granted.  messages: that a node sends a second (reports, and
    questions of nodes without a replica).  asked: hits that a replica did not answer, of all.  core, busiest: as
    Forwarding's.  answered: of all hits, those that had their answer at the end.
    """

    hits: int
    admitted: int
    limits: int
    over: int
    bound: int
    worst: float
    round_trip: float
    in_time: bool
    messages: float
    asked: float
    core: float
    busiest: float
    answered: float


def most_within(times: Sequence[float], span: float) -> int:
    """The most of `times` (ascending) that lie in one stretch of `span`, its ends included."""
    return max((bisect_right(times, start + span) - place for place, start in enumerate(times)), default=0)


class _Asker:
    """Whoever made a request; told of the owner's answer."""

    __slots__ = ("cluster", "gone", "key")

    def __init__(self, cluster: SharedCluster, key: str) -> None:
        self.cluster = cluster
        self.key = key
        self.gone = False

    def send(self, data: Any) -> None:
        self.cluster.answer(self.key, data)


class _Node:
    """One daemon: its core, buckets, replicas and links."""

    def __init__(self, cluster: SharedCluster, me: Peer) -> None:
        self.me = me
        self.core = Core()
        self.table = Table()
        self.asked: dict[str, list[float]] = {}
        self._cluster = cluster
        self._links: dict[Peer, Link] = {}
        self.sync = GlobalSync(Replicas(), cluster.clock, self.table, self._owner, self._link, cluster.trouble)

    def _owner(self, name: str, unique_key: str) -> Peer | None:
        peer = self._cluster.ring.owner(name, unique_key)
        return None if peer == self.me else peer

    def _link(self, peer: Peer) -> Link:
        link = self._links.get(peer)
        if link is None:
            there = self._cluster.nodes[peer]
            link = Link(
                self._cluster.timeline, self._cluster.costs, self.core, there.core, there.serve, self._cluster.totals
            )
            self._links[peer] = link
        return link

    def serve(self, op: int, payload: Any) -> Any:
        """The owner's side, as Service's."""
        if op == _REPORT:
            return tuple(settle_all(self.table, self._cluster.clock(), payload))
        verdict = self.table.decide(self._cluster.clock(), payload)
        return (*verdict,), self.table.state(payload[0], payload[1])

    def hit(self, unique_key: str, limit: int) -> None:
        """Someone asks this node."""
        cluster = self._cluster
        cluster.hits += 1
        self.asked.setdefault(unique_key, []).append(cluster.timeline.now)
        request = (NAME, unique_key, 1, limit, WINDOW, 0, _GLOBAL, 0, None)
        peer = self._owner(NAME, unique_key)
        verdict: Verdict | None
        if peer is None:
            verdict = self.table.decide(cluster.clock(), request)
        else:
            verdict = self.sync.decide(cluster.clock(), request)
        if verdict is not None:
            self.core.spend(cluster.timeline.now, cluster.costs.owned)
            cluster.answer(unique_key, verdict)
            return
        assert peer is not None
        cluster.asks += 1
        self.core.spend(cluster.timeline.now, cluster.costs.asked_request / 2)
        frame = Frame(_Asker(cluster, unique_key), [None], 1, lambda answers: answers[0])
        slot = Slot(frame, 0, request, cluster.fall_back)
        self.sync.ask(peer, request, slot)


class SharedCluster:
    """The nodes of one run; all of them look into one Ring, which is immutable."""

    def __init__(self, ring: Ring, costs: Costs, interval: float) -> None:
        self.ring = ring
        self.costs = costs
        self.timeline = Timeline()
        self.totals = Totals()
        self.admitted: Counter[str] = Counter()
        self.hits = self.answers = self.asks = self.faults = 0
        self._interval = interval * 1000
        self.nodes = {peer: _Node(self, peer) for peer in sorted(ring.peers)}

    def clock(self) -> int:
        """All nodes' clock, epoch ms."""
        return EPOCH + int(self.timeline.now / 1000)

    def trouble(self, event: str, **fields: object) -> None:
        """Nothing may be lost where no link breaks; counted, so that a run can say so."""
        self.faults += 1

    def fall_back(self, request: Any, why: str) -> Any:
        """What could not even be queued: refused, and counted as a fault."""
        self.faults += 1
        return (1, 0, 0, 0, "")

    def answer(self, unique_key: str, verdict: Sequence[Any]) -> None:
        """One hit has been judged."""
        self.answers += 1
        if verdict[0] == _UNDER:
            self.admitted[unique_key] += 1

    def report_from(self, node: _Node, first: float) -> None:
        """Have a node report every interval from `first` (us) on."""
        self.timeline.at(first, partial(self._report, node))

    def _report(self, node: _Node) -> None:
        if node.sync.replicas.due:
            node.sync.flush()
        self.timeline.at(self.timeline.now + self._interval, partial(self._report, node))


def shared(ring: Ring, costs: Costs, plan: Plan, random: Random) -> Shared:
    """Run a cluster whose nodes are asked for GLOBAL limits."""
    cluster = SharedCluster(ring, costs, plan.interval)
    timeline = cluster.timeline
    nodes = list(cluster.nodes.values())
    keys = [f"account:{number}" for number in range(plan.keys)]
    gap = 1e6 / (len(nodes) * plan.rate)

    def come() -> None:
        random.choice(nodes).hit(random.choice(keys), plan.limit)
        timeline.at(timeline.now + random.expovariate(1) * gap, come)

    for node in nodes:
        cluster.report_from(node, random.uniform(0, plan.interval * 1000))
    timeline.at(random.expovariate(1) * gap, come)
    span = plan.seconds * 1e6
    timeline.run(span)
    return judge(cluster, plan, keys)


def judge(cluster: SharedCluster, plan: Plan, keys: Sequence[str]) -> Shared:
    """What the run came to so far, and the bound beside it."""
    nodes = list(cluster.nodes.values())
    span = plan.interval * 1000 + cluster.totals.longest
    over = bound = 0
    worst = 0.0
    for key in keys:
        most = max((most_within(node.asked.get(key, ()), span) for node in nodes), default=0)
        allowed = (len(nodes) - 1) * most
        beyond = max(0, cluster.admitted[key] - plan.limit)
        over += beyond
        bound += allowed
        worst = max(worst, beyond / allowed if allowed else 0.0)
    assert not cluster.faults, "a link that never breaks lost something"
    return Shared(
        hits=cluster.hits,
        admitted=cluster.admitted.total(),
        limits=plan.limit * len(keys),
        over=over,
        bound=bound,
        worst=worst,
        round_trip=cluster.totals.longest / 1000,
        in_time=cluster.totals.longest <= plan.interval * 1000,
        messages=cluster.totals.batches / len(nodes) / plan.seconds,
        asked=cluster.asks / cluster.hits if cluster.hits else 0.0,
        core=sum(node.core.spent for node in nodes) / len(nodes) / plan.seconds / 1e6,
        busiest=max(node.core.spent for node in nodes) / plan.seconds / 1e6,
        answered=cluster.answers / cluster.hits if cluster.hits else 1.0,
    )
