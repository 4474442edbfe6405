"""The floor: a uvloop server on a Unix socket that sends back what it reads.  `python -m benchmarks.echo PATH`."""

from __future__ import annotations

import asyncio
import sys

import uvloop


class Echo(asyncio.Protocol):
    """Sends back what it reads."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


async def _serve(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(Echo, path, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.argv[1]))
