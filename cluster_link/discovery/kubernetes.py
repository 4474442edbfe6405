"""Members by Kubernetes: a thread keeps a copy of a Service's EndpointSlices, and the loop is told who is in it.

Decides how this daemon finds itself among them, and what its not being there means.  What to ask the server and when
is reflector.py's, what slices mean is endpoints.py's, and how the server is spoken to is kube_api.py's.

A pod appears in its Service's slices 0.1 to 1 s after it has an address: until then this daemon adds itself.  Once it
is listed as terminating the set comes without it: others route past it by then, and its buckets are to move.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from cluster_link.discovery.connections import Connections
from cluster_link.discovery.endpoints import Rules
from cluster_link.discovery.reflector import Api, Heard, Lost, Reflector, Snapshot
from cluster_link.discovery.source import Standing
from cluster_link.membership import Peer

_HEARD_EVERY = 1.0
"""Seconds between two signs of life that the loop is told of; each event of a rollout would be one."""
_REST = 0.0002
"""Seconds: long enough for the loop's thread to wake up and take the interpreter, which sleep(0) is not."""
_TO_END = 1.0
"""Seconds that the thread may take to end; it is late only in the midst of connecting, and ends by itself then."""


class Myself(NamedTuple):
    """How this daemon knows itself in a snapshot.  peer: as it would be listed; pods: its uid, if it knows it.
    addresses: all of its own, as in Peer."""

    peer: Peer
    pod: str
    addresses: frozenset[str]

    def seen_in(self, snapshot: Snapshot) -> tuple[frozenset[Peer], bool]:
        """The members, this daemon among them unless it is leaving, and whether it is listed."""
        members = snapshot.members
        for peer in members:
            # By an address only where slices name nobody else: addresses are given to the next pod within seconds.
            unnamed = not self.pod or peer.name == peer.address
            if peer.name == self.peer.name or (unnamed and peer.address in self.addresses):
                return members, True
        if self.pod in snapshot.leaving or (not self.pod and self.addresses & snapshot.leaving):
            return members, True
        return members | {self.peer}, False


def connect_to(
    namespace: str, service: str, kubeconfig: str, environ: Mapping[str, str]
) -> Callable[[Connections], Api]:
    """How the thread reaches the server; see KubeApi."""

    def connect(connections: Connections) -> Api:
        from cluster_link.discovery.kube_api import KubeApi

        return KubeApi(namespace, service, kubeconfig, environ, connections)

    return connect


class Kubernetes:
    """A Source (source.py).  connect: makes the server's API, in the thread; raises Trouble."""

    def __init__(self, connect: Callable[[Connections], Api], rules: Rules, me: Myself, standing: Standing) -> None:
        self._connect = connect
        self._rules = rules
        self._me = me
        self._standing = standing
        # Kept from one listening to the next, as they are compared with what is found then.
        self._had: frozenset[Peer] = frozenset()

    async def members(self) -> AsyncIterator[frozenset[Peer]]:
        """See Source."""
        listening = _Listening(self._connect, self._rules, self._me, self._standing, self._had)
        try:
            while True:
                snapshot, members = await listening.next()
                self._had = snapshot.members
                yield members
        finally:
            await listening.stop()

    async def leave(self) -> None:
        """See Source; a pod that ends is taken out of the slices by Kubernetes itself."""


class _Listening:
    """One thread, from start to stop.  What it finds is handed to the loop, where alone `next`, `stop` and the
    methods below them run."""

    def __init__(
        self,
        connect: Callable[[Connections], Api],
        rules: Rules,
        me: Myself,
        standing: Standing,
        had: frozenset[Peer],
    ) -> None:
        self._me = me
        self._standing = standing
        self._loop = asyncio.get_running_loop()
        self._connections = Connections()
        self._over = threading.Event()
        self._reflector = Reflector(
            lambda: connect(self._connections),
            rules,
            self._tell,
            self._over.wait,
            time.monotonic,
            random.uniform,
            rest=lambda: time.sleep(_REST),
            had=had,
        )
        self._heard_at = 0.0
        self._news = asyncio.Event()
        self._newest: tuple[Snapshot, frozenset[Peer]] | None = None
        self._broken: Exception | None = None
        self._listed = False
        self._thread = threading.Thread(target=self._work, name="discovery", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._reflector.run()
        except Exception as error:  # to be told by who listens, not printed by the thread's own end
            self._post(self._break, error)

    def _tell(self, told: Snapshot | Lost | Heard) -> None:
        """In the thread."""
        if isinstance(told, Snapshot):
            self._post(self._take, told, *self._me.seen_in(told))
        elif isinstance(told, Lost):
            self._heard_at = 0.0
            self._post(self._lose, told.why)
        elif time.monotonic() - self._heard_at >= _HEARD_EVERY:
            self._heard_at = time.monotonic()
            self._post(self._hear)

    def _post(self, work: Callable[..., None], *arguments: object) -> None:
        if not self._over.is_set():
            try:
                self._loop.call_soon_threadsafe(work, *arguments)
            except RuntimeError:
                self._over.set()  # the loop is closed: nobody listens any more

    def _take(self, snapshot: Snapshot, members: frozenset[Peer], listed: bool) -> None:
        self._listed = listed
        self._newest = (snapshot, members)
        self._news.set()
        self._hear()

    def _hear(self) -> None:
        self._standing.heard(self._listed)

    def _lose(self, why: str) -> None:
        self._standing.lost(why)

    def _break(self, error: Exception) -> None:
        self._broken = error
        self._news.set()

    async def next(self) -> tuple[Snapshot, frozenset[Peer]]:
        """The newest snapshot, with this daemon in it; raises what ended the thread."""
        while self._newest is None:
            if self._broken is not None:
                raise self._broken
            self._news.clear()
            await self._news.wait()
        newest, self._newest = self._newest, None
        return newest

    async def stop(self) -> None:
        """Have the thread end, whatever it waits for."""
        self._over.set()
        self._connections.cut()
        await asyncio.to_thread(self._thread.join, _TO_END)
