"""What the daemon tells the service manager that started it: ready, reading settings, stopping, still alive.

Decides the messages of systemd's protocol (sd_notify(3)) and how often the watchdog hears.  Knows no unit and no
daemon; without a manager that listens it does nothing.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, MutableMapping

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_OFTEN = 2
"""Messages within the time after which the manager gives up, as sd_watchdog_enabled(3) advises."""
_MOST_UNSENT = 4
"""Messages kept for a manager that is behind; of more than these only the last ones would still be true."""


class Manager:
    """The service manager behind NOTIFY_SOCKET.

    environ: read once, and rid of these variables, so that no child speaks for this process.
    report: told once each time that the manager can no longer be reached, which never stops the daemon.
    watchdog: seconds between two messages of `alive`; 0: nobody waits for them.
    A message that finds the manager's queue full is kept, since a manager that never hears of READY ends the daemon;
    call `try_again` now and then.
    """

    def __init__(self, environ: MutableMapping[str, str], report: Callable[..., None]) -> None:
        address, interval, pid = (environ.pop(name, "") for name in _VARIABLES)
        self._report = report
        self._socket: socket.socket | None = None
        # Abstract names are written with an @, which the kernel wants as a zero byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._failed = False
        self._unsent: deque[str] = deque(maxlen=_MOST_UNSENT)
        self.watchdog = 0.0
        if not address:
            return
        if not address.startswith(("/", "@")):
            report("notify_failed", reason=f"NOTIFY_SOCKET is no path and no abstract name: {address!r}")
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        # A manager that does not read must not hold up decisions.
        self._socket.setblocking(False)
        if interval and pid in ("", str(os.getpid())):
            if re.fullmatch(r"\d{1,18}", interval, re.ASCII) and int(interval):
                self.watchdog = int(interval) / 1_000_000 / _OFTEN
            else:
                report("notify_failed", reason=f"WATCHDOG_USEC is no number of microseconds: {interval[:20]!r}")

    def ready(self, status: str) -> None:
        """Requests are answered from now on (again)."""
        self._tell(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """Settings are being read; `ready` follows, whatever comes of it."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The end has begun."""
        self._tell("STOPPING=1\nSTATUS=draining")

    def alive(self) -> None:
        """The loop turns."""
        self._send("WATCHDOG=1")

    def try_again(self) -> None:
        """Send what found the manager's queue full, in its order."""
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()

    def _tell(self, text: str) -> None:
        self._unsent.append(text)
        self.try_again()

    def _send(self, text: str) -> bool:
        """Whether there is nothing more to do for this message: it is sent, or nobody is there to hear it."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(text.encode(), self._address)
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._report("notify_failed", reason=f"{error.strerror or error}")
            self._failed = True
            return not isinstance(error, BlockingIOError)
        return True
