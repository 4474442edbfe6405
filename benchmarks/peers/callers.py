"""The clients: how a Python worker asks each system, as its users do.

Each class makes its request anew from the hits of a call, waits for the answer, reads every decision in it and tells
how many were over their limit.  All are made inside the worker's process, where alone their libraries are loaded.
`ask` is a coroutine for all, so that one loop drives all; those that block do so inside it.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from benchmarks.load import Asker
from benchmarks.peers.hits import WINDOW_S, Hit
from benchmarks.peers.systems import Endpoint
from benchmarks.stream import METHOD

_TIMEOUT = 5.0
_OVER = 1
_CHECK = 1
_BATCH = b"x" * 60


class Caller(Protocol):
    """One connection of one process."""

    async def ask(self, hits: list[Hit]) -> int:
        """How many of the hits are over their limit; raises if any has no decision."""

    async def close(self) -> None:
        """Give back what it holds."""


class SidegateClient:
    """`sidecar.Client`: one hit by `hit`, more by `check`."""

    def __init__(self, endpoint: Endpoint) -> None:
        from sidecar import Client, Limit

        self._limit, self._client = Limit, Client(endpoint.socket, timeout=_TIMEOUT)
        self._limits: dict[tuple[str, int, int], Limit] = {}

    async def ask(self, hits: list[Hit]) -> int:
        if len(hits) == 1:
            return not self._client.hit(self._limit_of(hits[0]), hits[0].key)
        decisions = self._client.check([self._limit_of(hit).request(hit.key) for hit in hits])
        if any(decision.error for decision in decisions):
            raise RuntimeError(next(decision.error for decision in decisions if decision.error))
        return sum(not decision for decision in decisions)

    def _limit_of(self, hit: Hit) -> Any:
        terms = (hit.name, hit.limit, hit.behavior)
        limit = self._limits.get(terms)
        if limit is None:
            limit = self._limit(hit.name, hit.limit, per=WINDOW_S * 1000, behavior=hit.behavior)
            self._limits[terms] = limit
        return limit

    async def close(self) -> None:
        self._client.close()


class SidegateRaw:
    """msgpack on the socket, no class of Sidegate."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._asker = Asker(endpoint.socket)

    async def ask(self, hits: list[Hit]) -> int:
        answers = self._asker.ask(
            _CHECK, [(hit.name, hit.key, 1, hit.limit, WINDOW_S * 1000, 0, hit.behavior, 0, None) for hit in hits]
        )
        over = 0
        for answer in answers:
            if answer[0] > _OVER:
                raise RuntimeError(f"no decision: {answer}")
            over += answer[0]
        return over

    async def close(self) -> None:
        """The socket ends with the process."""


class Echo(SidegateRaw):
    """The same bytes, sent back: nothing is decided."""

    async def ask(self, hits: list[Hit]) -> int:
        self._asker.ask(
            _CHECK, [(hit.name, hit.key, 1, hit.limit, WINDOW_S * 1000, 0, hit.behavior, 0, None) for hit in hits]
        )
        return 0


class Stream:
    """A kept-open stream of grpc.aio that sends back what it is sent, as many bytes as a batch of one request."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._address = endpoint.grpc
        self._call: Any = None

    async def ask(self, hits: list[Hit]) -> int:
        if self._call is None:
            import grpc.aio

            self._channel = grpc.aio.insecure_channel(self._address)
            self._call = self._channel.stream_stream(METHOD)(wait_for_ready=True)
        await self._call.write(_BATCH)
        await self._call.read()
        return 0

    async def close(self) -> None:
        await self._channel.close()


class _V1:
    def __init__(self) -> None:
        from sidecar.gateway.proto import gubernator_pb2, gubernator_pb2_grpc

        self._messages: Any = gubernator_pb2
        self._stub_of: Any = gubernator_pb2_grpc.V1Stub

    def _request(self, hits: list[Hit]) -> Any:
        made = self._messages.RateLimitReq
        return self._messages.GetRateLimitsReq(
            requests=[
                made(
                    name=hit.name,
                    unique_key=hit.key,
                    hits=1,
                    limit=hit.limit,
                    duration=WINDOW_S * 1000,
                    behavior=hit.behavior,
                )
                for hit in hits
            ]
        )

    @staticmethod
    def _over(answer: Any) -> int:
        over = 0
        for one in answer.responses:
            if one.error:
                raise RuntimeError(one.error)
            over += one.status
        return over


class GubernatorGrpc(_V1):
    """grpcio's blocking stub, one channel."""

    def __init__(self, endpoint: Endpoint) -> None:
        import grpc

        super().__init__()
        self._channel = grpc.insecure_channel(endpoint.grpc)
        self._stub = self._stub_of(self._channel)

    async def ask(self, hits: list[Hit]) -> int:
        return self._over(self._stub.GetRateLimits(self._request(hits), timeout=_TIMEOUT))

    async def close(self) -> None:
        self._channel.close()


class GubernatorAio(_V1):
    """grpc.aio, one channel, on the uvloop that drives the worker."""

    def __init__(self, endpoint: Endpoint) -> None:
        import grpc.aio

        super().__init__()
        self._channel = grpc.aio.insecure_channel(endpoint.grpc)
        self._stub = self._stub_of(self._channel)

    async def ask(self, hits: list[Hit]) -> int:
        return self._over(await self._stub.GetRateLimits(self._request(hits), timeout=_TIMEOUT))

    async def close(self) -> None:
        await self._channel.close()


class GubernatorHttp:
    """JSON by aiohttp, one session with its connection kept."""

    def __init__(self, endpoint: Endpoint) -> None:
        import aiohttp

        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT))
        self._url = f"http://{endpoint.http}/v1/GetRateLimits"

    async def ask(self, hits: list[Hit]) -> int:
        requests = [
            {
                "name": hit.name,
                "unique_key": hit.key,
                "hits": 1,
                "limit": hit.limit,
                "duration": WINDOW_S * 1000,
                "behavior": hit.behavior,
            }
            for hit in hits
        ]
        async with self._session.post(self._url, json={"requests": requests}) as answer:
            answer.raise_for_status()
            responses = json.loads(await answer.read())["responses"]
        failed = next((one["error"] for one in responses if one["error"]), None)
        if failed:
            raise RuntimeError(failed)
        return sum(one["status"] == "OVER_LIMIT" for one in responses)

    async def close(self) -> None:
        await self._session.close()


class _Limits:
    """The `limits` library; it asks one hit at a time.  Strategies share one Redis, so each has a namespace."""

    _strategy = ""

    def __init__(self, endpoint: Endpoint) -> None:
        from limits import RateLimitItemPerSecond, storage, strategies

        where = f"redis+unix://{endpoint.socket}" if endpoint.socket else "memory://"
        self._item = RateLimitItemPerSecond
        self._hit = getattr(strategies, self._strategy)(storage.storage_from_string(where)).hit
        self._items: dict[int, Any] = {}

    async def ask(self, hits: list[Hit]) -> int:
        over = 0
        for hit in hits:
            item = self._items.get(hit.limit)
            if item is None:
                item = self._items[hit.limit] = self._item(hit.limit, WINDOW_S, namespace=self._strategy)
            over += not self._hit(item, hit.name, hit.key)
        return over

    async def close(self) -> None:
        """Connections end with the process."""


class LimitsFixed(_Limits):
    """Fixed window: a counter that expires."""

    _strategy = "FixedWindowRateLimiter"


class LimitsMoving(_Limits):
    """Moving window: a list of the moments of the hits."""

    _strategy = "MovingWindowRateLimiter"


class RedisLua:
    """A token bucket of one Lua script, by redis-py; several hits go in one pipeline."""

    _SCRIPT = """
        local limit, window, hits = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
        local time = redis.call('TIME')
        local now = time[1] * 1000 + math.floor(time[2] / 1000)
        local held = redis.call('HMGET', KEYS[1], 'tokens', 'at')
        local tokens = limit
        if held[1] then
            tokens = math.min(limit, held[1] + (now - held[2]) * limit / window)
        end
        local allowed = 0
        if tokens >= hits then
            allowed = 1
            tokens = tokens - hits
        end
        redis.call('HSET', KEYS[1], 'tokens', tokens, 'at', now)
        redis.call('PEXPIRE', KEYS[1], window)
        return {allowed, math.floor(tokens)}
    """

    def __init__(self, endpoint: Endpoint) -> None:
        import redis

        self._redis = redis.Redis(unix_socket_path=endpoint.socket, socket_timeout=_TIMEOUT)
        self._bucket = self._redis.register_script(self._SCRIPT)

    async def ask(self, hits: list[Hit]) -> int:
        if len(hits) == 1:
            hit = hits[0]
            return not self._bucket([f"{hit.name}:{hit.key}"], [hit.limit, WINDOW_S * 1000, 1])[0]
        pipeline = self._redis.pipeline(transaction=False)
        for hit in hits:
            self._bucket([f"{hit.name}:{hit.key}"], [hit.limit, WINDOW_S * 1000, 1], client=pipeline)
        return sum(not allowed for allowed, _ in pipeline.execute())

    async def close(self) -> None:
        self._redis.close()
