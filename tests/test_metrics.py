"""Metrics of real daemons, over HTTP.  Numbers in every case, and what names them: test_exposition.py."""

from __future__ import annotations

import http.client
from collections.abc import Callable

from sidecar import Limit
from sidecar.messages import Behavior
from tests.clusters import Cluster, free_port
from tests.daemons import running_daemon, wait_until
from tests.exposition import Node, Scrape


def scrape(where: str) -> Scrape:
    """GET /metrics."""
    connection = http.client.HTTPConnection(where, timeout=10)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("Content-Type", "").startswith("text/plain; version=0.0.4")
    text = response.read()
    connection.close()
    return Scrape(text)


def test_a_daemon_alone_counts_what_it_decided() -> None:
    """Three of two are asked, one is peeked at, and one request is none: to the number, also for frames seen before."""
    where = f"127.0.0.1:{free_port()}"
    with running_daemon("--http", where, "--metric-names", "1") as daemon, daemon.client() as client:
        limit = Limit("logins", 2, per="1h")
        for _ in range(5):
            client.hit(limit, "a")
        client.hit(Limit("other", 5, per="1h"), "a")
        client.hit(Limit("third", 5, per="1h"), "a")
        found = scrape(where)
        assert found.value("sidegate_decisions_total", path="owned", result="under_limit") == 4
        assert found.value("sidegate_decisions_total", path="owned", result="over_limit") == 3
        assert found.value("sidegate_decisions_total", path="owned", result="error") == 0
        assert found.all("sidegate_limit_decisions_total") == {
            ("logins", "under_limit"): 2,
            ("logins", "over_limit"): 3,
            ("logins", "error"): 0,
            ("_other", "under_limit"): 2,
            ("_other", "over_limit"): 0,
            ("_other", "error"): 0,
        }
        assert found.value("sidegate_buckets") == 3
        assert found.value("sidegate_buckets_created_total") == 3
        assert found.value("sidegate_connections") == 1
        wait_until(lambda: scrape(where).value("sidegate_loop_lag_seconds_count") > 0, "a timer of the loop")
        assert found.value("process_resident_memory_bytes") > 1_000_000
        client.reset(limit, "a")
        assert scrape(where).value("sidegate_buckets_forgotten_total", kind="reset") == 1


def test_names_of_any_text_are_labels() -> None:
    """Quotes, line ends and backslashes in a limit's name come out of the exposition as they went in."""
    where = f"127.0.0.1:{free_port()}"
    with running_daemon("--http", where) as daemon, daemon.client() as client:
        names = {'a"b', "a\\b", "a\nb", "ü", "{}", "_other"}
        for name in names:
            client.hit(Limit(name, 2, per="1h"), "a")
        assert {name for name, _ in scrape(where).all("sidegate_limit_decisions_total")} == names


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
    found = scrape(where)
    # The first request for a copy is the owner's to answer.
    assert found.value("sidegate_decisions_total", path="forwarded", result="under_limit") == 3 + 1
    assert found.value("sidegate_decisions_total", path="forwarded", result="over_limit") == 2
    assert found.value("sidegate_decisions_total", path="replica", result="under_limit") == 2
    assert found.value("sidegate_decisions_total", path="replica", result="over_limit") == 2
    assert found.value("sidegate_limit_decisions_total", limit="copied", result="over_limit") == 2
    assert found.value("sidegate_peer_state", peer=owner.name, state="connected") == 1
    assert found.value("sidegate_peer_state", peer=owner.name, state="away") == 0
    assert found.value("sidegate_peer_requests_total", peer=owner.name) >= 6
    batches = found.value("sidegate_peer_round_trip_seconds_count", peer=owner.name)
    assert batches >= 6
    assert found.value("sidegate_peer_batch_requests_count", peer=owner.name) == batches
    assert found.value("sidegate_global_replicas") == 1
    wait_until(lambda: scrape(where).value("sidegate_global_reports_total") >= 1, "the report")
    owner.crash()
    wait_until(
        lambda: scrape(where).value("sidegate_peer_state", peer=owner.name, state="away") == 1, "the peer to be away"
    )
    asked.ask(limit, key)
    assert scrape(where).value("sidegate_decisions_total", path="fallback", result="under_limit") == 1


def test_a_daemon_tells_of_every_metric_there_is() -> None:
    """What the page, the alerts and the dashboard are held against (test_exposition.py) is what a daemon with all its
    doors open serves; one whose gRPC port is off has no metrics of GLOBAL, and
    none here of discovery and TLS: its peers are a list, and its doors plain."""
    node = Node()
    node.join()
    whole = {name for name in node.scrape().told() if "discovery" not in name}
    http_at = f"127.0.0.1:{free_port()}"
    with running_daemon("--http", http_at, "--listen", f"127.0.0.1:{free_port()}"):
        assert scrape(http_at).told().keys() == whole
    with running_daemon("--http", http_at, "--listen", "off"):
        assert scrape(http_at).told().keys() == {name for name in whole if "_global_" not in name}
