"""The daemon's ear for its cluster, with a source that tells what a test has it tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from cluster_link.discovery.gather import Gather
from cluster_link.discovery.source import Standing
from cluster_link.membership import Peer
from sidecar.discovery import Discovery

ME, OTHER = Peer("me", "10.0.0.1:1051"), Peer("other", "10.0.0.2:1051")


class FakeLog:
    """The events that were logged."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_: object) -> None:
        self.events.append(event)

    error = warning


class Told:
    """A source that tells what is put into it; an exception is raised."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[frozenset[Peer] | Exception | None] = asyncio.Queue()
        self.opened = self.closed = 0
        self.left = asyncio.Event()
        self.leaves: Callable[[], Awaitable[None]] | None = None

    async def members(self) -> AsyncIterator[frozenset[Peer]]:
        self.opened += 1
        try:
            while True:
                told = await self.queue.get()
                if told is None:
                    return
                if isinstance(told, Exception):
                    raise told
                yield told
        finally:
            self.closed += 1

    async def leave(self) -> None:
        self.left.set()
        if self.leaves is not None:
            await self.leaves()


class Rings:
    """The sets that became rings."""

    def __init__(self) -> None:
        self.made: asyncio.Queue[frozenset[Peer]] = asyncio.Queue()

    async def follow(self, members: frozenset[Peer]) -> None:
        self.made.put_nowait(members)


def listened(test: Callable[[Told, Rings, Discovery, FakeLog], Awaitable[None]]) -> None:
    """Run a test with a source that is listened to, without any time to gather."""

    async def run() -> None:
        source, rings, log = Told(), Rings(), FakeLog()
        standing = Standing("told", lambda: 0.0, log.warning)
        discovery = Discovery(source, standing, rings.follow, log, Gather(quiet=0, longest=0), longest_pause=0.0)
        discovery.start()
        try:
            async with asyncio.timeout(10):
                await test(source, rings, discovery, log)
        finally:
            await discovery.stop()
        assert source.opened == source.closed

    asyncio.run(run())


def test_what_a_source_tells_becomes_the_ring() -> None:
    """Each new set is followed, an unchanged one is not, and nobody at all is no set."""

    async def test(source: Told, rings: Rings, discovery: Discovery, log: FakeLog) -> None:
        assert discovery.standing.state == "waiting"
        assert discovery.standing.provisional
        for members in ({ME}, {ME}, set(), {ME, OTHER}):
            discovery.standing.heard()
            source.queue.put_nowait(frozenset(members))
        assert await rings.made.get() in ({ME}, {ME, OTHER})
        await discovery.known.wait()
        while rings.made.qsize():
            rings.made.get_nowait()
        source.queue.put_nowait(frozenset({OTHER}))
        assert {OTHER} in [await rings.made.get() for _ in range(1 + rings.made.qsize())]
        assert discovery.standing.state == "current"
        assert not discovery.standing.provisional

    listened(test)


def test_a_source_that_breaks_is_opened_anew_and_the_ring_stands() -> None:
    """A fault in a source is told, and what it tells afterwards is followed."""

    async def test(source: Told, rings: Rings, discovery: Discovery, log: FakeLog) -> None:
        source.queue.put_nowait(frozenset({ME, OTHER}))
        assert await rings.made.get() == {ME, OTHER}
        source.queue.put_nowait(ZeroDivisionError("a fault"))
        source.queue.put_nowait(None)
        source.queue.put_nowait(frozenset({ME}))
        assert await rings.made.get() == {ME}
        assert source.opened == 3
        assert log.events == ["discovery_failed", "discovery_away", "discovery_away"]
        assert discovery.standing.failures == 2

    listened(test)


def test_a_source_that_cannot_be_left_does_not_hold_up_the_end() -> None:
    """Leaving is asked of the source, and given a second."""

    async def test(source: Told, rings: Rings, discovery: Discovery, log: FakeLog) -> None:
        async def hang() -> None:
            raise TimeoutError

        await discovery.leave()
        assert source.left.is_set()
        assert not log.events
        source.leaves = hang
        await discovery.leave()
        assert log.events == ["discovery_not_left"]

    listened(test)


def test_how_a_source_stands() -> None:
    """Its state, its ages and what is told of it follow what it was last seen to do."""
    now = 100.0
    told: list[tuple[str, dict[str, object]]] = []
    standing = Standing("dns", lambda: now, lambda event, **fields: told.append((event, fields)))
    assert (standing.state, standing.age, standing.ring_age, standing.provisional) == ("waiting", None, None, True)
    standing.lost("no answer")
    standing.lost("no answer")
    now = 159.0
    standing.lost("no answer")
    assert len(told) == 1
    now = 160.0
    standing.lost("no answer")
    standing.lost("refused")
    assert (standing.state, standing.why, standing.failures, standing.age) == ("away", "refused", 5, None)
    now = 101.0
    standing.heard(listed=False)
    standing.changed()
    assert (standing.state, standing.why, standing.provisional) == ("current", "", True)
    now = 103.5
    assert (standing.age, standing.ring_age) == (2.5, 2.5)
    standing.heard()
    assert (standing.age, standing.ring_age, standing.provisional) == (0.0, 2.5, False)
    assert told == [
        ("discovery_away", {"source": "dns", "reason": "no answer"}),
        ("discovery_away", {"source": "dns", "reason": "no answer"}),
        ("discovery_away", {"source": "dns", "reason": "refused"}),
        ("discovery_back", {"source": "dns"}),
    ]
