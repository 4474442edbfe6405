"""Metrics: the right numbers on real daemons, and docs, alerts and dashboard that name what is there."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster_link.histogram import Histogram
from sidecar import Limit
from sidecar.messages import Behavior
from tests.clusters import Cluster, free_port
from tests.daemons import running_daemon, wait_until

ROOT = Path(__file__).parent.parent
SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_info")


class Scrape:
    """One scrape of a daemon, parsed by Prometheus' own library."""

    def __init__(self, where: str) -> None:
        connection = http.client.HTTPConnection(where, timeout=10)
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        assert response.status == 200
        assert response.getheader("Content-Type", "").startswith("text/plain; version=0.0.4")
        self.families = list(text_string_to_metric_families(response.read().decode()))
        connection.close()

    def value(self, sample: str, **labels: str) -> float:
        """The one value of that name with these labels among its own."""
        (value,) = (
            each.value
            for family in self.families
            for each in family.samples
            if each.name == sample and labels.items() <= each.labels.items()
        )
        return value

    def all(self, sample: str) -> dict[tuple[str, ...], float]:
        """Values by their labels' values."""
        return {
            tuple(each.labels.values()): each.value
            for family in self.families
            for each in family.samples
            if each.name == sample
        }

    def has(self, name: str) -> bool:
        """Whether there is a sample or family of that name."""
        return any(
            name in (family.name, *(each.name for each in family.samples), f"{family.name}_total")
            for family in self.families
        )


def test_a_daemon_alone_counts_what_it_decided() -> None:
    """Three of two are asked, one is peeked at, and one request is none: to the number, also for frames seen before."""
    where = f"127.0.0.1:{free_port()}"
    with running_daemon("--http", where, "--metric-names", "1") as daemon, daemon.client() as client:
        limit = Limit("logins", 2, per="1h")
        for _ in range(5):
            client.hit(limit, "a")
        client.hit(Limit("other", 5, per="1h"), "a")
        client.hit(Limit("third", 5, per="1h"), "a")
        scrape = Scrape(where)
        assert scrape.value("sidegate_decisions_total", path="owned", result="under_limit") == 4
        assert scrape.value("sidegate_decisions_total", path="owned", result="over_limit") == 3
        assert scrape.value("sidegate_decisions_total", path="owned", result="error") == 0
        assert scrape.all("sidegate_limit_decisions_total") == {
            ("logins", "under_limit"): 2,
            ("logins", "over_limit"): 3,
            ("logins", "error"): 0,
            ("_other", "under_limit"): 2,
            ("_other", "over_limit"): 0,
            ("_other", "error"): 0,
        }
        assert scrape.value("sidegate_buckets") == 3
        assert scrape.value("sidegate_buckets_created_total") == 3
        assert scrape.value("sidegate_connections") == 1
        wait_until(lambda: Scrape(where).value("sidegate_loop_lag_seconds_count") > 0, "a timer of the loop")
        assert scrape.value("process_resident_memory_bytes") > 1_000_000
        client.reset(limit, "a")
        assert Scrape(where).value("sidegate_buckets_forgotten_total", kind="reset") == 1


def test_names_of_any_text_are_labels() -> None:
    """Quotes, line ends and backslashes in a limit's name come out of the exposition as they went in."""
    where = f"127.0.0.1:{free_port()}"
    with running_daemon("--http", where) as daemon, daemon.client() as client:
        names = {'a"b', "a\\b", "a\nb", "ü", "{}", "_other"}
        for name in names:
            client.hit(Limit(name, 2, per="1h"), "a")
        assert {name for name, _ in Scrape(where).all("sidegate_limit_decisions_total")} == names


def test_a_link_is_measured(start_cluster: Callable[..., Cluster]) -> None:
    """Forwarded, fallback and replica answers, batches and round trips, and the state of a peer that goes."""
    where = f"127.0.0.1:{free_port()}"
    cluster = start_cluster(2, "--fallback", "allow")
    asked, owner = cluster.nodes
    limit = Limit("linked", 3, per="1h")
    cluster.connect(limit)
    asked.stop()
    asked.options = (*asked.options, "--http", where)
    asked.start()
    (key,) = cluster.keys(owner, 1, "linked")
    for _ in range(5):
        asked.ask(limit, key)
    replicated = Limit("copied", 3, per="1h", behavior=Behavior.GLOBAL)
    (copy,) = cluster.keys(owner, 1, "copied")
    for _ in range(5):
        asked.ask(replicated, copy)
    scrape = Scrape(where)
    # The first request for a copy is the owner's to answer.
    assert scrape.value("sidegate_decisions_total", path="forwarded", result="under_limit") == 3 + 1
    assert scrape.value("sidegate_decisions_total", path="forwarded", result="over_limit") == 2
    assert scrape.value("sidegate_decisions_total", path="replica", result="under_limit") == 2
    assert scrape.value("sidegate_decisions_total", path="replica", result="over_limit") == 2
    assert scrape.value("sidegate_limit_decisions_total", limit="copied", result="over_limit") == 2
    assert scrape.value("sidegate_peer_state", peer=owner.name, state="connected") == 1
    assert scrape.value("sidegate_peer_state", peer=owner.name, state="away") == 0
    assert scrape.value("sidegate_peer_requests_total", peer=owner.name) >= 6
    batches = scrape.value("sidegate_peer_round_trip_seconds_count", peer=owner.name)
    assert batches >= 6
    assert scrape.value("sidegate_peer_batch_requests_count", peer=owner.name) == batches
    assert scrape.value("sidegate_global_replicas") == 1
    wait_until(lambda: Scrape(where).value("sidegate_global_reports_total") >= 1, "the report")
    owner.crash()
    wait_until(
        lambda: Scrape(where).value("sidegate_peer_state", peer=owner.name, state="away") == 1, "the peer to be away"
    )
    asked.ask(limit, key)
    assert Scrape(where).value("sidegate_decisions_total", path="fallback", result="under_limit") == 1


def test_a_histogram_counts_a_bound_as_within_it() -> None:
    """Values under, at, between and beyond the bounds."""
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 2, 5.1, 100):
        histogram.see(value)
    assert histogram.counts == [2, 2, 0, 2]
    assert histogram.sum == pytest.approx(110.1)


@pytest.fixture(scope="module")
def scrape() -> Any:
    """A scrape of a daemon with every door open."""
    where = f"127.0.0.1:{free_port()}"
    with running_daemon("--http", where, "--listen", f"127.0.0.1:{free_port()}"):
        return Scrape(where)


def test_the_page_lists_every_metric_with_its_type_and_labels(scrape: Scrape) -> None:
    """docs/metrics.md and the exposition name the same metrics, of the same types, with the same labels."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(sidegate_\w+)` \| (\w+) \|([^|]*)\|", text, re.MULTILINE)
    told = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    there = {
        family.name + "_total" * (family.type == "counter"): (
            family.type,
            {label for each in family.samples for label in each.labels} - {"le"},
        )
        for family in scrape.families
        if family.name.startswith("sidegate_")
    }
    assert told.keys() == there.keys()
    for name, (kind, labels) in there.items():
        assert told[name][0] == kind, name
        # Of a daemon alone, metrics of peers have no samples yet.
        assert told[name][1] == labels or (not labels and "peer" in told[name][1]), name


@pytest.mark.parametrize("file", ["deploy/prometheus/alerts.yml", "deploy/grafana/sidegate.json"])
def test_every_metric_that_is_asked_for_is_there(scrape: Scrape, file: str) -> None:
    """Each name in an alert's or a panel's expression is a metric of a real scrape."""
    names = set(re.findall(r"\b(?:sidegate|process)_\w+", (ROOT / file).read_text()))
    assert len(names) > 5
    assert {name for name in names if not scrape.has(name) and not scrape.has(_family(name))} == set()


def _family(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def test_the_dashboard_is_one_that_loads() -> None:
    """What an import needs: an identity, a title, a data source to choose, panels that each ask and do not overlap."""
    board = json.loads((ROOT / "deploy" / "grafana" / "sidegate.json").read_text())
    assert board["uid"] == "sidegate"
    assert board["title"] == "Sidegate"
    assert board["schemaVersion"] >= 36
    assert {"datasource", "instance"} <= {each["name"] for each in board["templating"]["list"]}
    places = set()
    for panel in board["panels"]:
        assert panel["type"] == "timeseries"
        assert panel["title"]
        assert panel["targets"]
        assert all(target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"])
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        places.add((grid["x"], grid["y"]))
    assert len(places) == len(board["panels"]) == len({panel["id"] for panel in board["panels"]})
