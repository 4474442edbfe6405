"""Under a service manager: what it is told, and a socket that it passes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar import Client, Limit
from sidecar.activation import passed_socket
from sidecar.config import Config
from sidecar.notify import Manager
from sidecar.socketfile import SocketUnavailable
from tests.authority import Authority, Mount
from tests.clusters import free_port
from tests.daemons import DaemonProcess, clean_environment, wait_until
from tests.sockets import Raw, leave_unread, packed

ROOT = Path(__file__).parent.parent
UNITS = ROOT / "deploy" / "systemd"
LIMIT = Limit("managed", 100, per="1h")


class Listener:
    """A manager's end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(20)

    def next(self) -> dict[str, str]:
        """The next message's assignments."""
        return dict(line.split("=", 1) for line in self.socket.recv(4096).decode().split("\n"))

    def next_but(self, name: str) -> dict[str, str]:
        """The next message that does not assign `name`."""
        while name in (message := self.next()):
            pass
        return message

    def drain(self) -> int:
        """How many messages wait."""
        self.socket.setblocking(False)
        count = 0
        try:
            while self.socket.recv(4096):
                count += 1
        except BlockingIOError:
            self.socket.settimeout(20)
        return count


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as sockets need."""
    path = Path(tempfile.mkdtemp(prefix="sg-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Listener, str]]:
    """A listening manager, and its NOTIFY_SOCKET."""
    name = str(folder / "notify")
    there = Listener(name if request.param == "path" else "\0" + name)
    yield there, name if request.param == "path" else "@" + name
    there.socket.close()


def test_a_daemon_tells_its_manager_what_it_does(
    listener: tuple[Listener, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ready when it answers; reloading and ready again at SIGHUP, also where the new settings are bad; stopping."""
    manager, address = listener
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    settings = folder / "settings.toml"
    settings.write_text("")
    daemon = DaemonProcess(folder, "--config", str(settings))
    try:
        assert manager.next() == {"READY": "1", "STATUS": "answering requests"}
        for content in ("log_level = 'debug'", "no_such = 1"):
            settings.write_text(content)
            before = time.monotonic_ns() // 1000
            daemon.process.send_signal(signal.SIGHUP)
            reloading = manager.next()
            assert reloading["RELOADING"] == "1"
            assert before <= int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
            assert manager.next()["READY"] == "1"
        assert daemon.stop() == 0
        assert manager.next()["STOPPING"] == "1"
        assert manager.drain() == 0
    finally:
        daemon.kill()


def test_the_watchdog_hears_from_a_daemon_only_while_it_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice within the watchdog's time; nothing while the daemon is stopped; again when it goes on."""
    manager = Listener(str(folder / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(folder / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    daemon = DaemonProcess(folder)
    try:
        assert manager.next_but("WATCHDOG")["READY"] == "1"
        began = time.monotonic()
        for _ in range(10):
            assert manager.next() == {"WATCHDOG": "1"}
        assert time.monotonic() - began > 0.8
        daemon.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: "T" in Path(f"/proc/{daemon.process.pid}/stat").read_text().split(")")[1][:3], "it stops")
        manager.drain()
        time.sleep(0.6)
        assert manager.drain() == 0
        daemon.process.send_signal(signal.SIGCONT)
        assert manager.next() == {"WATCHDOG": "1"}
    finally:
        daemon.kill()
        manager.socket.close()


def test_the_watchdog_hears_from_a_daemon_that_drains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads nothing holds the end up for longer than the watchdog waits: that is no daemon that hangs."""
    manager = Listener(str(folder / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(folder / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    daemon = DaemonProcess(folder, "--grace", "60000")
    try:
        with Raw(daemon.socket) as deaf:
            leave_unread(deaf)
            daemon.process.send_signal(signal.SIGTERM)
            while "STOPPING" not in manager.next():
                pass
            for _ in range(5):
                assert manager.next() == {"WATCHDOG": "1"}
            assert daemon.process.poll() is None
        assert daemon.process.wait(20) == 0
    finally:
        daemon.kill()
        manager.socket.close()


def test_a_manager_that_is_behind_hears_all_that_is_still_true(folder: Path) -> None:
    """Its queue is full: one warning, and what it was to be told comes in order once it reads, but no old heartbeat."""
    manager = Listener(str(folder / "notify"))
    told: list[str] = []
    ours = Manager({"NOTIFY_SOCKET": str(folder / "notify")}, lambda event, reason: told.append(f"{event}: {reason}"))
    count = 0
    while not told:
        ours.alive()
        count += 1
        assert count < 100_000, "the queue never fills"
    ours.ready("serving")
    ours.reloading()
    ours.alive()
    ours.ready("serving")
    ours.stopping()
    ours.try_again()
    assert manager.drain() == count - 1
    ours.try_again()
    assert [next(iter(manager.next())) for _ in range(4)] == ["READY", "RELOADING", "READY", "STOPPING"]
    assert manager.drain() == 0
    ours.try_again()
    assert manager.drain() == 0
    assert told == ["notify_failed: Resource temporarily unavailable"]
    manager.socket.close()


@pytest.mark.parametrize("interval", ["0", "-1", "soon", "1.5", "9" * 5000])
def test_a_watchdog_that_cannot_be_is_a_warning(interval: str) -> None:
    """WATCHDOG_USEC that is no number of microseconds: one line that names it, and no heartbeat."""
    told: list[str] = []
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": interval}
    assert Manager(environ, lambda event, reason: told.append(f"{event}: {reason}")).watchdog == 0
    assert told == [f"notify_failed: WATCHDOG_USEC is no number of microseconds: {interval[:20]!r}"]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("/" + "long" * 30, "AF_UNIX path too long"),
        ("@nobody listens to this name", "Connection refused"),
        ("/nowhere/at/all", "No such file or directory"),
        ("relative", "NOTIFY_SOCKET is no path and no abstract name: 'relative'"),
    ],
)
def test_a_manager_that_cannot_be_told_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, address: str, why: str
) -> None:
    """One line, and requests are answered."""
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    daemon = DaemonProcess(folder)
    try:
        with daemon.client() as client:
            assert client.hit(LIMIT, "k").remaining == 99
        assert daemon.stop() == 0
        lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
        assert [line["reason"] for line in lines if line["event"] == "notify_failed"] == [why]
    finally:
        daemon.kill()


def test_no_child_speaks_for_the_daemon_and_anothers_watchdog_is_not_fed() -> None:
    """The variables are gone once read; a WATCHDOG_PID of another process means that no one waits for this one."""
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1", "HOME": "/"}
    assert Manager(environ, print).watchdog == 0
    assert environ == {"HOME": "/"}
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}
    assert Manager(environ, print).watchdog == 0.5
    assert Manager({"WATCHDOG_USEC": "1000000"}, print).watchdog == 0


# --- Socket activation

PARENT = """
import os, sys
descriptor = int(sys.argv[1])
if descriptor != 3:
    os.dup2(descriptor, 3)
os.set_inheritable(3, True)
os.environ["LISTEN_PID"] = str(os.getpid()) if sys.argv[2] == "mine" else sys.argv[2]
os.environ["LISTEN_FDS"] = sys.argv[3]
os.environ["LISTEN_FDNAMES"] = "sidegate.socket:grpc"
os.execv(sys.executable, [sys.executable, "-m", "sidecar", "serve", *sys.argv[4:]])
"""


def start_with(descriptor: int, folder: Path, pid: str = "mine", count: str = "1") -> subprocess.Popen[str]:
    """A daemon that is passed this descriptor, as systemd does."""
    words = ["--socket", str(folder / "own.sock"), "--listen", "off", "--http", "off", "--grace", "500"]
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(descriptor), pid, count, *words],
        pass_fds=[descriptor],
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )


@pytest.fixture
def listening(folder: Path) -> Iterator[socket.socket]:
    """A manager's listening Unix socket at folder/managed.sock."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "managed.sock"))
        sock.listen(64)
        yield sock


def end(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """SIGTERM; the log."""
    process.terminate()
    _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    return [json.loads(line) for line in log.splitlines()]


def test_a_passed_socket_is_served_and_outlives_the_daemon(listening: socket.socket, folder: Path) -> None:
    """Clients that ask before there is a daemon are answered; the file outlives the daemon, and no other is made."""
    path = str(folder / "managed.sock")
    early = [Raw(path) for _ in range(20)]
    for raw in early:
        raw.send(packed(1, 7, 1, [["managed", "k", 1, 100, 3_600_000]]))
    before = (folder / "managed.sock").stat()
    daemon = start_with(listening.fileno(), folder)
    for raw in early:
        _version, number, outcome, (decision,), _node = raw.answer()
        assert (number, outcome, decision[0]) == (7, 0, 0)
        raw.close()
    with Client(path, timeout=30) as late:
        assert late.hit(LIMIT, "k").remaining == 79
    log = end(daemon)
    after = (folder / "managed.sock").stat()
    kept = [(found.st_ino, found.st_mode, found.st_uid, found.st_gid) for found in (before, after)]
    assert kept[0] == kept[1]
    assert [line["socket"] for line in log if line["event"] == "daemon_ready"] == [path]
    assert (folder / "managed.sock").exists()
    assert not (folder / "own.sock").exists()


def test_restarts_lose_no_connection_attempt(listening: socket.socket, folder: Path) -> None:
    """While the daemon is restarted three times, six clients that come anew for each hit all get their answers."""
    path = str(folder / "managed.sock")
    daemon = start_with(listening.fileno(), folder)
    over = threading.Event()
    allowed = 0
    failed: list[Exception] = []

    def ask() -> None:
        nonlocal allowed
        while not over.is_set():
            try:
                with Client(path, timeout=30) as client:
                    allowed += client.hit(Limit("again", 1_000_000, per="1h"), "k").allowed
            except Exception as error:
                failed.append(error)
                return
            time.sleep(0.0005)

    asking = [threading.Thread(target=ask) for _ in range(6)]
    for thread in asking:
        thread.start()
    try:
        for _ in range(3):
            before = allowed
            wait_until(lambda before=before: allowed > before + 200 or failed, "some hits")  # type: ignore[misc]
            end(daemon)
            daemon = start_with(listening.fileno(), folder)
        before = allowed
        wait_until(lambda: allowed > before + 10 or failed, "hits after the last restart")
    finally:
        over.set()
        for thread in asking:
            thread.join(40)
        end(daemon)
    assert failed == []


def stream() -> socket.socket:
    """A TCP socket that listens."""
    return socket.create_server(("127.0.0.1", 0))


def datagram() -> socket.socket:
    """A Unix datagram socket."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def silent() -> socket.socket:
    """A Unix stream socket that does not listen."""
    return socket.socket(socket.AF_UNIX)


@pytest.mark.parametrize(
    ("make", "count", "why"),
    [
        (stream, "1", "AF_INET SOCK_STREAM; it must be a Unix stream socket"),
        (datagram, "1", "AF_UNIX SOCK_DGRAM; it must be a Unix stream socket"),
        (silent, "1", "does not listen"),
        (silent, "2", "2 sockets were passed (sidegate.socket:grpc); the daemon takes one, a Unix stream socket"),
        (silent, "9" * 5000, "9" * 20 + " sockets were passed"),
        (silent, "-1", "LISTEN_FDS is no number: '-1'"),
        (silent, "some", "LISTEN_FDS is no number: 'some'"),
        (lambda: open(os.devnull), "1", "is no socket"),  # noqa: SIM115
    ],
)
def test_what_cannot_be_served_on_ends_the_daemon(make: Callable[[], Any], count: str, why: str, folder: Path) -> None:
    """Status 2 and one line that tells what was passed."""
    with make() as passed:
        daemon = start_with(passed.fileno(), folder, count=count)
        _, log = daemon.communicate(timeout=20)
    assert daemon.returncode == 2
    (line,) = [json.loads(line) for line in log.splitlines()]
    assert line["event"] == "socket_unavailable"
    assert why in line["reason"]


def test_a_socket_for_another_process_is_not_taken(listening: socket.socket, folder: Path) -> None:
    """LISTEN_PID of another process: the daemon says so and makes its own socket."""
    daemon = start_with(listening.fileno(), folder, pid="1")
    wait_until((folder / "own.sock").exists, "its own socket")
    pid = daemon.pid
    reasons = [line["reason"] for line in end(daemon) if line["event"] == "passed_socket_ignored"]
    assert reasons == [f"LISTEN_PID is '1', and this process is {pid}"]
    assert not (folder / "own.sock").exists()


def test_a_passed_socket_may_have_an_abstract_name(folder: Path) -> None:
    """A name that is no file: served, and told as people write it."""
    name = f"{folder}/abstract"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("\0" + name)
        sock.listen(64)
        daemon = start_with(sock.fileno(), folder)
        with Raw("\0" + name) as raw:
            raw.send(packed(1, 7, 1, [["managed", "k", 1, 100, 3_600_000]]))
            assert raw.answer()[2] == 0
        assert [line["socket"] for line in end(daemon) if line["event"] == "daemon_ready"] == ["@" + name]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, []),
        ({"LISTEN_FDNAMES": "x"}, []),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "0"}, []),
        ({"LISTEN_PID": "8", "LISTEN_FDS": "1"}, ["LISTEN_PID is '8', and this process is 7"]),
        ({"LISTEN_FDS": "1"}, ["LISTEN_PID is '', and this process is 7"]),
    ],
)
def test_nothing_passed_is_nothing(environ: dict[str, str], told: list[str]) -> None:
    """No variables, none counted, or another's, which is told: None, and the variables are gone."""
    heard: list[str] = []
    assert passed_socket(environ, 7, lambda event, reason: heard.append(reason)) is None
    assert (heard, environ) == (told, {})


def test_a_count_that_is_missing_is_a_fault() -> None:
    """LISTEN_PID without LISTEN_FDS."""
    with pytest.raises(SocketUnavailable, match="LISTEN_FDS is no number: ''"):
        passed_socket({"LISTEN_PID": "7"}, 7, print)


# --- Units


@pytest.fixture
def analyze() -> str:
    """The path of systemd-analyze; where there is none, the test is left out, and says what it leaves open."""
    found = shutil.which("systemd-analyze")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("systemd-analyze is missing, which .ci/run installs")
        pytest.skip("NOT TESTED: systemd-analyze is not on this machine, so the units were not looked at")
    return found


def assigned(name: str) -> list[str]:
    """What the service's unit assigns to `name`, line by line."""
    lines = (UNITS / "sidegate.service").read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(name + "=")]


def test_the_units_are_ones_that_systemd_takes(analyze: str, folder: Path) -> None:
    """`systemd-analyze verify` finds no fault, with the daemon where this test's own stands."""
    program = folder / "sidegate"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for name in ("sidegate.service", "sidegate.socket"):
        unit = (UNITS / name).read_text()
        (folder / name).write_text(unit.replace("/opt/sidegate/bin/sidegate", str(program)))
    found = subprocess.run(
        [analyze, "verify", str(folder / "sidegate.service"), str(folder / "sidegate.socket")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_the_unit_is_as_closed_as_the_docs_say(analyze: str) -> None:
    """`systemd-analyze security` rates its exposure as docs/systemd.md tells, or better."""
    told = re.search(r"an exposure of (\d)\.(\d)", (ROOT / "docs" / "systemd.md").read_text())
    assert told
    words = [analyze, "security", "--offline=true", f"--threshold={told[1]}{told[2]}", str(UNITS / "sidegate.service")]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if "unrecognized option" in found.stderr:
        pytest.skip("NOT TESTED: this systemd-analyze rates no file, so the unit's exposure was not looked at")
    assert found.returncode == 0, found.stdout[-200:] + found.stderr


def test_the_unit_has_descriptors_for_every_door() -> None:
    """As many as the daemon asks for with its default settings: the socket, gRPC and HTTP, links, and some to spare."""
    (limit,) = assigned("LimitNOFILE")
    assert int(limit) >= 3 * Config().max_connections + 4_000 + 64


def calls_let_through(analyze: str) -> set[str]:
    """The system calls that the unit's filters leave a daemon."""

    def members(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        words = [analyze, "syscall-filter", name]
        listed = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n")[1:]
        names = [line.strip() for line in listed if line.strip() and not line.strip().startswith("#")]
        return set().union(*map(members, names))

    calls = members("@default")
    for line in assigned("SystemCallFilter"):
        for word in line.removeprefix("~").split():
            calls = calls - members(word) if line.startswith("~") else calls | members(word)
    return calls


@pytest.mark.parametrize("tls", ["plain", "tls"])
def test_the_unit_leaves_the_daemon_what_it_needs(analyze: str, folder: Path, tls: str) -> None:
    """A daemon with every door, a peer and a socket's group, from its start over SIGHUP to its end: no system call, no
    kind of socket and no mapping of memory that the unit would refuse."""
    strace = shutil.which("strace")
    if strace is None and os.environ.get("CI"):
        pytest.fail("strace is missing, which .ci/run installs")
    if (
        strace is None
        or subprocess.run([strace, "-o", os.devnull, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("NOT TESTED: nothing can be traced here, so the unit's filters were not tried on the daemon")
    settings = folder / "settings.toml"
    settings.write_text("")
    trace = folder / "trace"
    own, other = free_port(), free_port()
    words = [sys.executable, "-m", "sidecar", "serve", "--config", str(settings), "--socket", str(folder / "s")]
    words += ["--listen", f"127.0.0.1:{own}", "--peers", f"127.0.0.1:{own},127.0.0.1:{other}"]
    words += ["--http", f"unix:{folder}/h", "--socket-group", str(os.getgid())]
    if tls == "tls":
        authority = Authority()
        mount = Mount(folder / "tls")
        mount.write([authority], authority.issue())
        words += mount.options
    notify = Listener(str(folder / "notify"))
    environ = clean_environment(NOTIFY_SOCKET=str(folder / "notify"))
    with (folder / "log").open("w") as log:
        traced = subprocess.Popen(
            [strace, "-f", "-qq", "-o", str(trace), *words], stderr=log, env=environ, start_new_session=True
        )
    try:
        assert notify.next()["READY"] == "1"
        with Client(str(folder / "s"), timeout=30) as client:
            pid = client.info()["pid"]
            client.check([LIMIT.request(f"key {number}") for number in range(20)])
        os.kill(pid, signal.SIGHUP)
        assert "RELOADING" in notify.next()
        assert "READY" in notify.next()
        os.kill(pid, signal.SIGTERM)
        assert traced.wait(60) == 0, (folder / "log").read_text()
    finally:
        if traced.poll() is None:
            os.killpg(traced.pid, signal.SIGKILL)
            traced.wait()
        notify.socket.close()
    text = trace.read_text()
    made = set(re.findall(r"^\d+ +(\w+)\(", text, re.MULTILINE))
    assert {"chown", "openat", "sendto", "connect"} <= made, "the trace lacks what the daemon surely did"
    assert made - calls_let_through(analyze) == set()
    (families,) = assigned("RestrictAddressFamilies")
    assert set(re.findall(r"socket\((AF_\w+)", text)) <= set(families.split())
    assert assigned("MemoryDenyWriteExecute") == ["yes"]
    assert re.findall(r"(?:mmap|mprotect)\(.*PROT_WRITE\|PROT_EXEC.*", text) == []


def test_the_unit_and_the_daemon_agree() -> None:
    """The socket unit's path is where clients look first, and the environment file names settings that there are."""
    from sidecar.address import SOCKET_NAME, SYSTEM_FOLDER
    from sidecar.config import load

    unit = (UNITS / "sidegate.socket").read_text()
    assert f"ListenStream={SYSTEM_FOLDER}/{SOCKET_NAME}" in unit
    lines = (UNITS / "sidegate.env").read_text().splitlines()
    named = dict(line.lstrip("#").split("=", 1) for line in lines if "SIDEGATE_" in line)
    named.pop("SIDEGATE_CONFIG")
    config, _ = load({}, named)
    assert config.listen == "10.0.0.1:1051"
