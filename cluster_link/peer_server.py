"""The end that peers call: bytes of a batch in, bytes of its answer out, in order.

Decides nothing: the answer is handed in.  An owner answers what it is sent and never forwards it again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from cluster_link.errors import CannotListen
from cluster_link.peer_client import MAX_MESSAGE

_SERVICE, _METHOD_NAME = "sidegate.Peer", "Carry"


class PeerServer:
    """A gRPC server for peers.  answer: a batch -> its answer; ValueError for bytes that are none."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # two daemons on one address would share its connections at random
                ("grpc.max_receive_message_length", MAX_MESSAGE),
                ("grpc.max_send_message_length", MAX_MESSAGE),
            ]
        )
        handler: Any = grpc.stream_stream_rpc_method_handler(self._carry)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD_NAME: handler}),)
        )

    async def start(self, address: str) -> int:
        """Listen on `address` ("host:port", port 0 for a free one); the port.  Raises CannotListen."""
        try:
            port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address}: {error}") from None
        await self._server.start()
        return port

    async def stop(self, grace: float) -> None:
        """Take no new streams; cut those that are open after `grace` seconds."""
        await self._server.stop(grace)

    async def _carry(self, batches: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for batch in batches:
            try:
                answer = self._answer(batch)
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            yield answer
