"""Connections to the HTTP door, around aiohttp: how many there may be, what ends one that stands still, TLS handshakes.

Decides that one too many, a head left unfinished and answers left unread cost a caller its connection, and that a
handshake which fails is told; aiohttp bounds none of these and hears of no handshake.  Reads no HTTP: it is told when a
request begins and ends.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, cast

from cluster_link.handshakes import explain

_DOOR = "http"
_HANDSHAKE = 10.0
"""Seconds that a client may take for its TLS handshake."""
_NO_ACCEPT = 1.0
"""Seconds until the next try, where the system gives no connection (descriptors are short)."""


class Gate:
    """Where connections come in.

    serve: a protocol that speaks HTTP, for each.  report: told of trouble.  most: connections at a time.
    patience: seconds for a head, and for answers to be read on.
    """

    def __init__(
        self, serve: Callable[[], asyncio.Protocol], report: Callable[..., None], most: int, patience: float
    ) -> None:
        self.serve = serve
        self.report = report
        self.open: dict[asyncio.BaseProtocol, Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes = 0
        self._most = most
        self._patience = patience

    def plain(self) -> asyncio.Protocol:
        """A protocol for a connection without TLS."""
        return Connection(self)

    def secure(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Take connections that speak TLS, until `stop`, which closes the listener too."""
        self._spawn(self._accept(listener, context))

    def takes(self) -> bool:
        """Whether there is a place for one more; told of if there is none."""
        if len(self.open) + self._handshakes < self._most:
            return True
        self.report("connection_refused", door=_DOOR, max_connections=self._most)
        return False

    def begun(self, serving: asyncio.BaseProtocol) -> None:
        """A request's head is there."""
        if (connection := self.open.get(serving)) is not None:
            connection.begun()

    def ended(self, serving: asyncio.BaseProtocol, whole: bool) -> None:
        """A request is answered.  whole: its body has been read; aiohttp reads for a while what is left of one that has
        not, and hangs up."""
        if whole and (connection := self.open.get(serving)) is not None:
            connection.ended()

    def drop_stalled(self, now: float) -> None:
        """Hang up on those that stand still; now: the loop's time."""
        for connection in list(self.open.values()):
            if connection.since is not None and now - connection.since > self._patience and not connection.moves(now):
                self.report("client_dropped", door=_DOOR, reason=connection.stalled_by)
                connection.abort()

    async def stop(self) -> None:
        """Take no more over TLS, and end handshakes that are under way."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        # Accepted here, since a server of the loop's own makes handshakes that fail without a word.
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listener)
                except OSError as error:
                    self.report("loop_error", error=f"no connection to HTTP was accepted: {error}")
                    await asyncio.sleep(_NO_ACCEPT)
                    continue
                if self.takes():
                    self._handshakes += 1
                    self._spawn(self._shake(accepted, context))
                else:
                    accepted.close()

    async def _shake(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self, True), accepted, ssl=context, ssl_handshake_timeout=_HANDSHAKE
            )
        except ssl.SSLError as error:
            self.report("tls_refused", door=_DOOR, reason=explain(str(error)) or str(error))
        except ConnectionAbortedError:
            self.report("tls_refused", door=_DOOR, reason=f"its handshake was not done within {_HANDSHAKE:g} s")
        except OSError:
            pass  # it hung up and said nothing, as who only looks whether a port is open does
        finally:
            self._handshakes -= 1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Connection(asyncio.Protocol):
    """One connection, passed on to the protocol that speaks HTTP.

    placed: it was given its place before its handshake.
    since: the loop's time since which it stands still, None while it does not; stalled_by: what is waited for.
    A part of a head that came in one piece with the request before it is not seen: only aiohttp's own time for
    connections that are quiet ends that.
    """

    def __init__(self, gate: Gate, placed: bool = False) -> None:
        self._gate = gate
        self._placed = placed
        self._serving = gate.serve()
        self._transport: asyncio.Transport | None = None
        self._busy = False
        self._unwritten = 0
        self.since: float | None = None
        self.stalled_by = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        if not self._placed and not self._gate.takes():
            transport.abort()
            return
        self._transport = transport
        self._gate.open[self._serving] = self
        self._serving.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return  # it has no place
        if not self._busy and self.since is None:
            self._stall("head left unfinished")
        self._serving.data_received(data)

    def eof_received(self) -> bool | None:
        return self._serving.eof_received() if self._transport is not None else False

    def pause_writing(self) -> None:
        self._stall("answers left unread")
        self._serving.pause_writing()

    def resume_writing(self) -> None:
        self.since = None
        self._serving.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._gate.open.pop(self._serving, None) is not None:
            self._serving.connection_lost(exc)

    def begun(self) -> None:
        self._busy = True
        self.since = None

    def ended(self) -> None:
        self._busy = False

    def moves(self, now: float) -> bool:
        """Whether answers have left since this was last asked, however slowly."""
        assert self._transport is not None
        before, self._unwritten = self._unwritten, self._transport.get_write_buffer_size()
        moves = 0 < self._unwritten < before
        if moves:
            self.since = now
        return moves

    def abort(self) -> None:
        """Close now."""
        assert self._transport is not None
        self._transport.abort()

    def _stall(self, why: str) -> None:
        self.since = asyncio.get_running_loop().time()
        self.stalled_by = why
        assert self._transport is not None
        self._unwritten = self._transport.get_write_buffer_size()
