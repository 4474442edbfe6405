"""The socket's file: its folder, mode and group, and whose it is."""

from __future__ import annotations

import grp
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar import Limit
from tests.daemons import DaemonProcess, clean_environment
from tests.sockets import Raw

Start = Callable[..., DaemonProcess]


def refused(path: Path | str, *options: str) -> str:
    """What a daemon says that cannot start at `path`: one line, and exit status 2."""
    done = subprocess.run(
        [sys.executable, "-m", "sidecar", "serve", "--socket", str(path), *options],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "Traceback" not in line
    return line


def permissions(path: Path | str) -> int:
    """A file's mode bits."""
    return stat.S_IMODE(os.stat(path).st_mode)


def listening(path: Path) -> socket.socket:
    """A listener of somebody else's."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(5)
    return listener


def test_a_folder_that_is_missing_is_made(start_daemon: Start, short_path: Path) -> None:
    """A missing folder is made with mode 0750 whatever the umask, and those above it too."""
    old = os.umask(0o077)
    try:
        start_daemon(socket=str(short_path / "above" / "made" / "s.sock"))
    finally:
        os.umask(old)
    assert permissions(short_path / "above" / "made") == 0o750


def test_a_folder_that_exists_is_left_as_it_is(start_daemon: Start, short_path: Path) -> None:
    """The mode of a folder that was there before is the operator's."""
    folder = short_path / "theirs"
    folder.mkdir(mode=0o700)
    start_daemon(socket=str(folder / "s.sock"))
    assert permissions(folder) == 0o700


def test_the_default_mode(start_daemon: Start) -> None:
    """The socket's file has mode 0660 whatever the umask."""
    old = os.umask(0o177)
    try:
        daemon = start_daemon()
    finally:
        os.umask(old)
    assert permissions(daemon.socket) == 0o660


@pytest.mark.parametrize("mode", ["0600", "0666", "0o640", "660"])
def test_a_mode_of_choice(start_daemon: Start, mode: str) -> None:
    """--socket-mode sets the file's permission bits."""
    assert permissions(start_daemon("--socket-mode", mode).socket) == int(mode.removeprefix("0o"), 8)


def test_a_group_of_choice(start_daemon: Start, short_path: Path) -> None:
    """--socket-group sets the group of the file and of a folder that is made, by number and by name."""
    # Only root may give a file to any group; everybody may give it to a group of their own.
    mine = {*os.getgroups(), os.getgid()}
    named = [group for group in grp.getgrall() if group.gr_gid in mine or os.getuid() == 0]
    other = next((group for group in named if group.gr_gid != os.getgid()), None) or named[0]
    by_number = start_daemon("--socket-group", str(other.gr_gid), socket=str(short_path / "n" / "s.sock"))
    by_name = start_daemon("--socket-group", other.gr_name, socket=str(short_path / "m" / "s.sock"))
    for daemon in (by_number, by_name):
        assert os.stat(daemon.socket).st_gid == other.gr_gid
        assert os.stat(Path(daemon.socket).parent).st_gid == other.gr_gid


def test_an_unknown_group(short_path: Path) -> None:
    """A group that does not exist stops the daemon with a line that names it."""
    assert "no-such-group" in refused(short_path / "s.sock", "--socket-group", "no-such-group")
    assert not (short_path / "s.sock").exists()


def test_a_stale_socket_is_replaced(daemon: DaemonProcess) -> None:
    """The file that a killed daemon left behind does not stop the next one."""
    daemon.stop(signal.SIGKILL)
    assert stat.S_ISSOCK(os.stat(daemon.socket).st_mode)
    daemon.start()
    with daemon.client() as client:
        assert client.ping() == "test-node"


def test_a_live_daemon_keeps_its_socket(daemon: DaemonProcess) -> None:
    """A second daemon at the same path exits 2 and says why; the first one goes on undisturbed."""
    limit = Limit("socketfile", 10, per="1d")
    inode = os.stat(daemon.socket).st_ino
    with daemon.client() as client:
        assert client.hit(limit, "kept").remaining == 9
        line = refused(daemon.socket)
        assert "socket_unavailable" in line
        assert daemon.socket in line
        assert "another daemon" in line
        assert client.hit(limit, "kept").remaining == 8
    with daemon.client() as new_client:
        assert new_client.hit(limit, "kept").remaining == 7
    assert os.stat(daemon.socket).st_ino == inode


def test_a_live_daemon_keeps_its_socket_without_its_lock(daemon: DaemonProcess) -> None:
    """Even when the lock file was deleted a live daemon's socket is not stolen."""
    for path in Path(daemon.socket).parent.glob("*.lock"):
        path.unlink()
    assert daemon.socket in refused(daemon.socket)
    with daemon.client() as client:
        assert client.ping() == "test-node"


def test_somebody_elses_listener_is_left_alone(short_path: Path) -> None:
    """A socket on which another program listens is not taken from it."""
    path = short_path / "s.sock"
    with listening(path) as listener:
        assert "listens" in refused(path)
        with Raw(str(path)):
            listener.settimeout(30)
            listener.accept()  # the probe's connection, if it asked first
    assert stat.S_ISSOCK(os.stat(path).st_mode)


def test_a_listener_with_a_full_backlog_is_left_alone(short_path: Path) -> None:
    """A program too busy to accept still owns its socket."""
    path = short_path / "s.sock"
    with listening(path) as listener:
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(5)]
        try:
            for client in waiting:
                client.setblocking(False)
                try:
                    client.connect(str(path))
                except BlockingIOError:
                    break
            else:
                pytest.fail("the backlog never filled")
            assert "listens" in refused(path)
        finally:
            for client in waiting:
                client.close()
    assert stat.S_ISSOCK(os.stat(path).st_mode)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_alone(short_path: Path, kind: str) -> None:
    """A regular file, a folder or a link at the path is not touched."""
    path = short_path / "s.sock"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        (short_path / "target").write_text("precious")
        path.symlink_to(short_path / "target")
    assert "left alone" in refused(path)
    if kind == "folder":
        assert path.is_dir()
    else:
        assert path.read_text() == "precious"
    # Nothing half-made lies about but the lock, which stays for the next try.
    assert {name.name for name in short_path.iterdir()} <= {"s.sock", "s.sock.lock", "target"}


def test_the_file_is_removed_at_exit(daemon: DaemonProcess) -> None:
    """A daemon that stops takes its socket's file with it."""
    assert daemon.stop() == 0
    assert not os.path.lexists(daemon.socket)


def test_a_file_put_in_its_place_is_not_removed_at_exit(daemon: DaemonProcess) -> None:
    """A file that replaced ours meanwhile is somebody's, and stays."""
    path = Path(daemon.socket)
    path.unlink()
    path.write_text("precious")
    assert daemon.stop() == 0
    assert path.read_text() == "precious"


def test_a_socket_put_in_its_place_is_not_removed_at_exit(daemon: DaemonProcess) -> None:
    """A socket that replaced ours meanwhile stays as well, and still takes connections."""
    path = Path(daemon.socket)
    path.unlink()
    with listening(path):
        assert daemon.stop() == 0
        with Raw(str(path)):
            pass


def test_a_file_that_vanished(daemon: DaemonProcess) -> None:
    """A socket deleted under a running daemon does not trouble its clients or its exit."""
    with daemon.client() as client:
        assert client.ping() == "test-node"
        os.unlink(daemon.socket)
        assert client.ping() == "test-node"
    assert daemon.stop() == 0


def test_a_path_that_is_too_long(short_path: Path) -> None:
    """A path longer than a Unix socket's may be is refused with the bound; the longest one possible works."""
    path = short_path / ("x" * (108 - len(os.fsencode(short_path)) - 1))
    assert len(os.fsencode(path)) == 108
    assert "107" in refused(path)


def test_the_longest_path(start_daemon: Start, short_path: Path) -> None:
    """A path of 107 bytes is served."""
    path = short_path / ("x" * (107 - len(os.fsencode(short_path)) - 1))
    assert len(os.fsencode(path)) == 107
    with start_daemon(socket=str(path)).client() as client:
        assert client.ping() == "test-node"


def test_a_folder_that_cannot_be_made(short_path: Path) -> None:
    """A folder that cannot be made stops the daemon with a line that names the path (also for root)."""
    (short_path / "file").write_text("")
    line = refused(short_path / "file" / "below" / "s.sock")
    assert "socket_unavailable" in line
    assert str(short_path / "file") in line


def test_a_folder_that_is_a_file(short_path: Path) -> None:
    """A file where the folder should be stops the daemon with a line that names the path."""
    (short_path / "file").write_text("")
    assert str(short_path / "file") in refused(short_path / "file" / "s.sock")


def test_a_folder_that_everybody_can_write(start_daemon: Start, short_path: Path) -> None:
    """A world-writable folder is refused, since anyone could replace the socket; with the sticky bit it is taken."""
    folder = short_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    line = refused(folder / "s.sock")
    assert "everyone" in line
    assert str(folder) in line
    assert list(folder.iterdir()) == []
    folder.chmod(0o1777)
    start_daemon(socket=str(folder / "s.sock"))
