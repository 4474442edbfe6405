"""The end that peers call: bytes of a batch in, bytes of its answer out, in order.

Decides nothing: the answer is handed in.  An owner answers what it is sent and never forwards it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from cluster_link.errors import CannotListen
from cluster_link.peer_client import MAX_MESSAGE

if TYPE_CHECKING:
    from cluster_link.tls import Tls

_SERVICE, _METHOD_NAME = "sidegate.Peer", "Carry"
_QUIET = 0.1
"""Seconds without a batch after which a stopping server ends its streams: peers that still ask are given the grace to
hear that this node is leaving."""


class PeerServer:
    """A gRPC server for peers.

    answer: a batch -> its answer; ValueError for bytes that are none.
    services: each adds another service to the server, so that all share its port.
    tls: None: the port takes plain text; else TLS alone.
    most: connections at a time, others are closed at once; None: any number.
    """

    def __init__(
        self,
        answer: Callable[[bytes], bytes],
        services: Sequence[Callable[[grpc.aio.Server], None]] = (),
        tls: Tls | None = None,
        most: int | None = None,
    ) -> None:
        self._tls = tls
        self._answer = answer
        self._streams: set[asyncio.Task[Any]] = set()
        self._last_batch = 0.0
        self._stopping = False
        options = [
            ("grpc.so_reuseport", 0),  # two daemons on one address would share its connections at random
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.max_send_message_length", MAX_MESSAGE),
        ]
        if most is not None:
            options.append(("grpc.max_allowed_incoming_connections", most))
        self._server = grpc.aio.server(options=options)
        handler: Any = grpc.stream_stream_rpc_method_handler(self._carry)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD_NAME: handler}),)
        )
        for add in services:
            add(self._server)

    async def start(self, address: str) -> int:
        """Listen on `address` ("host:port", port 0 for a free one, or "unix:/path"); the port.  Raises CannotListen."""
        try:
            port: int
            if self._tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._tls.server())
        except RuntimeError as error:
            # Behind the semicolon gRPC advises on its own logging.
            raise CannotListen("listen", address, str(error).partition(";")[0]) from None
        await self._server.start()
        return port

    async def stop(self, grace: float) -> None:
        """Take no new streams; end those that are open once they are quiet, or after `grace` seconds."""
        self._stopping = True
        stopping = asyncio.create_task(self._server.stop(grace))
        now = time.monotonic()
        end = now + grace
        while self._streams and (left := min(end, max(now, self._last_batch + _QUIET)) - time.monotonic()) > 0:
            await asyncio.sleep(left)
        for stream in self._streams:
            stream.cancel()
        await stopping

    async def _carry(self, batches: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            async for batch in batches:
                self._last_batch = time.monotonic()
                try:
                    answer = self._answer(batch)
                except ValueError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                yield answer
        except asyncio.CancelledError:
            if not self._stopping:  # the peer went
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this node stops")
        finally:
            self._streams.discard(task)
