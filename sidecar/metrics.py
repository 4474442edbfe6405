"""What Prometheus reads: this daemon's plain counters, put into metrics at the moment of a scrape.

Decides names, labels and help texts; docs/metrics.md has the question that each answers.  Counts nothing itself, so
that a daemon that nobody scrapes pays for the counters alone.  Never a label by key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cluster_link.histogram import Histogram
from sidecar.tally import PATHS, RESULTS, Tally

if TYPE_CHECKING:
    from cluster_link.discovery.source import Standing
    from cluster_link.peer_client import PeerClient
    from sidecar.replica import Counters as ReplicaCounters
    from sidecar.server import Server
    from sidecar.table import Counters as TableCounters

_STATES = ("idle", "connected", "away")


class Sources(NamedTuple):
    """Where the numbers are read.

    links, replicas, reports: of the cluster; none, None and 0 while there is none.
    standing: of the source of members; None for a list.
    expires: when the certificate in force ends, in seconds since the epoch; None where TLS is off.
    lag: seconds by which the loop's timers come late.  held_back: log lines not told.  build: labels of the release.
    """

    tally: Tally
    table: Callable[[], TableCounters]
    max_buckets: int
    server: Server
    links: Callable[[], Iterable[PeerClient]]
    replicas: Callable[[], ReplicaCounters | None]
    reports: Callable[[], int]
    standing: Callable[[], Standing | None]
    expires: Callable[[], float | None]
    lag: Histogram
    held_back: Callable[[], int]
    build: dict[str, str]


class Metrics(Collector):
    """The metrics of one daemon, with those of its process."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def exposition(self) -> bytes:
        """The text of a scrape, in Prometheus' format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every family, with the numbers of this moment."""
        yield InfoMetricFamily("sidegate_build", "The release that runs.", self._sources.build)
        yield from self._decisions()
        yield from self._buckets()
        yield from self._connections()
        yield from self._links()
        yield from self._replicas()
        yield from self._discovery()
        expires = self._sources.expires()
        if expires is not None:
            yield _gauge("sidegate_tls_expiry_timestamp_seconds", "When the certificate in force ends.").of(expires)
        yield _histogram("sidegate_loop_lag_seconds", "How late the loop's timers come.", [((), self._sources.lag)])
        yield _counter("sidegate_log_lines_held_back", "Log lines that repeated and were not told.").of(
            self._sources.held_back()
        )

    def _decisions(self) -> Iterator[Metric]:
        tally = self._sources.tally
        decisions = _counter("sidegate_decisions", "Requests answered.", "path", "result")
        for path in (*PATHS, "forwarded"):
            counts = tally.forwarded if path == "forwarded" else tally.total(path)
            for result in RESULTS:
                decisions.of(getattr(counts, result), path, result)
        yield decisions
        by_name = _counter("sidegate_limit_decisions", "Requests decided here, by the limit's name.", "limit", "result")
        for name, row in tally.rows():
            label = name.encode(errors="backslashreplace").decode()
            for result in RESULTS:
                by_name.of(sum(getattr(getattr(row, path), result) for path in PATHS), label, result)
        yield by_name

    def _buckets(self) -> Iterator[Metric]:
        counters = self._sources.table()
        yield _gauge("sidegate_buckets", "Buckets held.").of(counters.buckets)
        yield _gauge("sidegate_buckets_max", "Buckets that may be held.").of(self._sources.max_buckets)
        yield _counter("sidegate_buckets_created", "Buckets opened.").of(counters.created)
        forgotten = _counter("sidegate_buckets_forgotten", "Buckets that are no more.", "kind")
        for kind in ("ended", "evicted", "evicted_exhausted", "reset"):
            forgotten.of(getattr(counters, kind), kind)
        yield forgotten

    def _connections(self) -> Iterator[Metric]:
        server = self._sources.server
        yield _gauge("sidegate_connections", "Clients on the Unix socket.").of(len(server.connections))
        yield _gauge("sidegate_connections_max", "Clients that may be there at a time.").of(server.max_connections)
        yield _counter("sidegate_connections_accepted", "Clients let in.").of(server.accepted)
        yield _counter("sidegate_connections_refused", "Clients that found no place.").of(server.refused)
        yield _counter("sidegate_connections_dropped", "Clients cut off because they stalled.").of(server.dropped)
        yield _counter("sidegate_bad_frames", "Frames that were none.").of(server.bad_frames)

    def _links(self) -> Iterator[Metric]:
        links = list(self._sources.links())
        states = _gauge("sidegate_peer_state", "1 for the state that the link to a peer is in.", "peer", "state")
        queued = _gauge("sidegate_peer_queue", "Requests that wait to leave for a peer.", "peer")
        requests = _counter("sidegate_peer_requests", "Requests sent to a peer.", "peer")
        for link in links:
            for state in _STATES:
                states.of(link.state == state, link.peer.name, state)
            queued.of(link.queued, link.peer.name)
            requests.of(link.requests, link.peer.name)
        yield states
        yield queued
        yield requests
        yield _histogram(
            "sidegate_peer_round_trip_seconds",
            "From a batch's leaving to its answer.",
            [((link.peer.name,), link.seconds) for link in links],
            "peer",
        )
        yield _histogram(
            "sidegate_peer_batch_requests",
            "Requests in an answered batch.",
            [((link.peer.name,), link.sizes) for link in links],
            "peer",
        )

    def _replicas(self) -> Iterator[Metric]:
        counters = self._sources.replicas()
        if counters is None:
            return
        yield _gauge("sidegate_global_replicas", "GLOBAL buckets of other owners answered here.").of(counters.replicas)
        yield _gauge("sidegate_global_unsent", "Runs of admitted hits that no owner knows of yet.").of(counters.unsent)
        yield _counter("sidegate_global_reports", "Messages to owners about hits admitted here.").of(
            self._sources.reports()
        )
        yield _counter("sidegate_global_turned_away", "Requests that found no room for a replica.").of(
            counters.turned_away
        )
        yield _counter("sidegate_global_lost_hits", "Admitted hits that may never have reached their owner.").of(
            counters.lost_hits
        )

    def _discovery(self) -> Iterator[Metric]:
        standing = self._sources.standing()
        if standing is None:
            return
        name = standing.name
        yield _gauge("sidegate_discovery_up", "Whether the source of peers answers.", "source").of(
            standing.state == "current", name
        )
        yield _gauge("sidegate_discovery_provisional", "Whether the ring is this node's own guess.", "source").of(
            standing.provisional, name
        )
        yield _counter("sidegate_discovery_failures", "Times the source of peers was not reached.", "source").of(
            standing.failures, name
        )
        age = _gauge("sidegate_discovery_age_seconds", "Since the source of peers was last heard.", "source")
        yield age if standing.age is None else age.of(standing.age, name)
        ring_age = _gauge("sidegate_discovery_ring_age_seconds", "Since peers last changed by the source.", "source")
        yield ring_age if standing.ring_age is None else ring_age.of(standing.ring_age, name)


class _Family:
    """A family with its values added in a chain."""

    def of(self: Any, value: float, *labels: str) -> Any:
        """The family with one more value."""
        self.add_metric(list(labels), value)
        return self


class _Counter(_Family, CounterMetricFamily):
    pass


class _Gauge(_Family, GaugeMetricFamily):
    pass


def _counter(name: str, text: str, *labels: str) -> Any:
    return _Counter(name, text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> Any:
    return _Gauge(name, text, labels=labels)


def _histogram(name: str, text: str, series: Iterable[tuple[tuple[str, ...], Histogram]], *labels: str) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in series:
        so_far = 0
        buckets = []
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(so_far)))
        family.add_metric(list(values), buckets=buckets, sum_value=histogram.sum)
    return family
