"""What a scrape says of requests counted by hand; and a page, alerts and a dashboard that name what is there.

No process and no socket here: test_metrics.py has the daemons.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_link.histogram import Histogram
from sidecar.gateway.proto.gubernator_pb2 import GetRateLimitsReq, RateLimitReq
from sidecar.gateway.v1 import V1, Standing
from sidecar.messages import Behavior, Fallback
from sidecar.tally import RESULTS
from tests.exposition import MAX_BUCKETS, MAX_CONNECTIONS, ME, OWNER, Node, Scrape
from tests.helpers import T, fields

ROOT = Path(__file__).parent.parent
FROM_PROMETHEUS = {"instance", "job", "le"}
"""Labels that a query finds beyond a sample's own."""
UNSEEN = {"sidegate_build_info"}
"""What no panel draws: it is labels alone."""
VARIABLES = re.compile(r"\$\w+")


def decisions(scrape: Scrape, path: str) -> tuple[float, ...]:
    """Under the limit, over it, and errors."""
    return tuple(scrape.value("sidegate_decisions_total", path=path, result=result) for result in RESULTS)


def by_name(scrape: Scrape, name: str) -> tuple[float, ...]:
    """The same of one limit."""
    return tuple(scrape.value("sidegate_limit_decisions_total", limit=name, result=result) for result in RESULTS)


def of(name: str, key: str = "k", **values: object) -> tuple[object, ...]:
    """A request of 2 in a second."""
    return fields(name=name, unique_key=key, **{"limit": 2, "duration": 1_000, **values})


# --- Numbers


def test_requests_of_one_frame_are_counted_each_by_its_name() -> None:
    """With room for two names: a is asked thrice for two, b once, c and d are counted together, and with them what is
    no request."""
    node = Node(names=2)
    node.ask(of("a"), of("a"), of("b"), fields(limit=-1), of("c"), of("a"), None, of("d", hits=3), of("c"))
    scrape = node.scrape()
    assert by_name(scrape, "a") == (2, 1, 0)
    assert by_name(scrape, "b") == (1, 0, 0)
    assert by_name(scrape, "_other") == (2, 1, 2)
    assert set(scrape.all("sidegate_limit_decisions_total")) == {
        (name, result) for name in ("a", "b", "_other") for result in RESULTS
    }
    assert decisions(scrape, "owned") == (5, 2, 2)
    assert decisions(scrape, "forwarded") == decisions(scrape, "replica") == decisions(scrape, "fallback") == (0, 0, 0)


def test_frames_seen_before_are_counted_as_the_first() -> None:
    """Two of a second are let through, the third is not; in the next second two more: each on the short way."""
    node = Node(names=1)
    ways = []
    for _ in range(2):
        for _ in range(3):
            for name in ("a", "past the bound"):
                node.ask(of(name))
                ways.append(node.again)
        node.clock.move(node.clock.now() + 1_000)
    assert ways == [False] * 2 + [True] * 10
    scrape = node.scrape()
    assert by_name(scrape, "a") == by_name(scrape, "_other") == (4, 2, 0)
    assert decisions(scrape, "owned") == (8, 4, 0)


def test_each_path_has_its_own_count() -> None:
    """Owned, answered by the owner, answered from a copy of its bucket, and by a fallback, each in its place."""
    node = Node(names=10)
    node.join()
    key = node.key(OWNER, "a")
    # Owned: two of two, and one too many.
    for _ in range(3):
        node.ask(of("a", node.key(ME, "a")))
    # Forwarded: the first by the long way, then by the short one; under, over, and refused by the owner.
    answers: list[tuple[Any, ...]] = [(0, 2, 1, T, 0), (1, 2, 0, T, 9), (2, 0, 0, 0, 0, "owner", False, "no")]
    for answer in answers:
        asker = node.ask(of("a", key))
        node.link.asked.pop()[2].answered(answer, "owner")
        assert len(asker.sent) == 1
    # Its owner does not answer: the fallback allows.
    node.ask(of("a", key))
    node.seconds.pass_by(1.0)
    # GLOBAL: the owner once, and from then on the copy.
    copied = of("g", node.key(OWNER, "g"), behavior=int(Behavior.GLOBAL))
    node.ask(copied)
    state = ("g", copied[1])
    owner = Node()
    verdict = owner.table.decide(T, copied)
    node.link.asked.pop()[2].answered((verdict, owner.table.state(*map(str, state))), "owner")
    for _ in range(3):
        node.ask(copied)
    scrape = node.scrape()
    assert decisions(scrape, "owned") == (2, 1, 0)
    assert decisions(scrape, "forwarded") == (2, 1, 1)
    assert decisions(scrape, "fallback") == (1, 0, 0)
    assert decisions(scrape, "replica") == (1, 2, 0)
    # By name: what was decided here.
    assert by_name(scrape, "a") == (3, 1, 0)
    assert by_name(scrape, "g") == (1, 2, 0)
    assert scrape.value("sidegate_global_replicas") == 1
    # What was admitted and what was refused are two runs, told in one message.
    assert scrape.value("sidegate_global_unsent") == 2
    node.sync.flush()
    assert node.scrape().value("sidegate_global_reports_total") == 1


@pytest.mark.parametrize(
    ("policy", "counted"), [(Fallback.ERROR, (0, 0, 1)), (Fallback.DENY, (0, 1, 0)), (Fallback.ALLOW, (1, 0, 0))]
)
def test_what_a_fallback_answers_is_counted_as_that(policy: Fallback, counted: tuple[int, ...]) -> None:
    """An error, a refusal or a yes under the limit's name."""
    node = Node(fallback=policy)
    node.join()
    node.ask(of("a", node.key(OWNER, "a")))
    node.seconds.pass_by(1.0)
    assert decisions(node.scrape(), "fallback") == by_name(node.scrape(), "a") == counted


@pytest.mark.parametrize(("status", "counted"), [(1.0, (0, 1, 0)), (False, (1, 0, 0)), (2.0, (0, 0, 1))])
def test_a_status_that_only_equals_one_is_counted_and_its_asker_answered(
    status: object, counted: tuple[int, ...]
) -> None:
    """A peer's statuses may come as floats or bools; nobody waits for ever because of that."""
    node = Node()
    node.join()
    asker = node.ask(of("a", node.key(OWNER, "a")))
    node.link.asked.pop()[2].answered((status, 2, 1, T, 0), "owner")
    assert len(asker.sent) == 1
    assert decisions(node.scrape(), "forwarded") == counted


async def _refused_by_v1(node: Node) -> None:
    standing = Standing("", "", [], [])
    asked = [RateLimitReq(name="a", limit=2, duration=1_000), RateLimitReq(unique_key="k", limit=2, duration=1_000)]
    asked.append(RateLimitReq(name="a", unique_key="k", hits=1, limit=2, duration=1_000))
    await V1(node.service, node.clock.now, ME.name, lambda: standing).get_rate_limits(
        GetRateLimitsReq(requests=asked), None
    )


def test_what_v1_refuses_by_itself_is_an_error_too() -> None:
    """Without a key or a name nothing is asked of the table; whoever watches errors sees it all the same."""
    node = Node()
    asyncio.run(_refused_by_v1(node))
    assert decisions(node.scrape(), "owned") == (1, 0, 2)
    assert by_name(node.scrape(), "_other") == (0, 0, 2)


def test_buckets_and_why_they_go() -> None:
    """Three are opened, of which one is reset and one found ended; the full table then loses one with tokens left and,
    when there is none such, an exhausted one."""
    node = Node()
    node.ask(of("a", "reset"), of("a", "short", duration=1))
    node.table.forget("a", "reset")
    later = T + 60_000
    assert node.table.sweep(later, MAX_BUCKETS) == 1
    for number in range(MAX_BUCKETS):
        node.table.decide(later, of("spent", str(number), hits=2))
    node.table.decide(later, of("new", "1"))  # an exhausted one goes for it
    node.table.decide(later, of("new", "2"))  # and "1", which has tokens left, for this one
    scrape = node.scrape()
    assert scrape.all("sidegate_buckets_forgotten_total") == {
        ("ended",): 1,
        ("evicted",): 1,
        ("evicted_exhausted",): 1,
        ("reset",): 1,
    }
    assert scrape.value("sidegate_buckets") == scrape.value("sidegate_buckets_max") == MAX_BUCKETS
    assert scrape.value("sidegate_buckets_created_total") == 2 + MAX_BUCKETS + 2


def test_links_histograms_and_the_rest() -> None:
    """Buckets of a histogram add up, in seconds; the link's state is one of three; counters of the server and the log
    come as they are."""
    node = Node()
    node.join()
    for seconds, size in ((0.0002, 1), (0.0003, 100), (3.0, 5_000)):
        node.peer.seconds.see(seconds)
        node.peer.sizes.see(size)
    node.peer.requests = 5_101
    node.lag.see(0.002)
    node.server.accepted, node.server.refused, node.server.dropped, node.server.bad_frames = 4, 3, 2, 1
    for _ in range(3):
        node.repeats("table_full")
    scrape = node.scrape()
    trips = scrape.all("sidegate_peer_round_trip_seconds_bucket")
    assert [trips[bound, "owner"] for bound in ("0.0002", "0.0005", "0.001", "1.0", "+Inf")] == [1, 2, 2, 2, 3]
    assert scrape.value("sidegate_peer_round_trip_seconds_sum", peer="owner") == pytest.approx(3.0005)
    assert scrape.value("sidegate_peer_round_trip_seconds_count", peer="owner") == 3
    sizes = scrape.all("sidegate_peer_batch_requests_bucket")
    assert [sizes[bound, "owner"] for bound in ("1.0", "50.0", "100.0", "1000.0", "+Inf")] == [1, 1, 2, 2, 3]
    assert scrape.value("sidegate_peer_batch_requests_sum", peer="owner") == 5_101
    assert scrape.value("sidegate_peer_requests_total", peer="owner") == 5_101
    assert scrape.all("sidegate_peer_state") == {
        ("owner", "idle"): 1,
        ("owner", "connected"): 0,
        ("owner", "away"): 0,
    }
    assert scrape.value("sidegate_peer_queue", peer="owner") == 0
    assert [scrape.value("sidegate_loop_lag_seconds_bucket", le=bound) for bound in ("0.001", "0.01", "+Inf")] == [
        0,
        1,
        1,
    ]
    assert [
        scrape.value(f"sidegate_{name}_total")
        for name in ("connections_accepted", "connections_refused", "connections_dropped", "bad_frames")
    ] == [4, 3, 2, 1]
    assert scrape.value("sidegate_connections_max") == MAX_CONNECTIONS
    assert scrape.value("sidegate_log_lines_held_back_total") == 2
    assert node.log == ["table_full"]
    assert scrape.value("sidegate_build_info", version="9.9", protocol="1", node="me") == 1


def test_when_the_certificate_ends() -> None:
    """As seconds since the epoch; nothing of it without TLS."""
    node = Node()
    assert "sidegate_tls_expiry_timestamp_seconds" not in node.scrape().told()
    node.expires = 1_800_000_000.5
    assert node.scrape().value("sidegate_tls_expiry_timestamp_seconds") == 1_800_000_000.5


def test_how_the_source_of_peers_stands() -> None:
    """Nothing of it where peers are a list; ages come once there is something to be old."""
    node = Node()
    assert not [family for family in node.scrape().families if "discovery" in family.name]
    node.join()
    names = ("up", "provisional", "failures_total")

    def told() -> list[float]:
        return [node.scrape().value(f"sidegate_discovery_{name}", source="dns") for name in names]

    node.standing.lost("no answer")
    assert told() == [0, 1, 1]
    assert not node.scrape().all("sidegate_discovery_age_seconds")
    node.standing.heard()
    node.seconds.pass_by(2.5)
    node.standing.changed()
    node.seconds.pass_by(1.5)
    assert told() == [1, 0, 1]
    assert node.scrape().value("sidegate_discovery_age_seconds", source="dns") == 4
    assert node.scrape().value("sidegate_discovery_ring_age_seconds", source="dns") == 1.5


def test_a_histogram_counts_a_bound_as_within_it() -> None:
    """Values under, at, between and beyond the bounds."""
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 2, 5.1, 100):
        histogram.see(value)
    assert histogram.counts == [2, 2, 0, 2]
    assert histogram.sum == pytest.approx(110.1)


def test_two_nodes_of_one_process_share_nothing() -> None:
    """No registry is global: a second node has its own counts, and neither brings Python's own metrics twice."""
    first, second = Node(), Node()
    first.ask(of("a"))
    assert decisions(first.scrape(), "owned") == (1, 0, 0)
    assert decisions(second.scrape(), "owned") == (0, 0, 0)
    assert second.scrape().value("process_resident_memory_bytes") > 1_000_000


# --- What names them


@pytest.fixture(scope="module")
def whole() -> Scrape:
    """A scrape in which every metric has a sample with all its labels."""
    node = Node()
    node.join()
    node.standing.heard()
    node.standing.changed()
    node.expires = 1.0
    return node.scrape()


def test_the_page_lists_every_metric_with_its_type_and_labels(whole: Scrape) -> None:
    """docs/metrics.md and the exposition name the same metrics, of the same types, with the same labels."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(sidegate_\w+)` \| (\w+) \|([^|]*)\| *(\S.*) \|$", text, re.MULTILINE)
    assert {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows} == whole.told()
    assert [name for name, _, _, question in rows if "?" not in question] == []


def test_names_follow_the_conventions(whole: Scrape) -> None:
    """Our prefix, counters that end in _total, base units, a help text each; and never a label that holds a key."""
    for family in whole.families:
        assert family.documentation, family.name
        if not family.name.startswith("process_"):
            assert re.fullmatch(r"sidegate_[a-z_]+", family.name)
            assert not re.search(r"milli|micro|_ms\b|_us\b|kilo|mega", family.name)
            assert not {"key", "unique_key"} & {label for each in family.samples for label in each.labels}
    assert all(name.endswith("_total") for name, (kind, _) in whole.told().items() if kind == "counter")


def faults(expr: str, there: dict[str, dict[str, set[str]]]) -> Iterator[str]:
    """What an expression asks for that no scrape has: samples, labels, and values of labels that are few."""
    known: set[str] = set(FROM_PROMETHEUS)
    for name, selectors in re.findall(r"\b((?:sidegate|process)_\w+)(?:\{([^}]*)\})?", expr):
        if name not in there:
            yield f"no sample {name}"
            continue
        known |= there[name].keys()
        for label, how, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selectors):
            values = there[name].get(label)
            if values is None:
                if label not in FROM_PROMETHEUS:
                    yield f"{name} has no label {label}"
            elif not VARIABLES.search(value) and not any(
                re.fullmatch(value if "~" in how else re.escape(value), each) for each in values
            ):
                yield f"{name} has no {label} {value}"
    for labels in re.findall(r"\b(?:by|without|on|ignoring) \(([^)]*)\)", expr):
        yield from (f"nothing has a label {each}" for each in re.split(r", *", labels) if each not in known)
    for opening, closing in ("()", "{}", "[]"):
        if expr.count(opening) != expr.count(closing):
            yield f"{opening} is not closed"


def test_an_expression_is_held_against_the_scrape(whole: Scrape) -> None:
    """The check below finds a name, a label and a value that are wrong."""
    there = whole.labels()
    assert list(faults('sum by (peer) (rate(sidegate_peer_state{state="away",peer=~"$peer"}[5m]))', there)) == []
    assert list(faults("sidegate_buckets_total", there)) == ["no sample sidegate_buckets_total"]
    assert list(faults("sidegate_peer_round_trip_seconds", there)) == ["no sample sidegate_peer_round_trip_seconds"]
    assert list(faults('sidegate_buckets{kind="reset"}', there)) == ["sidegate_buckets has no label kind"]
    assert list(faults('sidegate_peer_state{state="gone"}', there)) == ["sidegate_peer_state has no state gone"]
    assert list(faults("sum by (key) (sidegate_buckets)", there)) == ["nothing has a label key"]
    assert list(faults("rate(sidegate_buckets[5m]", there)) == ["( is not closed"]


def test_every_alert_asks_for_what_is_there(whole: Scrape) -> None:
    """The rules are Prometheus': a name, an expression, a severity, a summary; each stands on the page."""
    file = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    page = (ROOT / "docs" / "metrics.md").read_text()
    rules = [rule for group in file["groups"] for rule in group["rules"]]
    assert len(rules) == len({rule["alert"] for rule in rules}) > 5
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert f"`{rule['alert']}`" in page
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert "sidegate" in rule["expr"]
        assert list(faults(rule["expr"], whole.labels())) == [], rule["alert"]
        # What is summed away is in no summary.
        kept = re.search(r"\b(?:sum|max) by \(([^)]*)\)", rule["expr"])
        told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        if kept or re.search(r"\b(?:sum|max)\(", rule["expr"]):
            assert told <= set(re.split(r", *", kept.group(1)) if kept else []), rule["alert"]
    assert set(re.findall(r"`(Sidegate\w+)`", page)) == {rule["alert"] for rule in rules}


def test_the_dashboard_is_one_that_loads(whole: Scrape) -> None:
    """What an import needs: an identity, a title, a data source to choose, panels that each ask for what is there and
    do not overlap."""
    board = json.loads((ROOT / "deploy" / "grafana" / "sidegate.json").read_text())
    assert board["uid"] == "sidegate"
    assert board["title"] == "Sidegate"
    assert board["schemaVersion"] >= 36
    variables = {each["name"] for each in board["templating"]["list"]}
    assert {"datasource", "instance"} <= variables
    places: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"] == "timeseries"
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len(panel["targets"]) == len({target["refId"] for target in panel["targets"]}) > 0
        for target in panel["targets"]:
            assert list(faults(target["expr"], whole.labels())) == [], panel["title"]
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= variables | {"__rate_interval"}
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {(grid["x"] + right, grid["y"] + down) for right in range(grid["w"]) for down in range(grid["h"])}
        assert not cells & places, panel["title"]
        places |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    # Nothing that is measured is left without a place to see it: every family but these few.
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    unseen = {name for name in whole.told() if not re.search(rf"\b{name}(?:_bucket|_sum|_count)?\b", asked)}
    assert unseen <= UNSEEN
