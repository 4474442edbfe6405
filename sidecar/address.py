"""Where the daemon is found: one rule for the socket's path, for the daemon and for its clients.

`SIDEGATE_SOCKET`; else /run/sidegate/sidegate.sock where that folder is usable; else
$XDG_RUNTIME_DIR/sidegate/sidegate.sock; else a folder of the user's own under the temp directory.
Knows nothing of what is at the path: client side connection.py opens it, daemon side socketfile.py makes it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SOCKET_VARIABLE = "SIDEGATE_SOCKET"
SYSTEM_FOLDER = "/run/sidegate"
SOCKET_NAME = "sidegate.sock"


def socket_path(environ: Mapping[str, str] = os.environ, system_folder: str = SYSTEM_FOLDER) -> str:
    """The socket's path by the rule above; nothing is created."""
    named = environ.get(SOCKET_VARIABLE)
    if named:
        return strip_scheme(named)
    if _usable(system_folder):
        return os.path.join(system_folder, SOCKET_NAME)
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return os.path.join(runtime, "sidegate", SOCKET_NAME)
    temp = environ.get("TMPDIR") or "/tmp"  # noqa: S108  the user's own folder in it is checked by the daemon
    return os.path.join(temp, _own_folder(), SOCKET_NAME)


def foreign(folder: str) -> str:
    """Why `folder`, if it is to be the user's own under the temp directory, is not; else "".  Anyone could make it."""
    if os.path.basename(folder) != _own_folder() or not os.path.lexists(folder):
        return ""
    found = os.lstat(folder)
    if os.path.islink(folder) or found.st_uid != os.getuid():
        return f"{folder} belongs to another user"
    return ""


def _own_folder() -> str:
    return f"sidegate-{os.getuid()}"


def strip_scheme(address: str) -> str:
    """The path of `unix:///run/x.sock`; a plain path is its own."""
    return address.removeprefix("unix://")


def _usable(folder: str) -> bool:
    """Whether this process can reach a socket in `folder`, or could make the folder for one."""
    if os.path.isdir(folder):
        return os.access(folder, os.X_OK)
    return not os.path.lexists(folder) and os.access(os.path.dirname(folder), os.W_OK)
