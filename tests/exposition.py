"""A scrape, opened by Prometheus' own parser; and a node made by hand of which every metric has a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cluster_link.discovery.source import Standing
from cluster_link.histogram import Histogram
from cluster_link.membership import Peer
from cluster_link.peer_client import PeerClient, Settings
from cluster_link.ring import Ring
from sidecar.clock import ManualClock
from sidecar.cluster import _codec
from sidecar.forward import Deadlines
from sidecar.logs import Repeats
from sidecar.messages import Fallback
from sidecar.metrics import Metrics, Sources
from sidecar.replica import Replicas
from sidecar.router import Router
from sidecar.server import Server
from sidecar.service import Service
from sidecar.sync import GlobalSync
from sidecar.table import Table
from sidecar.tally import Tally
from sidecar.wire import Op, Packer
from tests.fakes import FakeAsker, FakeClock, FakeLink
from tests.helpers import T

ME, OWNER = Peer("me", "h:1"), Peer("owner", "h:2")
MAX_FRAME, MAX_CONNECTIONS, MAX_BUCKETS = 65_536, 7, 1_000


class Scrape:
    """One scrape's text, opened."""

    def __init__(self, text: bytes) -> None:
        self.families = list(text_string_to_metric_families(text.decode()))
        self._samples = [sample for family in self.families for sample in family.samples]

    def value(self, sample: str, **labels: str) -> float:
        """The one value of that name with these labels among its own."""
        (value,) = (
            each.value for each in self._samples if each.name == sample and labels.items() <= each.labels.items()
        )
        return value

    def all(self, sample: str) -> dict[tuple[str, ...], float]:
        """Values by their labels' values."""
        return {tuple(each.labels.values()): each.value for each in self._samples if each.name == sample}

    def labels(self) -> dict[str, dict[str, set[str]]]:
        """The name of every sample, with its labels and the values that each has."""
        found: dict[str, dict[str, set[str]]] = {}
        for each in self._samples:
            labels = found.setdefault(each.name, {})
            for label, value in each.labels.items():
                labels.setdefault(label, set()).add(value)
        return found

    def told(self) -> dict[str, tuple[str, set[str]]]:
        """Our metrics as docs/metrics.md names them, with their types and labels."""
        return {
            family.name + "_total" * (family.type == "counter"): (
                family.type,
                {label for each in family.samples for label in each.labels} - {"le"},
            )
            for family in self.families
            if family.name.startswith("sidegate_")
        }


class Node:
    """A node without a process: its clocks are moved by hand, what it asks of the owner waits in `link`.

    `peer` is the link that metrics are read from; nothing is sent over it.
    """

    def __init__(self, names: int = 2, fallback: Fallback = Fallback.ALLOW) -> None:
        self.clock = ManualClock(T)
        self.seconds = FakeClock()
        self.table = Table(MAX_BUCKETS)
        self.tally = Tally(names)
        self.service = Service(self.table, self.clock, ME.name, dict, self.tally)
        self.log: list[str] = []
        self.repeats = Repeats(_Lines(self.log), self.seconds.now)
        self.server = Server(
            self.service.answer,
            self.service.answer_again,
            self.clock.now,
            self.service.pack,
            self.repeats,
            max_connections=MAX_CONNECTIONS,
            max_frame=MAX_FRAME,
            stall_timeout=1.0,
        )
        self.link = FakeLink()
        self.replicas = Replicas()
        self.ring = Ring([ME, OWNER])
        self.sync = GlobalSync(
            self.replicas, self.clock.now, self.table, self._owner, lambda _: self.link, self.repeats
        )
        self._alone = Table()
        self._router = Router(
            me=ME,
            ring=self.ring,
            link=lambda _: self.link,
            replicas=self.sync,
            deadlines=Deadlines(self.seconds.later, self.seconds.now),
            decide=self.service.decide_here,
            decide_alone=lambda request: self._alone.decide(self.clock.now(), request),
            fallback=fallback,
            timeout=0.5,
            tally=self.tally,
        )
        settings = Settings(limit=100, wait=0, max_queue=1_000, timeout=0.5)
        self.peer = PeerClient(OWNER, [_codec(Packer(ME.name))], settings, self.repeats)
        self.lag = Histogram((0.001, 0.01))
        self.standing = Standing("dns", self.seconds.now, self.repeats)
        self.clustered = False
        self.expires: float | None = None
        self._metrics = Metrics(
            Sources(
                tally=self.tally,
                table=lambda: self.table.counters,
                max_buckets=MAX_BUCKETS,
                server=self.server,
                links=lambda: [self.peer] if self.clustered else [],
                replicas=lambda: self.replicas.counters if self.clustered else None,
                reports=lambda: self.sync.reports,
                standing=lambda: self.standing if self.clustered else None,
                expires=lambda: self.expires,
                lag=self.lag,
                held_back=lambda: self.repeats.held_back,
                build={"version": "9.9", "protocol": "1", "node": ME.name},
            )
        )

    def join(self) -> None:
        """From now on the owner owns its part of the keys."""
        self.clustered = True
        self.service.route_by(self._router)

    def key(self, owner: Peer, name: str) -> str:
        """A key of that limit that this node or the owner owns."""
        return next(key for key in map(str, range(1_000)) if self.ring.owner(name, key) == owner)

    def ask(self, *requests: Sequence[object] | None) -> FakeAsker:
        """One frame; the way a connection goes: known frames need no decoding.  Answers here come as if sent later."""
        asker = FakeAsker()
        data = Packer().request(1, Op.CHECK, list(requests))
        now = self.clock.now()
        answer = self.service.answer_again(data, now, asker)
        self.again = answer is not None
        if answer is None:
            answer = self.service.answer(data[4:], now, asker)
        if answer:
            asker.send(answer)
        return asker

    def scrape(self) -> Scrape:
        """The exposition of now."""
        return Scrape(self._metrics.exposition())

    def _owner(self, name: str, unique_key: str) -> Peer | None:
        peer = self.ring.owner(name, unique_key)
        return None if peer == ME else peer


class _Lines:
    """A log that keeps its events."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def warning(self, event: str, **_: Any) -> None:
        self._lines.append(event)

    error = warning
