"""A link to one peer, by itself, on a loop of its own: closing it ends it, whatever it is at."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from typing import Any

from cluster_link.membership import Peer
from cluster_link.peer_client import PeerClient, Settings
from sidecar.cluster import _codec
from sidecar.wire import Op, Packer
from tests.clusters import Watch, free_port


class FakeWaiter:
    """Who waits for one answer; `outcomes` is what came."""

    waiting = True

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def answered(self, answer: Any, node: str) -> None:
        self.outcomes.append("answered")

    def failed(self, why: str, sent: bool) -> None:
        self.outcomes.append("failed")


def link(port: int) -> PeerClient:
    """A link that is told to dial this port by the first `ask`."""
    peer = Peer("peer", f"127.0.0.1:{port}")
    return PeerClient(peer, _codec(Packer("me")), Settings(1_000, 0.0, 20_000, 0.5), lambda *_, **__: None)


def test_closing_a_link_returns_at_whatever_moment() -> None:
    """Six hundred links to a port where nobody is, closed within half a second: each close returns, each task is
    over, and each waiter was settled once.  (A daemon that stops closes its links, and must end.)"""

    async def close_one() -> tuple[bool, list[str]]:
        client, waiter = link(port), FakeWaiter()
        client.ask(Op.CHECK, ("n", "k", 1, 1, 1), waiter)
        await asyncio.sleep(random.uniform(0.0, 0.5))
        closing = asyncio.ensure_future(client.close())
        done, _ = await asyncio.wait([closing], timeout=20)
        closing.cancel()
        return bool(done), waiter.outcomes

    async def close_all() -> list[tuple[bool, list[str]]]:
        found = []
        for _ in range(6):
            found += await asyncio.gather(*(close_one() for _ in range(100)))
        return found

    port = free_port()
    found = asyncio.run(close_all())
    assert [done for done, _ in found].count(False) == 0
    assert all(outcomes == ["failed"] for _, outcomes in found)


def test_a_closed_link_dials_no_more() -> None:
    """Not even before the collector runs: the daemon's never looks at what has grown old."""

    async def close_and_listen() -> int:
        port = free_port()
        client = link(port)
        client.ask(Op.CHECK, ("n", "k", 1, 1, 1), FakeWaiter())
        await asyncio.sleep(1.0)
        await client.close()
        with Watch(port) as watch:
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                await asyncio.sleep(0.05)
            return watch.connections

    gc.disable()
    try:
        assert asyncio.run(close_and_listen()) == 0
    finally:
        gc.enable()
