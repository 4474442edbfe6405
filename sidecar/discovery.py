"""The daemon's ear for its cluster: a source is listened to, and what it tells becomes the ring.

Decides that the last known ring stands while a source is away, that a source which ends is opened anew, and what an
empty set means: nothing.  How each source is spoken to is its own file's matter (cluster_link/discovery/), imported
only when it is chosen.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cluster_link.discovery.dns_names import parse_names
from cluster_link.discovery.gather import Gather
from cluster_link.discovery.source import Source, Standing
from cluster_link.errors import BadCredentials
from cluster_link.membership import Peer, parse_peers
from sidecar.cluster import listed
from sidecar.config import Config, ConfigError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0
_TO_LEAVE = 1.0
"""Seconds that a source may take to make this daemon known as gone."""


def identity(config: Config, environ: Mapping[str, str]) -> Peer | None:
    """This daemon as its source will name it; None: it looks for itself in a list.  Raises ConfigError."""
    if config.discovery == "static":
        return None
    if config.discovery == "kubernetes":
        from sidecar.pods import myself

        return myself(config, environ).peer
    (here,) = parse_peers(config.advertise or config.listen)
    return Peer(config.node, here.address) if config.discovery == "etcd" else here


def open_source(config: Config, me: Peer | None, standing: Standing, environ: Mapping[str, str]) -> Source:
    """The source that `discovery` chose; raises ConfigError for one that cannot be had here."""
    if me is None:
        from cluster_link.discovery.static_file import StaticFile

        return StaticFile(config.peers_file, lambda members: listed(members, config) is not None, standing)
    if config.discovery == "kubernetes":
        from sidecar.pods import open_kubernetes

        return open_kubernetes(config, standing, environ)
    if config.discovery == "etcd":
        return _open_etcd(config, me, standing)
    from cluster_link.discovery.dns import Dns
    from cluster_link.discovery.dns_lookup import Lookup

    host, _, port = config.dns_server.rpartition(":")
    lookup = Lookup((host.strip("[]"), int(port)) if host else None)
    bounds = (config.dns_min_interval / 1000, config.dns_max_interval / 1000)
    return Dns(parse_names(config.dns_names), me, standing, lookup, *bounds)


def _open_etcd(config: Config, me: Peer, standing: Standing) -> Source:
    from cluster_link.discovery.etcd import Etcd, Settings
    from cluster_link.discovery.etcd_link import Files

    files = Files(config.etcd_ca, config.etcd_cert, config.etcd_key, config.etcd_user, config.etcd_password_file)
    try:
        files.read()
    except BadCredentials as error:
        raise ConfigError(str(error)) from None
    endpoints = config.etcd_endpoints.split(",")
    return Etcd(Settings(endpoints, config.etcd_prefix, config.etcd_ttl, files.read), me, standing)


class Discovery:
    """One source, from start to stop.

    follow: routes by a set from now on.  log: told of faults of ours.  gather: how long changes are gathered.
    longest_pause: seconds before a source that ended is opened again, at most.
    """

    def __init__(
        self,
        source: Source,
        standing: Standing,
        follow: Callable[[frozenset[Peer]], Awaitable[None]],
        log: Any,
        gather: Gather | None = None,
        longest_pause: float = _LONGEST_PAUSE,
    ) -> None:
        self.standing = standing
        self._source = source
        self._follow = follow
        self._log = log
        self._gather = gather or Gather()
        self._longest_pause = longest_pause
        self._told = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.known = asyncio.Event()

    def start(self) -> None:
        """Listen from now on; `known` is set when the first set has become the ring."""
        self._tasks = [asyncio.create_task(work) for work in (self._listen(), self._take())]

    def took(self, members: frozenset[Peer]) -> None:
        """This set, which the source has or will tell, has become the ring by another way."""
        self._gather.took(members)
        self.standing.changed()
        self.known.set()

    async def leave(self) -> None:
        """Have others find this daemon no more, within a second."""
        try:
            async with asyncio.timeout(_TO_LEAVE):
                await self._source.leave()
        except TimeoutError:
            self._log.warning("discovery_not_left", source=self.standing.name)

    async def stop(self) -> None:
        """Listen no more; the ring stays as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE
        while True:
            told = self._source.members()
            try:
                async for members in told:
                    pause = _FIRST_PAUSE
                    # No source lists nobody in earnest: this daemon asks, so it is there.
                    if members:
                        self._gather.offer(members, loop.time())
                        self._told.set()
                self.standing.lost("the source ended by itself")
            except Exception as error:  # a fault of ours in a source must not end the limiting
                self._log.error("discovery_failed", source=self.standing.name, error=repr(error), exc_info=True)
                self.standing.lost(f"a fault of ours: {error!r}")
            finally:
                close = getattr(told, "aclose", None)
                if close is not None:
                    await close()
            await asyncio.sleep(random.uniform(0, min(pause, self._longest_pause)))  # noqa: S311
            pause *= 2

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = self._gather.due
            if due is None:
                self._told.clear()
                await self._told.wait()
                continue
            await asyncio.sleep(max(0.0, due - loop.time()))
            members = self._gather.take(loop.time())
            if members is not None:
                await self._follow(members)
                self.standing.changed()
                self.known.set()
