"""Peers by DNS: the addresses of a name with a port, or what its SRV records point at.

Decides when names are asked for again, what of an answer is a peer, and that a name which gives no answer keeps the
peers it gave last.  How DNS is asked is dns_lookup.py's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from cluster_link.discovery.dns_lookup import Answer, LookupFailed
from cluster_link.discovery.dns_names import DnsName
from cluster_link.discovery.source import Standing
from cluster_link.membership import Peer, parse_peers

_SPREAD = 0.1
"""The part of a TTL by which one daemon asks later than another whose answer ends at the same moment."""
_AT_ONCE = 16
"""Targets of SRV records that are looked up at a time."""


class Asks(Protocol):
    """dns_lookup.Lookup; both raise LookupFailed."""

    async def addresses(self, host: str) -> Answer: ...

    async def services(self, name: str) -> Answer: ...


class Dns:
    """The source; see source.Source.

    me: this daemon as others find it: its address, by which it is known in answers whatever its name there.
    shortest, longest: seconds between two questions for a name; the TTL decides within these.  While a name gives no
    answer its pause grows from the shortest to the longest.
    """

    def __init__(
        self,
        names: Sequence[DnsName],
        me: Peer,
        standing: Standing,
        lookup: Asks,
        shortest: float,
        longest: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._names = names
        self._me = me
        self._standing = standing
        self._lookup = lookup
        self._shortest = shortest
        self._longest = longest
        self._sleep = sleep
        self._chance = chance
        self._known: dict[DnsName, frozenset[Peer]] = {}
        self._whys: dict[DnsName, str] = {}
        self._few = asyncio.Semaphore(_AT_ONCE)
        self._news = asyncio.Event()

    async def members(self) -> AsyncIterator[frozenset[Peer]]:
        """The union of what all names have given last."""
        tasks = [asyncio.create_task(self._follow(name)) for name in self._names]
        for task in tasks:
            task.add_done_callback(lambda _: self._news.set())
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                for task in tasks:
                    if task.done():
                        task.result()
                found = _once(self._known.values())
                if found:
                    yield found if self._is_in(found) else found | {self._me}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def leave(self) -> None:
        """Nothing: whoever writes the records takes this daemon out of them."""

    def _is_in(self, members: frozenset[Peer]) -> bool:
        return any(self._me.address == peer.address or self._me.name == peer.name for peer in members)

    async def _follow(self, name: DnsName) -> None:
        """Ask for one name again and again: each at its own pace, so that one which gives no answer delays none."""
        targets: dict[tuple[str, int], Peer] = {}
        failed = 0
        while True:
            whys: list[str] = []
            ttl = await self._ask(name, targets, whys)
            self._judge(name, whys)
            self._news.set()
            if whys:
                pause = min(self._longest, self._shortest * 2 ** min(failed, 30)) * (0.5 + self._chance() / 2)
                failed += 1
            else:
                pause = min(self._longest, max(self._shortest, ttl)) * (1 + _SPREAD * self._chance())
                failed = 0
            await self._sleep(pause)

    def _judge(self, name: DnsName, whys: Sequence[str]) -> None:
        """Tell how the source does, now that this name has been asked for."""
        self._whys.pop(name, None)
        listed = self._is_in(_once(self._known.values()))
        if whys:
            # One line, however many hosts are away.
            self._whys[name] = whys[0] if len(whys) == 1 else f"{whys[0]}, and {len(whys) - 1} more"
            self._standing.lost("; ".join(self._whys[name] for name in self._names if name in self._whys))
            self._standing.listed = listed
        elif self._whys:
            self._standing.listed = listed
        else:
            self._standing.heard(listed)

    async def _ask(self, name: DnsName, targets: dict[tuple[str, int], Peer], whys: list[str]) -> float:
        """Take what a name gives now; for how many seconds that holds."""
        try:
            if name.port is None:
                peers, ttl = await self._services(name, targets, whys)
            else:
                answer = await self._lookup.addresses(name.host)
                peers, ttl = [_peer(address, name.port) for address in answer.found], answer.ttl
        except LookupFailed as error:
            whys.append(str(error))
            return 0.0
        if peers:
            self._known[name] = frozenset(peers)
        return ttl

    async def _services(
        self, name: DnsName, targets: dict[tuple[str, int], Peer], whys: list[str]
    ) -> tuple[list[Peer], float]:
        """The peers behind SRV records, which keep their place on the ring whatever their address; one whose address
        is not to be had stays where it was.  targets: where each was found; made new."""
        answer = await self._lookup.services(name.host)
        services = [(target, port) for target, port in answer.found if port]
        if len(services) < len(answer.found):
            whys.append(f"{name.host} names port 0")
        found = await asyncio.gather(*(self._target(target, port, whys) for target, port in services))
        now = {
            service: peer or targets[service]
            for service, (peer, _) in zip(services, found, strict=True)
            if peer or service in targets
        }
        targets.clear()
        targets.update(now)
        return list(now.values()), min([answer.ttl, *(ttl for _, ttl in found)])

    async def _target(self, target: str, port: int, whys: list[str]) -> tuple[Peer | None, float]:
        try:
            async with self._few:
                answer = await self._lookup.addresses(target)
        except LookupFailed as error:
            whys.append(str(error))
            return None, 0.0
        peer = _peer(answer.found[0], port)
        return peer._replace(name=f"{target.rstrip('.').lower()}:{port}"), answer.ttl


def _once(sets: Iterable[frozenset[Peer]]) -> frozenset[Peer]:
    """Their union, each name and each address once: a daemon found in two ways is one peer."""
    by_address: dict[str, Peer] = {}
    for peer in sorted(peer for peers in sets for peer in peers):
        by_address.setdefault(peer.address, peer)
    return frozenset({peer.name: peer for peer in by_address.values()}.values())


def _peer(address: str, port: int) -> Peer:
    # In the one spelling that all daemons agree on.
    (peer,) = parse_peers(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
    return peer
