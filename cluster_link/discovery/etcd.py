"""Members by way of etcd v3: this daemon's key lives under a lease, and all keys below the prefix are followed.

Decides which server is asked and when the next one is, when the key is put, and what becomes of it when the store has
lost it.  What keys mean is etcd_keys' matter, what is sent etcd_link's.

One connection at a time serves everything: the keys are watched and then listed, and the lease is renewed three times
in its length.  Whatever fails in it ends it, and the next server is tried after a pause.  The lease outlives
connections; where the store no longer knows it, a new one is granted and the key put anew.

The first daemon that registers a name keeps it while it lives: a second one, started with the same name by mistake,
would else take the keys of one that works.  It waits, and asks the others as one that owns nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from cluster_link.discovery.etcd_keys import Keys, Registration
from cluster_link.discovery.etcd_link import Change, Credentials, EtcdError, Link
from cluster_link.discovery.source import Standing
from cluster_link.errors import BadCredentials
from cluster_link.membership import Peer

_TIMEOUT = 2.0
"""Seconds that etcd may take for any answer."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_KEPT_BEYOND_TTL = 10.0
"""Seconds, more than a daemon takes to notice that etcd is back and to register there."""


class Settings(NamedTuple):
    """endpoints: host:port each.  prefix: without a slash at its end.  ttl: seconds of the lease.
    credentials: those of the next connection, read anew each time, off the loop; raises BadCredentials."""

    endpoints: Sequence[str]
    prefix: str
    ttl: int
    credentials: Callable[[], Credentials]
    timeout: float = _TIMEOUT


class Etcd:
    """A Source.  connect: opens a connection, as Link does.  now: seconds.  sleep: as asyncio.sleep."""

    def __init__(
        self,
        settings: Settings,
        me: Peer,
        standing: Standing,
        connect: Callable[[str, Credentials, float], Any] = Link,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._me = me
        self._standing = standing
        self._connect = connect
        self._now = now
        self._sleep = sleep
        self._keys = Keys(settings.prefix, me, settings.ttl + _KEPT_BEYOND_TTL, self._pass_over)
        self._pauses = _Pauses(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._known = False
        self._news = asyncio.Event()
        self._mine = asyncio.Event()
        self._seen: Registration | None = None
        self._link: Link | None = None
        self._lease = 0
        self._put = False
        self._was_there = False
        self._holder: object = None
        self._left = False
        self._registering = asyncio.Lock()

    async def members(self) -> AsyncGenerator[frozenset[Peer], None]:
        """See Source."""
        work = asyncio.create_task(self._run())
        # A fault of ours in there ends the listening too, and is told.
        work.add_done_callback(lambda _: self._news.set())
        try:
            while not work.done():
                self._news.clear()
                if self._known:
                    yield self._keys.members(self._now())
                due = self._keys.due
                try:
                    async with asyncio.timeout(None if due is None else max(0.0, due - self._now())):
                        await self._news.wait()
                except TimeoutError:
                    pass
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def leave(self) -> None:
        """See Source: the lease is revoked, and the key goes with it."""
        self._left = True
        self._keys.leave()
        # What is under way is finished first, so that no key is put behind this.
        async with self._registering:
            link, lease, self._lease = self._link, self._lease, 0
            if link is not None and lease:
                try:
                    await link.revoke(lease)
                except EtcdError as error:
                    self._standing.lost(f"its lease could not be revoked: {error}")
        self._news.set()

    async def _run(self) -> None:
        endpoints = list(self._settings.endpoints)
        # Each begins at another one, so that they share the load.
        turn = random.randrange(len(endpoints))  # noqa: S311
        while True:
            endpoint = endpoints[turn % len(endpoints)]
            self._standing.lost(f"{endpoint}: {await self._session(endpoint)}")
            turn += 1
            await self._sleep(self._pauses.next())

    async def _session(self, endpoint: str) -> str:
        """Use one server until it fails; why it did."""
        try:
            credentials = await asyncio.to_thread(self._settings.credentials)
            async with self._connect(endpoint, credentials, self._settings.timeout) as link:
                self._link = link
                listed = asyncio.Event()
                try:
                    return await self._use(self._watch(link, listed), self._register(link, listed))
                finally:
                    self._link = None
        except (EtcdError, BadCredentials) as error:
            return str(error)

    async def _use(self, *works: Awaitable[None]) -> str:
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        faults = [end for end in ends if isinstance(end, Exception)]
        for fault in faults:
            if not isinstance(fault, EtcdError):
                raise fault
        return str(faults[0]) if faults else "the connection ended"

    async def _list(self, link: Link) -> int:
        revision, pairs = await link.list(self._keys.span)
        self._keys.listing(pairs, self._now())
        self._known = True
        self._changed()
        return revision

    def _changed(self) -> None:
        self._standing.heard(self._keys.listed)
        self._news.set()
        if self._seen != self._keys.mine:
            self._seen = self._keys.mine
            self._mine.set()

    async def _watch(self, link: Link, listed: asyncio.Event) -> None:
        pauses = _Pauses(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            async with link.watch() as watch:
                await watch.begin(self._keys.span)
                at = await self._list(link)
                listed.set()
                await watch.follow(self._settings.ttl / 3, lambda changes, at=at: self._take(changes, at, pauses))
            # Compacted: what happened in between is no longer told.  Not at once, as that may be so without end.
            await self._sleep(pauses.next())

    def _take(self, changes: list[Change], at: int, pauses: _Pauses) -> None:
        pauses.reset()
        news = [change for change in changes if change.revision > at]
        for key, _, put in news:
            if put is None:
                self._keys.deleted(key, self._now())
            else:
                self._keys.put(put, self._now())
        if news:
            self._changed()
        else:
            self._standing.heard(self._keys.listed)

    async def _register(self, link: Link, listed: asyncio.Event) -> None:
        """Have this daemon's key in the store, and renew its lease."""
        await listed.wait()
        async with link.keep_alive() as renewals:
            while True:
                self._mine.clear()
                lease = self._lease
                if lease:
                    if await renewals.renew(lease):
                        self._standing.heard(self._keys.listed)
                    elif lease == self._lease:
                        self._lease, self._put = 0, False
                looked_at = self._keys.mine
                async with self._registering:
                    claimed = self._left or await self._claim(link, looked_at)
                self._pauses.reset()
                if not claimed:
                    # It has changed since it was looked at; the watch is about to tell how.
                    while self._keys.mine == looked_at:
                        self._mine.clear()
                        await self._mine.wait()
                    continue
                try:
                    async with asyncio.timeout(self._settings.ttl / 3):
                        await self._mine.wait()
                except TimeoutError:
                    pass

    async def _claim(self, link: Link, mine: Registration | None) -> bool:
        """Put the key unless it is there, or another's; whether it was so."""
        if self._keys.taken:
            self._tell_taken(mine)
            return True
        if mine is not None and mine.address is not None:
            if self._lease and mine.lease == self._lease:
                self._holder = None
                return True
            if self._put:
                # Whoever took it over has our name and our address, and would take it back.
                self._tell_taken(mine)
                return True
        if self._was_there and mine is None:
            self._was_there = False
            self._standing.tell("discovery_forgotten", key=self._keys.key.decode())
        if not self._lease:
            self._lease, _ = await link.grant(self._settings.ttl)
        revision = 0 if mine is None else mine.revision
        if await link.put(self._keys.key, self._me.address.encode(), self._lease, revision):
            self._put = self._was_there = True
        return False

    def _tell_taken(self, mine: Registration | None) -> None:
        if mine is not None and self._holder != (mine.address, mine.lease):
            self._holder = (mine.address, mine.lease)
            self._standing.tell("discovery_name_taken", peer=self._me.name, address=mine.address)

    def _pass_over(self, what: str, why: str) -> None:
        self._standing.tell("discovery_passed_over", peer=what, reason=why)


class _Pauses:
    """Seconds between attempts: each about twice the last, at a moment that no other daemon shares."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._next = first

    def next(self) -> float:
        """The next one."""
        pause = self._next
        self._next = min(pause * 2, self._longest)
        return pause * random.uniform(0.5, 1.0)  # noqa: S311

    def reset(self) -> None:
        """From the shortest again."""
        self._next = self._first
