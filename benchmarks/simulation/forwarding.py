"""What a cluster does with plain requests: who owns them by the ring, in which batches they travel, how long it takes.

Decides the load: requests come to all nodes alike and independently (Poisson), their keys uniformly or by Zipf's law.
Knows no limit; a decision's cost is in what a request costs its owner.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

from benchmarks.simulation.link import Link, Totals
from benchmarks.simulation.timeline import Core, Costs, Timeline

_CHUNK = 4_096
"""Keys drawn at a time."""


class Load(NamedTuple):
    """rate: requests a second that each node is asked.  seconds: simulated, after a quarter as much of warm-up."""

    rate: float
    seconds: float


class Forwarding(NamedTuple):
    """What one run came to, a second and a node where it says so.

    share: of requests, forwarded ones.  messages: batches that a node sends a second (it answers as many).  batch,
    batch_p99: requests in one, the mean and what 99 % of batches do not exceed.  p50, p99: us from a request's arrival
    to its answer, of forwarded requests.  core, busiest: of a core's time, what the mean node and the busiest was given
    to do; above 1 it falls behind.  kept_up: answers given, of requests that came.
    """

    requests: int
    share: float
    messages: float
    batch: float
    batch_p99: int
    p50: float
    p99: float
    core: float
    busiest: float
    kept_up: float


def weights(keys: int, zipf: float) -> list[float]:
    """How often each key is asked for, summed up: the k-th by 1/k**zipf; 0: all alike."""
    return list(accumulate(1 / rank**zipf for rank in range(1, keys + 1)))


def percentile(values: Sequence[float], percent: float) -> float:
    """What so many percent of `values` (sorted) do not exceed; 0 if there are none."""
    return values[max(0, -int(-len(values) * percent // 100) - 1)] if values else 0.0


class _Asked:
    """Waits for an owner's answer, to note how long it took."""

    __slots__ = ("came", "cluster")

    def __init__(self, cluster: _Cluster, came: float) -> None:
        self.cluster = cluster
        self.came = came

    def answered(self, answer: Any, node: str) -> None:
        cluster = self.cluster
        cluster.answered += 1
        cluster.took.append(cluster.timeline.now - self.came)

    def failed(self, why: str, sent: bool) -> None:
        """Nothing to note: what is not answered shows in `kept_up`."""


class _Cluster:
    """The nodes of one run.  A link lives while something is on its way: an idle one is as good as a new one."""

    def __init__(self, nodes: int, costs: Costs) -> None:
        self.timeline = Timeline()
        self.totals = Totals()
        self.cores = [Core() for _ in range(nodes)]
        self.took: array[float] = array("d")
        self.came = self.answered = self.forwarded = 0
        self._costs = costs
        self._links: dict[tuple[int, int], Link] = {}

    def hit(self, node: int, owner: int) -> None:
        """A request comes to `node`."""
        now = self.timeline.now
        self.came += 1
        if node == owner:
            self.timeline.at(self.cores[node].spend(now, self._costs.owned), self._done)
            return
        self.forwarded += 1
        done = self.cores[node].spend(now, self._costs.asked_request / 2)
        self.timeline.at(done, partial(self._forward, node, owner, now))

    def _done(self) -> None:
        self.answered += 1

    def _forward(self, node: int, owner: int, came: float) -> None:
        link = self._links.get((node, owner))
        if link is None:
            here, there = self.cores[node], self.cores[owner]
            link = Link(self.timeline, self._costs, here, there, lambda op, payload: None, self.totals)
            self._links[node, owner] = link
        link.ask(0, None, _Asked(self, came))

    def drop_idle_links(self) -> None:
        """Give back the memory of links that carry nothing."""
        for pair in [pair for pair, link in self._links.items() if link.idle]:
            del self._links[pair]

    def clear(self) -> None:
        """Count from here on."""
        self.totals.clear()
        del self.took[:]
        self.came = self.answered = self.forwarded = 0


def forwarding(
    owners: Sequence[int], nodes: int, costs: Costs, load: Load, drawn: Sequence[float], random: Random
) -> Forwarding:
    """Run a cluster under a load.

    owners: the number of the node that owns each key.  drawn: the keys' `weights`.
    """
    cluster = _Cluster(nodes, costs)
    timeline = cluster.timeline
    mean_gap = 1e6 / (nodes * load.rate)
    keys: list[int] = []

    def come() -> None:
        if not keys:
            keys.extend(random.choices(range(len(owners)), cum_weights=drawn, k=_CHUNK))
            cluster.drop_idle_links()
        cluster.hit(random.randrange(nodes), owners[keys.pop()])
        timeline.at(timeline.now + random.expovariate(1) * mean_gap, come)

    timeline.at(0.0, come)
    span = load.seconds * 1e6
    timeline.run(span / 4)
    cluster.clear()
    before = [core.spent for core in cluster.cores]
    timeline.run(span * 1.25)
    spent = [core.spent - start for core, start in zip(cluster.cores, before, strict=True)]
    took = sorted(cluster.took)
    batches = cluster.totals.batches
    return Forwarding(
        requests=cluster.came,
        share=cluster.forwarded / cluster.came if cluster.came else 0.0,
        messages=batches / nodes / load.seconds,
        batch=cluster.totals.requests / batches if batches else 0.0,
        batch_p99=_size_at(cluster.totals.sizes, 99),
        p50=percentile(took, 50),
        p99=percentile(took, 99),
        core=sum(spent) / nodes / span,
        busiest=max(spent) / span,
        kept_up=cluster.answered / cluster.came if cluster.came else 1.0,
    )


def _size_at(sizes: dict[int, int], percent: int) -> int:
    """What so many percent of batches do not exceed."""
    left = sum(sizes.values()) * percent / 100
    for size in sorted(sizes):
        left -= sizes[size]
        if left <= 0:
            return size
    return 0
