"""SIGHUP: what changes at run time, under load and with no failed request, and that a mistake changes nothing."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import CapturingLogger

from sidecar import Client, Limit, Status
from sidecar.config import SETTINGS, Config, ConfigError
from sidecar.daemon import Daemon
from sidecar.logs import make_logger
from sidecar.reload import Reload
from tests.clusters import Cluster, Load, Node, running_cluster
from tests.daemons import DaemonProcess, wait_until

WIDE = 1_000_000
RELOADABLE = {setting.name for setting in SETTINGS if setting.metadata["reloadable"]}


# --- The table, by itself


class Bench:
    """A Reload of two rows, with settings that a test writes and a log that it reads."""

    def __init__(self) -> None:
        self.written: Config | Exception = Config()
        self.log = CapturingLogger()
        self.done: list[str] = []
        self.fault: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.reload = Reload(Config(), self._read, self.log)
        self.reload.add(("grace",), self._row("grace"))
        self.reload.add(("fallback", "peers"), self._row("fallback", faulty=True))

    def _read(self) -> Config:
        if isinstance(self.written, Exception):
            raise self.written
        return self.written

    def _row(self, name: str, faulty: bool = False) -> Callable[[Config], Awaitable[Callable[[], None]]]:
        async def prepare(config: Config) -> Callable[[], None]:
            if self.gate is not None:
                await self.gate.wait()
            if faulty and self.fault is not None:
                raise self.fault
            return lambda: self.done.append(f"{name}={getattr(config, name)}")

        return prepare

    async def idle(self) -> None:
        """Wait until no reading is under way."""
        while self.reload._task is not None:
            await asyncio.wait([self.reload._task])
            await asyncio.sleep(0)

    def told(self) -> list[tuple[str, dict[str, Any]]]:
        """Events and fields since last asked."""
        calls = [(call.args[0], {k: v for k, v in call.kwargs.items() if k != "exc_info"}) for call in self.log.calls]
        self.log.calls.clear()
        return calls


def bench(test: Callable[[Bench], Awaitable[None]]) -> None:
    """Run a test on a loop."""

    async def run() -> None:
        await test(Bench())

    asyncio.run(run())


def test_all_rows_change_and_what_has_none_is_named() -> None:
    """Every row is made, changed or not; a changed setting without a row is told and its old value kept."""

    async def test(b: Bench) -> None:
        b.reload.start()
        b.written = replace(Config(), grace=1, max_buckets=7)
        b.reload()
        await b.idle()
        assert b.done == ["grace=1", "fallback=error"]
        assert b.told() == [
            ("settings_read_again", {"changed": ["grace"]}),
            ("restart_needed", {"settings": ["max_buckets"]}),
        ]
        assert b.reload.config == replace(Config(), grace=1)

    bench(test)


@pytest.mark.parametrize("fault", [ConfigError("no good"), OSError("no good"), RuntimeError("ours")])
def test_one_row_that_refuses_keeps_every_old_value(fault: Exception) -> None:
    """Nothing is made, not even what was prepared before; one line tells why; the next reading starts afresh."""

    async def test(b: Bench) -> None:
        b.reload.start()
        b.written, b.fault = replace(Config(), grace=1), fault
        b.reload()
        await b.idle()
        assert (b.done, b.reload.config) == ([], Config())
        ((event, fields),) = b.told()
        assert event == "reload_failed"
        assert str(fault) in fields["reason"]
        b.fault = None
        b.reload()
        await b.idle()
        assert b.done == ["grace=1", "fallback=error"]

    bench(test)


def test_settings_that_cannot_be_read_keep_every_old_value() -> None:
    """A mistake in the file is told in its own words."""

    async def test(b: Bench) -> None:
        b.reload.start()
        b.written = ConfigError("grace: must be an integer")
        b.reload()
        await b.idle()
        assert b.done == []
        assert b.told() == [("reload_failed", {"reason": "grace: must be an integer"})]

    bench(test)


def test_readings_never_mix_and_many_calls_are_one_more() -> None:
    """Calls while one reading is under way make one more after it, which sees the last that was written; nothing of
    either is kept afterwards."""

    async def test(b: Bench) -> None:
        b.reload.start()
        b.gate = asyncio.Event()
        b.written = replace(Config(), grace=1)
        b.reload()
        first = b.reload._task
        await asyncio.sleep(0)
        for grace in range(2, 50):
            b.written = replace(Config(), grace=grace)
            b.reload()
        assert b.reload._task is first
        assert b.done == []
        b.gate.set()
        await b.idle()
        assert b.done[-2:] == ["grace=49", "fallback=error"]
        assert len(b.done) <= 4, "one reading under way, and one more"
        assert b.reload._task is None

    bench(test)


def test_before_the_start_a_call_waits_and_after_the_end_it_is_nothing() -> None:
    """SIGHUP while a daemon starts is done when it is up, and while it drains not at all."""

    async def test(b: Bench) -> None:
        b.written = replace(Config(), grace=1)
        b.reload()
        assert b.reload._task is None
        b.reload.start()
        await b.idle()
        assert b.done == ["grace=1", "fallback=error"]
        b.gate = asyncio.Event()
        b.reload()
        await asyncio.sleep(0)
        b.reload.stop()
        await b.idle()
        b.reload()
        assert b.reload._task is None
        assert b.done == ["grace=1", "fallback=error"]

    bench(test)


def test_the_manual_marks_what_the_daemon_can_change() -> None:
    """The marks in the dataclass and the rows of the daemon's table are the same settings."""
    daemon = Daemon(Config(), make_logger("info", "json", io.StringIO()))
    assert daemon.reload.names == RELOADABLE


# --- Real daemons


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Two linked daemons for the tests that leave them as they were."""
    with running_cluster(2, "--peer-timeout", "20000") as cluster:
        cluster.connect(Limit("pair", WIDE, per="1d"))
        yield cluster


def write(node: Node, cluster: Cluster, **more: object) -> None:
    """Write a node's file anew: the peers, and more settings."""
    node.list_peers(",".join(f"{one.peer.name}={one.peer.address}" for one in cluster.nodes))
    with node.settings.open("a") as stream:
        for name, value in more.items():
            stream.write(f"{name} = {value!r}\n")


def told(node: Node, event: str, since: int) -> list[dict[str, Any]]:
    """The events of that name after the first `since` ones, once there is any."""
    wait_until(lambda: len(node.events(event)) > since, f"{node.name} tells of {event}")
    return node.events(event)[since:]


def asks(limit: Limit, keys: list[str]) -> Callable[[Client, int], object]:
    """What the load asks: one key after the other."""
    return lambda client, number: client.check([limit.request(keys[number % len(keys)])])[0]


def test_no_request_fails_while_all_that_can_change_changes(pair: Cluster) -> None:
    """Log level, fallback and the list of peers, thirty times in a row, while both daemons are asked for all keys."""
    limit = Limit("pair", WIDE, per="1d")
    keys = [key for owner in pair.nodes for key in pair.keys(owner, 20, "pair")]
    asked = pair.nodes[0]
    read = len(asked.events("settings_read_again"))
    with Load(pair.nodes, asks(limit, keys), rate=300) as load:
        for number in range(30):
            write(asked, pair, log_level=("info", "debug")[number % 2], fallback=("deny", "local", "allow")[number % 3])
            if number % 5 == 4:
                asked.list_peers(f"{asked.peer.name}={asked.peer.address}")
            asked.hang_up()
            time.sleep(0.03)
        write(asked, pair)
        asked.hang_up()
        wait_until(lambda: len(asked.peers()["peers"]) == 2, "the list is whole again")
    decisions = [result for result, _, _ in load.results]
    assert len(decisions) > 300
    bad = [one for one in decisions if getattr(one, "error", one) or one.degraded]  # type: ignore[attr-defined]
    assert bad == []
    changed = {name for event in asked.events("settings_read_again")[read:] for name in event["changed"]}
    assert changed >= {"fallback", "log_level"}
    assert asked.events("reload_failed") == []
    assert asked.events("loop_error") == []


def test_the_fallback_changes_for_requests_already_known(start_cluster: Callable[..., Cluster]) -> None:
    """The same frame as before, while its owner is gone, is answered by the new policy; also after a new ring."""
    cluster = start_cluster(2, "--peer-timeout", "2000")
    asked, owner = cluster.nodes
    limit = Limit("policy", WIDE, per="1d")
    (key,) = cluster.keys(owner, 1, "policy")
    cluster.connect(limit)
    owner.crash()
    assert asked.ask(limit, key).status == Status.ERROR
    for fallback, allowed in (("deny", False), ("allow", True), ("local", True)):
        write(asked, cluster, fallback=fallback)
        read = len(asked.events("settings_read_again"))
        asked.hang_up()
        assert told(asked, "settings_read_again", read)[0]["changed"] == ["fallback"]
        for _ in range(3):
            decision = asked.ask(limit, key)
            assert (decision.allowed, decision.degraded) == (allowed, True)
    ring = len(asked.events("ring_changed"))
    asked.settings.write_text(asked.settings.read_text().replace("peers = '", "peers = 'node-9=127.0.0.1:1,"))
    asked.hang_up()
    told(asked, "ring_changed", ring)
    with asked.client() as client:
        many = client.check([limit.request(f"account:{number}") for number in range(50)])
    assert {one.status for one in many} == {Status.UNDER_LIMIT}
    assert any(one.degraded for one in many)


def test_the_log_level_changes_both_ways(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """What is below the new level is told no more, what is at it is; the line that tells of the change comes at the
    new level."""
    file = tmp_path / "settings.toml"
    file.write_text("log_level = 'info'\n")
    daemon = start_daemon("--config", str(file))
    assert daemon.events("daemon_ready")
    file.write_text("log_level = 'error'\n")
    daemon.process.send_signal(signal.SIGHUP)
    file_of_errors(daemon, file, 1)
    assert daemon.events("settings_read_again") == []
    file.write_text("log_level = 'info'\n")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: daemon.events("settings_read_again"), "the level is back")
    assert daemon.events("settings_read_again")[-1]["changed"] == ["log_level"]


def file_of_errors(daemon: DaemonProcess, file: Path, count: int) -> None:
    """Have the daemon read a file with a mistake, once what was asked before is done, and wait for its line."""
    # A reading may still be under way; a later one comes after it in any case.
    time.sleep(0.3)
    content = file.read_text()
    file.write_text("nonsense")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(daemon.events("reload_failed")) >= count, "the mistake is told")
    file.write_text(content)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("log_level = 'loud'\nfallback = 'deny'\n", id="a bad value"),
        pytest.param("fallback = 'deny'\ngrace = -1\n", id="a bad value that needs a restart"),
        pytest.param("fallback = 'deny'\nfalback = 'deny'\n", id="no such setting"),
        pytest.param("fallback = 'deny'\npeers = '?'\n", id="a bad list"),
        pytest.param("fallback = ", id="no TOML"),
        pytest.param("fallback = " + "[" * 100_000, id="nested"),
        pytest.param(b"\xff", id="no UTF-8"),
        pytest.param(Path.mkdir, id="a folder"),
        pytest.param(Path.unlink, id="no file"),
        pytest.param("pipe", id="a pipe"),
    ],
)
def test_a_mistake_anywhere_changes_nothing(pair: Cluster, content: Any) -> None:
    """One line tells it, and all that the file would have changed is as it was."""
    node = pair.nodes[0]
    write(node, pair)
    before, read = len(node.events("reload_failed")), len(node.events("settings_read_again"))
    if content in (Path.mkdir, Path.unlink, "pipe"):
        node.settings.unlink()
    if content is Path.mkdir:
        node.settings.mkdir()
    elif content == "pipe":
        os.mkfifo(node.settings)
    elif isinstance(content, bytes):
        node.settings.write_bytes(content)
    elif isinstance(content, str):
        node.settings.write_text(content)
    try:
        node.hang_up()
        (event,) = told(node, "reload_failed", before)
    finally:
        if node.settings.is_dir():
            node.settings.rmdir()
        node.settings.unlink(missing_ok=True)
        write(node, pair)
    assert event["level"] == "error"
    assert str(node.settings) in event["reason"]
    assert "\n" not in event["reason"]
    # The old values still hold: read again as they were, nothing has changed.
    node.hang_up()
    (event,) = told(node, "settings_read_again", read)
    assert event["changed"] == []


def test_a_changed_setting_that_needs_a_restart_is_named_and_left(pair: Cluster) -> None:
    """The others of the file change; the line comes again as long as the file differs from what the daemon runs by."""
    node = pair.nodes[0]
    for _ in range(2):
        read, left = len(node.events("settings_read_again")), len(node.events("restart_needed"))
        write(node, pair, max_buckets=7, grace=1, fallback="deny")
        node.hang_up()
        (event,) = told(node, "restart_needed", left)
        assert (event["settings"], event["level"]) == (["max_buckets", "grace"], "warning")
        assert len(node.events("settings_read_again")) == read + 1
    with node.client() as client:
        assert client.info()["max_buckets"] == 1_000_000
    write(node, pair)
    node.hang_up()
    assert told(node, "settings_read_again", read + 1)[-1]["changed"] == ["fallback"]


def test_peers_need_a_restart_where_the_port_is_off(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """A daemon whose gRPC port is off has no cluster to be in: both are named, and it goes on alone."""
    file = tmp_path / "settings.toml"
    file.write_text("listen = 'off'\n")
    daemon = start_daemon("--config", str(file))
    # Anew, with the file alone to say where it listens: an option would win over it.
    daemon.stop()
    where = daemon.options.index("--listen")
    daemon.options = daemon.options[:where] + daemon.options[where + 2 :]
    daemon.start()
    file.write_text("peers = '127.0.0.1:1,127.0.0.1:2'\n")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: daemon.events("restart_needed"), "it is named")
    assert daemon.events("restart_needed")[0]["settings"] == ["peers", "listen"]
    with daemon.client() as client:
        assert client.ping() == "test-node"
        assert client.peers() == {}


def test_a_storm_of_sighups_ends_with_the_last_file_and_costs_no_memory(pair: Cluster) -> None:
    """Thousands of signals from two sides at once, while asked: each reading is whole, the last file counts."""
    node = pair.nodes[0]
    limit = Limit("pair", WIDE, per="1d")
    keys = [key for owner in pair.nodes for key in pair.keys(owner, 20, "pair")]
    write(node, pair)
    over = threading.Event()

    def storm() -> None:
        while not over.is_set():
            node.hang_up()
            time.sleep(0.0005)

    with Load([node], asks(limit, keys), rate=200) as load:
        threads = [threading.Thread(target=storm) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        before = node.memory()
        time.sleep(2)
        over.set()
        for thread in threads:
            thread.join()
        grown = node.memory() - before
    assert [result for result, _, _ in load.results if getattr(result, "error", result)] == []
    assert grown < 4 << 20
    read = len(node.events("settings_read_again"))
    write(node, pair, fallback="allow")
    node.hang_up()
    assert ["fallback"] in [event["changed"] for event in told(node, "settings_read_again", read)]
    write(node, pair)
    node.hang_up()
