"""Who owns the socket's file: one daemon at a path, and never a stolen or a forgotten file.

Decides by a lock file beside the socket, held for the daemon's life.  Whoever holds the lock may replace a
file that no one listens on; a socket that answers is left alone even then.  Knows no protocol and no loop.
"""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import stat

from sidecar.address import foreign

_MAX_GROUP = 2**32 - 2
_MAX_PATH = 107
"""Bytes of a Unix socket's path on Linux, less the final zero."""


class SocketUnavailable(Exception):
    """The socket cannot be made; the text says why and what to change."""


class SocketFile:
    """A bound, listening Unix socket at `path`.

    mode: the file's permission bits.  group: a group's name or number for the file, and for its folder if
    that is made here (0750); "" leaves the process's own.  Raises SocketUnavailable.
    """

    def __init__(self, path: str, mode: int, group: str, backlog: int) -> None:
        self.path = path
        # Made under another name in the same folder and moved into place, see _listen.
        self.temporary = os.path.join(os.path.dirname(path) or ".", f".sg{os.getpid()}")
        if max(len(os.fsencode(path)), len(os.fsencode(self.temporary))) > _MAX_PATH:
            raise SocketUnavailable(f"{path} has more than {_MAX_PATH} bytes, the most a Unix socket's path may have")
        self._mode = mode
        self._gid = gid = _group_id(group)
        try:
            _make_folder(os.path.dirname(path) or ".", gid)
            _check_kind(path)
            self._lock = _lock(path + ".lock")
            try:
                _check_replaceable(path)
                self.socket = self._listen(mode, gid, backlog)
            except BaseException:
                os.close(self._lock)
                raise
            self._identity = _identity(path)
        except OSError as error:
            raise SocketUnavailable(f"cannot make {error.filename or path}: {error.strerror or error}") from error

    def _listen(self, mode: int, gid: int, backlog: int) -> socket.socket:
        # Made under another name and moved into place when it listens with the right mode: no client ever
        # finds a socket that refuses it, and nobody connects before the mode is set.
        temporary = self.temporary
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if os.path.lexists(temporary) and stat.S_ISSOCK(os.lstat(temporary).st_mode):
                os.unlink(temporary)
            listener.bind(temporary)
            try:
                if gid >= 0:
                    os.chown(temporary, -1, gid)
                os.chmod(temporary, mode)
                listener.listen(backlog)
                listener.setblocking(False)
                os.rename(temporary, self.path)
            except BaseException:
                os.unlink(temporary)
                raise
        except BaseException:
            listener.close()
            raise
        return listener

    def give_way(self) -> None:
        """Put the socket that a library has made at `temporary` in the place of this one, which is closed.

        For libraries that take no listener: theirs has the mode and the group too before anyone finds it.
        Raises SocketUnavailable.
        """
        try:
            if self._gid >= 0:
                os.chown(self.temporary, -1, self._gid)
            os.chmod(self.temporary, self._mode)
            os.rename(self.temporary, self.path)
            self._identity = _identity(self.path)
        except OSError as error:
            raise SocketUnavailable(f"cannot make {self.path}: {error.strerror or error}") from error
        self.socket.close()

    def remove(self) -> None:
        """Unlink the file if it is still the one made here.  The lock stays until `release`."""
        try:
            if _identity(self.path) == self._identity:
                os.unlink(self.path)
        except OSError:
            pass  # gone already, or no longer ours to touch

    def release(self) -> None:
        """Close the socket and give up the path."""
        self.socket.close()
        os.close(self._lock)


def _make_folder(folder: str, gid: int) -> None:
    try:
        os.makedirs(os.path.dirname(folder) or ".", exist_ok=True)
        os.mkdir(folder, 0o750)
    except FileExistsError:
        found = os.stat(folder)
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise SocketUnavailable(f"{folder} can be written by everyone; anyone could replace the socket") from None
        why = foreign(folder)
        if why:
            raise SocketUnavailable(why) from None
        # A folder like those made here, and the group asked for could not pass it.
        if gid >= 0 and found.st_uid == os.geteuid() and found.st_mode & 0o777 == 0o750 and found.st_gid != gid:
            os.chown(folder, -1, gid)
        return
    os.chmod(folder, 0o750)  # noqa: S103  the mode the socket's group needs, whatever the umask took away
    if gid >= 0:
        os.chown(folder, -1, gid)


def _lock(path: str) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise SocketUnavailable(f"another daemon holds {path}; stop it, or choose another socket") from None
    return descriptor


def _check_kind(path: str) -> None:
    """Before anything is made beside it: what is there must be a socket, or nothing."""
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise SocketUnavailable(f"{path} exists and is no socket; it was left alone")


def _check_replaceable(path: str) -> None:
    if not os.path.lexists(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # stale: its maker is gone
        except OSError:
            pass  # a full backlog or a slow peer is still somebody
    raise SocketUnavailable(f"something else listens on {path}; it was left alone")


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _group_id(group: str) -> int:
    if not group:
        return -1
    if group.isascii() and group.isdigit():
        if len(group) > 10 or int(group) > _MAX_GROUP:
            raise SocketUnavailable(f"socket_group {group[:20]} is no group's number")
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise SocketUnavailable(f"no group is named {group!r}") from None
