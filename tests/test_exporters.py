"""Where spans go: what `tracing = on` does with the variables and with what is installed."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf import json_format

from sidecar import Limit
from sidecar.config import Config, ConfigError
from sidecar.daemon import Daemon
from sidecar.daemon import serve as serve_here
from sidecar.exporters import _finish, exporter_names, start
from tests.clusters import Cluster
from tests.daemons import DaemonProcess, clean_environment, wait_until
from tests.v1_client import Stranger

GRPC, HTTP = "otlp_proto_grpc", "otlp_proto_http"
BOTH = frozenset({GRPC, HTTP, "console"})
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


class Log:
    """Keeps what is logged and what is told as trouble."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def __call__(self, event: str, **fields: object) -> None:
        self.lines.append((event, fields))

    info = warning = __call__


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No OTEL_ variable of this machine counts, and nothing stays at OpenTelemetry's logger."""
    for name in ("TRACES_EXPORTER", "SDK_DISABLED", "SERVICE_NAME", "RESOURCE_ATTRIBUTES", "EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv("OTEL_" + name, raising=False)
    logger = logging.getLogger("opentelemetry")
    before = list(logger.handlers)
    yield
    logger.handlers[:] = before


@pytest.mark.parametrize(
    ("said", "installed", "names"),
    [
        ({}, BOTH, [GRPC]),
        ({}, {HTTP}, [HTTP]),
        ({}, {"console"}, []),
        ({"OTEL_TRACES_EXPORTER": ""}, {HTTP}, [HTTP]),
        ({"OTEL_TRACES_EXPORTER": "none"}, BOTH, []),
        ({"OTEL_TRACES_EXPORTER": "console"}, BOTH, ["console"]),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, BOTH, ["console", GRPC]),
        ({"OTEL_TRACES_EXPORTER": f"{GRPC},otlp"}, BOTH, [GRPC]),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, BOTH, [HTTP]),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, {GRPC}, []),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            BOTH,
            [GRPC],
        ),
    ],
)
def test_the_exporters_that_the_variables_name(said: dict[str, str], installed: set[str], names: list[str]) -> None:
    """OpenTelemetry's own variables and defaults; without any, whichever exporter of OTLP is there."""
    assert exporter_names(said, installed) == names


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER names 'zipkin'"),
        ({"OTEL_TRACES_EXPORTER": "console,none"}, "names 'none'"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "names 'otlp'"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL must be one of grpc, http/protobuf",
        ),
    ],
)
def test_variables_that_ask_for_what_is_not_there(said: dict[str, str], why: str) -> None:
    """One line that names the variable."""
    with pytest.raises(ConfigError, match=why):
        exporter_names(said, frozenset({"console"}))


@pytest.mark.parametrize(
    ("variables", "missing", "reason"),
    [
        ({}, "opentelemetry.sdk.trace", "opentelemetry-sdk is not installed"),
        ({"OTEL_SDK_DISABLED": "True"}, "", "OTEL_SDK_DISABLED is true"),
        ({"OTEL_TRACES_EXPORTER": "none"}, "", "OTEL_TRACES_EXPORTER is none"),
    ],
)
def test_nobody_to_take_spans(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], missing: str, reason: str
) -> None:
    """One warning says why, and nothing is traced."""
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)

    async def work() -> None:
        log = Log()
        assert start("me", "1", log, log, variables) == (None, None)
        assert log.lines == [("tracing_idle", {"reason": reason})]

    asyncio.run(work())


def test_what_opentelemetry_logs_becomes_a_line_of_ours() -> None:
    """On whatever thread it is logged; below a warning it is not told."""

    async def work() -> None:
        log = Log()
        start("me", "1", log, log, {"OTEL_TRACES_EXPORTER": "none"})
        logger = logging.getLogger("opentelemetry.exporter")
        logger.info("all is well")
        await asyncio.to_thread(logger.warning, "no collector at %s", "h:1")
        assert log.lines[1:] == [("tracing_failed", {"reason": "no collector at h:1"})]

    asyncio.run(work())


def test_an_exporter_that_hangs_holds_the_end_up_no_longer_than_it_may() -> None:
    """A collector that is away costs a stopping daemon the seconds given, no more."""
    began = time.monotonic()
    asyncio.run(_finish(lambda: time.sleep(5), 0.1))
    assert time.monotonic() - began < 3


# --- Real daemons


def spans(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """The spans that a daemon has printed so far."""
    text, at, found = daemon.output.read_text(), 0, []
    decoder = json.JSONDecoder()
    while (at := text.find("{", at)) >= 0:
        try:
            span, at = decoder.raw_decode(text, at)
        except ValueError:
            break  # the last one is still being written
        found.append(span)
    return found


def one_span(daemon: DaemonProcess) -> dict[str, Any]:
    """The one span of this daemon, once it is there."""
    wait_until(lambda: spans(daemon), "the span is printed")
    (span,) = spans(daemon)
    return span


@pytest.fixture
def _console(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons print their spans at once."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")


@pytest.mark.usefixtures("_console")
def test_one_trace_from_the_caller_through_the_asked_daemon_to_the_owner(
    start_cluster: Callable[..., Cluster],
) -> None:
    """A traceparent sent to one daemon comes out at both: the asked one's span is the caller's child, the owner's is
    that one's.  The same client without it, and one that is not sampled, leave no span."""
    cluster = start_cluster(2, "--tracing", "on")
    asked, owner = cluster.nodes
    limit = Limit("traced", 10, per="1h")
    cluster.connect(limit)
    key, *others = cluster.keys(owner, 3, limit.name)
    with asked.client(traceparent=lambda: TRACEPARENT) as client:
        assert client.hit(limit, key).owner == owner.name
    with asked.client(traceparent=lambda: TRACEPARENT[:-1] + "0") as client:
        assert client.hit(limit, others[0]).owner == owner.name
    assert asked.ask(limit, others[1]).owner == owner.name
    assert [node.stop() for node in (asked, owner)] == [0, 0]

    client_span, server_span = one_span(asked), one_span(owner)
    assert client_span["context"]["trace_id"] == server_span["context"]["trace_id"] == "0x" + TRACE
    assert client_span["parent_id"] == "0x" + SPAN
    assert server_span["parent_id"] == client_span["context"]["span_id"]
    assert client_span["kind"].endswith("CLIENT")
    assert server_span["kind"].endswith("SERVER")
    assert client_span["attributes"]["sidegate.peer"] == owner.name
    resource = client_span["resource"]["attributes"]
    assert resource["service.name"] == "sidegate"
    assert resource["service.instance.id"] == asked.name
    assert resource["deployment.environment"] == "test"
    (line,) = asked.events("tracing_started")
    assert line["exporters"] == "console"


@pytest.mark.usefixtures("_console")
def test_a_traceparent_in_a_v1_calls_metadata(start_cluster: Callable[..., Cluster]) -> None:
    """It is followed as one on the socket is; a call with none, or with nonsense, is answered and not told."""
    cluster = start_cluster(2, "--tracing", "on")
    asked, owner = cluster.nodes
    cluster.connect(Limit("traced", 10, per="1h"))
    (key,) = cluster.keys(owner, 1, "traced")
    hit = {"name": "traced", "uniqueKey": key, "hits": 1, "limit": 10, "duration": 1000}
    with Stranger(f"127.0.0.1:{asked.port}") as stranger:
        call, request = stranger.method("GetRateLimits")
        for metadata in (None, (("traceparent", "nonsense"),), (("traceparent", TRACEPARENT),)):
            (answer,) = call(json_format.ParseDict({"requests": [hit]}, request()), metadata=metadata).responses
            assert (answer.error, answer.metadata["owner"]) == ("", owner.name)
    assert [node.stop() for node in (asked, owner)] == [0, 0]
    assert one_span(asked)["parent_id"] == "0x" + SPAN
    assert one_span(owner)["parent_id"] == one_span(asked)["context"]["span_id"]


@pytest.mark.usefixtures("_console")
def test_an_owner_that_does_not_trace_answers_all_the_same(start_cluster: Callable[..., Cluster]) -> None:
    """Tracing is each daemon's own: the asked one's span says that the batch was answered."""
    cluster = start_cluster(2)
    asked, owner = cluster.nodes
    asked.stop()
    asked.options = (*asked.options, "--tracing", "on")
    asked.start()
    limit = Limit("traced", 10, per="1h")
    cluster.connect(limit)
    (key,) = cluster.keys(owner, 1, limit.name)
    with asked.client(traceparent=lambda: TRACEPARENT) as client:
        assert client.hit(limit, key).owner == owner.name
    assert one_span(asked)["attributes"]["sidegate.outcome"] == "answered"
    assert not spans(owner)
    assert not owner.events("peer_away")


@pytest.mark.parametrize("tracing", ["off", "on"])
@pytest.mark.usefixtures("_console")
def test_off_loads_nothing_of_opentelemetry(
    start_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, tracing: str
) -> None:
    """Not even when a traced request is forwarded; with tracing on, the same look at the imports finds it."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # every import is told on standard error
    cluster = start_cluster(2, "--tracing", tracing)
    limit = Limit("traced", 10, per="1h")
    cluster.connect(limit)
    asked, owner = cluster.nodes
    (key,) = cluster.keys(owner, 1, limit.name)
    with asked.client(traceparent=lambda: TRACEPARENT) as client:
        assert client.hit(limit, key).owner == owner.name
    for node in cluster.nodes:
        text = node.log.read_text()
        assert "import time:" in text
        assert ("opentelemetry" in text) == (tracing == "on")


def serve(short: str, *hidden: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`sidegate serve --tracing on` to its end, as if these modules were not installed."""
    words = ["serve", "--socket", short + "/s", "--tracing", "on", "--listen", "off", "--http", "off"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r})); from sidecar.cli import main; "
        f"sys.exit(main({words!r}))"
    )
    return subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(**variables), capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("hidden", "variables", "why"),
    [
        (["opentelemetry"], {}, "tracing: on needs opentelemetry-api: pip install 'sidegate[otel]'"),
        ([], {"OTEL_TRACES_EXPORTER": "zipkin"}, "tracing: OTEL_TRACES_EXPORTER names 'zipkin'"),
        ([], {"OTEL_PYTHON_TRACER_PROVIDER": "nobody"}, "tracing: OTEL_PYTHON_TRACER_PROVIDER cannot be used"),
    ],
    ids=["no API", "no such exporter", "no such provider"],
)
def test_a_daemon_that_cannot_trace_does_not_start(
    short_path: Any, hidden: list[str], variables: dict[str, str], why: str
) -> None:
    """Exit status 2 and a line that says what is missing."""
    ended = serve(str(short_path), *hidden, **variables)
    assert ended.returncode == 2
    line = json.loads(ended.stderr.splitlines()[-1])
    assert line["event"] == "tracing_unavailable"
    assert line["reason"].startswith(why)


def test_another_setting_that_is_judged_late_is_not_called_tracing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, and a line of its own."""

    async def refuse(_: Daemon) -> None:
        raise ConfigError("discovery: nowhere is none")

    monkeypatch.setattr(Daemon, "run", refuse)
    assert serve_here(Config()) == 2
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["level"]) == ("settings_unusable", "error")
    assert line["reason"] == "discovery: nowhere is none"


def test_a_daemon_without_the_sdk_serves_and_says_once_that_it_traces_nothing(
    start_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_SDK_DISABLED stands for the SDK's absence, which the unit test above takes away for real."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    daemon = start_daemon("--tracing", "on")
    assert len(daemon.events("tracing_idle")) == 1
