"""A client for each current peer, made when it is first asked for and closed when it is no peer any more.

Decides which clients live.  Knows no ring and no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from cluster_link.membership import Peer
from cluster_link.peer_client import Codec, PeerClient, Settings, Trace

if TYPE_CHECKING:
    from cluster_link.tls import Tls

_FINISH = 2.0
"""Seconds that requests under way to a peer that left may take."""


class PeerPool:
    """The links of one node; what each is made with stands at PeerClient."""

    def __init__(
        self,
        codecs: Sequence[Codec],
        settings: Settings,
        report: Callable[..., None],
        trace: Trace | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._codecs = codecs
        self._settings = settings
        self._report = report
        self._trace = trace
        self._tls = tls
        self._clients: dict[str, PeerClient] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def client(self, peer: Peer) -> PeerClient:
        """The link to `peer`; opened by its first request."""
        client = self._clients.get(peer.name)
        if client is None:
            client = PeerClient(peer, self._codecs, self._settings, self._report, self._trace, self._tls)
            self._clients[peer.name] = client
        return client

    def keep(self, peers: Iterable[Peer]) -> None:
        """Close the links to all but `peers`; a peer whose address changed gets a new one."""
        wanted = set(peers)
        for name, client in list(self._clients.items()):
            if client.peer not in wanted:
                del self._clients[name]
                task = asyncio.get_running_loop().create_task(client.close(_FINISH))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    def renew(self) -> None:
        """Have every link go on over a new channel; see PeerClient.renew."""
        for client in self._clients.values():
            client.renew()

    def clients(self) -> list[PeerClient]:
        """Every open link."""
        return list(self._clients.values())

    async def close(self, grace: float) -> None:
        """Finish and close all links."""
        closing = [client.close(grace) for client in self._clients.values()]
        self._clients.clear()
        await asyncio.gather(*closing, *self._leaving, return_exceptions=True)
