"""The Unix socket that a service manager bound for this daemon (socket activation, sd_listen_fds(3)).

Decides whether what was passed can be served on.  Binds and removes nothing: the file, its mode and its group are the
manager's, and while the daemon restarts, clients wait in the socket's queue.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, MutableMapping

from sidecar.socketfile import SocketUnavailable

_FIRST = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class PassedSocket:
    """A socket that is another's to remove; used where a SocketFile is."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.socket.setblocking(False)
        name = self.socket.getsockname()
        # The kernel gives abstract names as bytes that begin with a zero; people write an @.
        self.path = name if isinstance(name, str) else "@" + os.fsdecode(name[1:])

    def remove(self) -> None:
        """Nothing: clients that come meanwhile wait for the next daemon."""

    def release(self) -> None:
        """Nothing: the descriptor ends with the process."""


def passed_socket(environ: MutableMapping[str, str], pid: int, report: Callable[..., None]) -> PassedSocket | None:
    """The socket passed to process `pid`, or None if none was; the variables are taken out of `environ`.

    report: told of a socket that was passed to another process, most often to a shell that started this one.
    Raises SocketUnavailable if something else was passed, which would otherwise be left unserved.
    """
    for_pid, count, names = (environ.pop(name, "") for name in _VARIABLES)
    if not for_pid and not count:
        return None
    if for_pid != str(pid):
        report("passed_socket_ignored", reason=f"LISTEN_PID is {for_pid[:20]!r}, and this process is {pid}")
        return None
    if not (count.isascii() and count.isdecimal()):
        raise SocketUnavailable(f"LISTEN_FDS is no number: {count[:20]!r}")
    if count == "0":
        return None
    if count != "1":
        raise SocketUnavailable(
            f"{count[:20]} sockets were passed ({names[:200] or 'unnamed'}); the daemon takes one, a Unix stream "
            "socket. Its other doors it opens itself (listen, http)"
        )
    try:
        os.set_inheritable(_FIRST, False)
        is_socket = stat.S_ISSOCK(os.fstat(_FIRST).st_mode)
    except OSError:
        raise SocketUnavailable("LISTEN_FDS tells of a socket, and descriptor 3 is closed") from None
    if not is_socket:
        raise SocketUnavailable("the descriptor that was passed is no socket")
    with socket.socket(fileno=os.dup(_FIRST)) as found:
        if found.family != socket.AF_UNIX or found.type != socket.SOCK_STREAM:
            kind = f"{found.family.name} {found.type.name}"
            raise SocketUnavailable(f"the socket that was passed is {kind}; it must be a Unix stream socket")
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise SocketUnavailable("the socket that was passed does not listen (Accept=yes is not supported)")
    return PassedSocket(_FIRST)
