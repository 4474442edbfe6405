"""Faults that were found by trying to break Sidegate as a user would, and must not come back."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar import Client, DaemonUnreachable, InvalidRequest, Limit, RateLimit
from sidecar.socketfile import SocketFile, SocketUnavailable
from tests.daemons import EPOCH, DaemonProcess, clean_environment
from tests.sockets import Raw, packed

LIMIT = Limit("hardening", 10, per="1s")


def command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """One run of the command, as a shell would start it."""
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *words],
        env=clean_environment(),
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def test_a_refused_connection_leaves_the_others_in_use(start_daemon: Callable[..., DaemonProcess]) -> None:
    """A daemon that takes no further connection is not one that is away: those that are open go on being used."""
    daemon = start_daemon("--max-connections", "1")
    end = time.monotonic() + 10
    while True:
        with Client(daemon.socket, timeout=5) as good:
            try:
                good.ping()
            except DaemonUnreachable:  # the start's own connection is still there
                assert time.monotonic() < end
                continue
            pool = good._open()
            held = pool._take(time.monotonic() + 5)
            with pytest.raises(DaemonUnreachable, match="too many connections"):
                good.ping()  # needs a second connection
            pool._give(held)
            assert good.ping() == "test-node"
            return


def test_a_frame_too_long_fails_alone(start_daemon: Callable[..., DaemonProcess]) -> None:
    """A batch longer than the daemon takes is refused by itself; the next call is asked as ever."""
    daemon = start_daemon("--max-frame", "2048")
    with daemon.client() as client:
        with pytest.raises(DaemonUnreachable, match="longer than 2048"):
            client.check([LIMIT.request(f"key {number}") for number in range(100)])
        assert client.hit(LIMIT, "key").remaining == 9


def test_a_clock_set_back_finds_its_buckets(daemon: DaemonProcess) -> None:
    """With a manual clock nothing is forgotten by real time: going back gives the same answer, however late."""
    with daemon.client() as client:
        client.hit(LIMIT, "back", 3)
        client.advance_clock(60_000)
        time.sleep(0.5)
        client.set_clock(EPOCH + 500)
        assert client.peek(LIMIT, "back").remaining == 7
        assert client.info()["counters"]["ended"] == 0


@pytest.mark.parametrize("words", [["hit", "a", "k", "--limit", "5", "--per", "1h"], ["info"]], ids=["hit", "info"])
def test_output_that_cannot_be_written_is_an_error(daemon: DaemonProcess, words: list[str]) -> None:
    """A full disk under the output never reads as "refused"."""
    with Path("/dev/full").open("w") as full:
        done = command(*words, "--socket", daemon.socket, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_daemon_without_standard_error(short_path: Path) -> None:
    """A supervisor may close standard error: the daemon serves without a log."""
    path = short_path / "sidegate.sock"
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$0" -m sidecar serve --socket "$1" 2>&-', sys.executable, str(path)],
        env=clean_environment(),
    )
    try:
        end = time.monotonic() + 20
        while not path.exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        with Client(path, timeout=5) as client:
            assert client.ping()
    finally:
        process.terminate()
    assert process.wait(20) == 0


def test_the_temp_folder_must_be_ones_own(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the temp directory anyone can make a folder of that name: client and daemon trust only the user's own."""
    theirs = short_path / "theirs"
    theirs.mkdir(mode=0o750)
    folder = short_path / f"sidegate-{os.getuid()}"
    folder.symlink_to(theirs)
    monkeypatch.setattr("sidecar.client.socket_path", lambda: str(folder / "sidegate.sock"))
    with pytest.raises(DaemonUnreachable, match="belongs to another user"):
        Client().ping()
    with pytest.raises(SocketUnavailable, match="belongs to another user"):
        SocketFile(str(folder / "sidegate.sock"), 0o660, "", 1)


def test_a_file_in_the_way_is_left_alone(short_path: Path) -> None:
    """The name that a socket has while it is made never costs anyone a file."""
    other = short_path / f".sg{os.getpid()}"
    other.write_text("mine")
    with pytest.raises(SocketUnavailable):
        SocketFile(str(short_path / "sidegate.sock"), 0o660, "", 1)
    assert other.read_text() == "mine"


def test_what_is_no_socket_gets_no_lock_beside_it(short_path: Path) -> None:
    """A path that is refused leaves nothing behind."""
    path = short_path / "sidegate.sock"
    path.write_text("mine")
    with pytest.raises(SocketUnavailable, match="is no socket"):
        SocketFile(str(path), 0o660, "", 1)
    assert [entry.name for entry in short_path.iterdir()] == ["sidegate.sock"]


@pytest.mark.parametrize("group", ["99999999999999", "4294967295"])
def test_a_groups_number_has_bounds(short_path: Path, group: str) -> None:
    """A number that is no group's is refused in words."""
    with pytest.raises(SocketUnavailable, match="socket_group"):
        SocketFile(str(short_path / "sidegate.sock"), 0o660, group, 1)


def test_a_group_given_later_can_pass_the_folder(short_path: Path) -> None:
    """A folder that an earlier run made gets the group that is asked for now."""
    group = next((one for one in os.getgroups() if one != os.getegid()), 1234 if os.geteuid() == 0 else os.getegid())
    path = short_path / "made" / "sidegate.sock"
    for asked in ("", str(group)):
        made = SocketFile(str(path), 0o660, asked, 1)
        made.remove()
        made.release()
    assert path.parent.stat().st_gid == group


def test_sighup_does_not_end_a_daemon(daemon: DaemonProcess) -> None:
    """A daemon whose terminal closes goes on serving."""
    daemon.process.send_signal(1)
    with daemon.client() as client:
        assert client.hit(LIMIT, "hup").allowed


class Safe(str):
    """As templates make them."""


class Key(enum.StrEnum):
    """As applications name keys."""

    ACCOUNT = "account:1"


def test_a_key_may_be_of_a_class_of_strings(daemon: DaemonProcess) -> None:
    """Subclasses of str are the text that they hold."""
    with daemon.client() as client:
        assert client.hit(LIMIT, Safe("account:1")).remaining == 9
        assert client.hit(LIMIT, Key.ACCOUNT).remaining == 8
        assert client.hit(LIMIT, "account:1").remaining == 7


CALLS: dict[str, Callable[[Any], object]] = {
    "hits as text": lambda client: client.hit(LIMIT, "k", hits="2"),
    "hits as None": lambda client: client.hit(LIMIT, "k", hits=None),
    "a refund as text": lambda client: client.refund(LIMIT, "k", "1"),
    "a limit's name": lambda client: client.hit("name", "k"),
    "a number to reset": lambda client: client.reset(5, "k"),
    "a limit to check": lambda client: client.check([LIMIT]),
    "a tuple to check": lambda client: client.check([("a", "b", 1, 1, 1)]),
    "nothing to check": lambda client: client.check(None),
    "one request to check": lambda client: client.check(RateLimit("a", "b", 1, 1, 1)),
    "no behavior": lambda client: Limit("x", 10, "calendar day", behavior=None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_wrong_types_are_invalid_requests(call: Callable[[Any], object]) -> None:
    """A mistake of the caller raises InvalidRequest and nothing else, before anything is sent."""
    with pytest.raises(InvalidRequest):
        call(Client("/nowhere/at/all.sock"))


def test_odd_maps_in_a_payload_are_only_ignored(daemon: DaemonProcess) -> None:
    """The payload of a ping may be anything, a map with numbers for keys too."""
    with Raw(daemon.socket) as raw:
        raw.send(packed(1, 7, 3, {1: 2, None: [3]}))
        assert raw.answer()[1:3] == [7, 0]
