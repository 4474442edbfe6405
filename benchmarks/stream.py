"""The floor of forwarding: a bare grpc.aio stream that echoes, kept open.

`python -m benchmarks.stream serve PORT` is the server; `round_trip` measures one client.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import uvloop

METHOD = "/bench.Echo/Carry"


async def _echo(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _serve(port: str) -> None:
    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Carry": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def round_trip(start: Callable[[], object], port: int, seconds: float, size: int) -> float:
    """The median round trip of `size` bytes, in microseconds."""

    async def measure() -> float:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(METHOD)(wait_for_ready=True)
            payload = b"x" * size
            trips = []
            for _ in range(50):
                await call.write(payload)
                await call.read()
            start()
            end = time.perf_counter() + seconds
            while (began := time.perf_counter()) < end:
                await call.write(payload)
                await call.read()
                trips.append(time.perf_counter() - began)
            call.cancel()
            return statistics.median(trips) * 1e6

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sys.argv[2]))
