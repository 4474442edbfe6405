"""Who is compared: each contender's name, the system it asks, the class that asks it, and what it can do.

Decides nothing else; a scene picks those that can do its work.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.peers import callers


class Contender(NamedTuple):
    """One way to ask one system.

    shared: whether several processes share one limit.  clustered: whether several nodes do, with GLOBAL too.
    decides: whether it limits at all.  named: whether it is only in scenes that name it.
    """

    name: str
    title: str
    system: str
    caller: type[callers.Caller]
    shared: bool = True
    clustered: bool = False
    decides: bool = True
    named: bool = False


CONTENDERS = {
    one.name: one
    for one in (
        Contender("sidegate", "Sidegate, Client", "sidegate", callers.SidegateClient, clustered=True),
        Contender("sidegate-raw", "Sidegate, raw msgpack", "sidegate", callers.SidegateRaw, clustered=True),
        Contender("gubernator-grpc", "Gubernator, grpcio", "gubernator", callers.GubernatorGrpc, clustered=True),
        Contender("gubernator-aio", "Gubernator, grpc.aio", "gubernator", callers.GubernatorAio, clustered=True),
        Contender(
            "gubernator-http", "Gubernator, HTTP by aiohttp", "gubernator", callers.GubernatorHttp, clustered=True
        ),
        Contender("redis-fixed", "Redis, limits fixed window", "redis", callers.LimitsFixed),
        Contender("redis-moving", "Redis, limits moving window", "redis", callers.LimitsMoving),
        Contender("redis-lua", "Redis, Lua token bucket", "redis", callers.RedisLua),
        Contender("memory", "limits in memory, one process", "none", callers.LimitsFixed, shared=False),
        Contender("echo", "bare uvloop echo", "echo", callers.Echo, decides=False),
        Contender("stream", "bare grpc.aio stream", "stream", callers.Stream, decides=False, named=True),
    )
}
