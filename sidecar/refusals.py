"""Handshakes that failed where gRPC listens: it tells standard error alone, and this file reads that.

Decides what becomes of a line there: gRPC's own are kept if they tell of a handshake, else dropped as they always are;
any other is passed on.  Knows no connection.  Loaded only where TLS is on; the daemon's log then writes to what
`take_over` gives back.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, MutableMapping
from typing import TextIO

from cluster_link.handshakes import explain

_NO_TLS_1_2 = "ECDHE-PSK-AES128-CBC-SHA"
"""A suite of TLS 1.2 that needs a key agreed upon beforehand, which gRPC has no way to be given: so that none of that
version's is left.  Those of TLS 1.3 are not chosen here."""
_GRPC = re.compile(rb"[IWE]\d{4} \d\d:\d\d:\d\d")
_FAILED = b"Handshake failed with error "
_READ = 65_536
_LONGEST_LINE = 8_192


def settle(environ: MutableMapping[str, str], minimum: str, listening: bool) -> None:
    """What gRPC takes from nowhere but the environment, read once when it is loaded: no version of TLS below
    `minimum`, which it has no call for, and, if somebody listens, a line for each handshake that fails."""
    if minimum == "1.3":
        environ["GRPC_SSL_CIPHER_SUITES"] = _NO_TLS_1_2
    if listening:
        environ["GRPC_VERBOSITY"] = "INFO"


class Refusals:
    """Standard error, taken over until `close`.  Raises OSError if it is closed.

    What is written there never waits for this process to read it: past the pipe's size, lines are lost.
    """

    def __init__(self) -> None:
        self._real = os.dup(2)
        self._pipe, write = os.pipe()
        # Its writers may hold what the loop waits for.
        os.set_blocking(self._pipe, False)
        os.set_blocking(write, False)
        os.dup2(write, 2)
        os.close(write)
        self._unfinished = b""
        self._new: Counter[str] = Counter()
        self._old: Counter[str] = Counter()
        self.stream: TextIO = open(os.dup(self._real), "w", 1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        self._stderr, sys.stderr = sys.stderr, self.stream
        # A process that dies of a fault leaves its last words in the pipe; these it writes itself.
        faulthandler.enable(self.stream)

    def start(self) -> None:
        """Read on the running loop."""
        asyncio.get_running_loop().add_reader(self._pipe, self._read)

    def stop(self) -> None:
        """Read no more."""
        asyncio.get_running_loop().remove_reader(self._pipe)

    def due(self, known: Iterable[str]) -> Counter[str]:
        """Why handshakes failed, and how often, since the second call before this one.

        known: why peers are away.  The same library makes the handshakes of this node's own links and tells of them in
        the same words; those have been told by the time of the second call, and are left out.
        """
        due, self._old, self._new = self._old, self._new, Counter()
        known = list(known)
        return Counter({why: count for why, count in due.items() if not any(why in told for told in known)})

    def close(self) -> None:
        """Give standard error back."""
        os.dup2(self._real, 2)
        self._read()
        sys.stderr = self._stderr
        faulthandler.disable()
        os.close(self._pipe)
        os.close(self._real)

    def _read(self) -> None:
        try:
            data = os.read(self._pipe, _READ)
        except BlockingIOError:
            return
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > _LONGEST_LINE:
            lines.append(self._unfinished)
            self._unfinished = b""
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        if not _GRPC.match(line):
            try:
                os.write(self._real, line + b"\n")
            except OSError:
                pass  # its reader has gone
            return
        _, failed, why = line.partition(_FAILED)
        if failed:
            text = why.decode("utf-8", "replace")
            self._new[explain(text) or text] += 1
