"""Questions to DNS: addresses of a host, services at a name, and how long the answers hold.

Decides which records are asked for, and what is an answer at all; dnspython asks.  Knows no peer.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver

_LIFETIME = 5.0
"""Seconds for one question, all servers and tries together."""
_TRY = 2.0
"""Seconds for one try at one server."""


class LookupFailed(Exception):
    """No answer that could be used; the text is one line for operators."""


class Answer(NamedTuple):
    """What was found, and for how many seconds that holds (the lowest TTL on the way to it)."""

    found: tuple[Any, ...]
    ttl: float


class Lookup:
    """Asks the servers of /etc/resolv.conf, as it is at each question, with its search list; or `server` alone.

    server: (IP address, port), or None.  conf: another file in the form of resolv.conf.
    """

    def __init__(self, server: tuple[str, int] | None = None, conf: str = "/etc/resolv.conf") -> None:
        self._server = server
        self._conf = conf

    async def addresses(self, host: str) -> Answer:
        """IP addresses of a host: those of its A records, else of its AAAA records.  Raises LookupFailed.

        Not both: a daemon that has one of each would be two peers.
        """
        resolver = await self._resolver()
        for kind in ("A", "AAAA"):
            answer = await _ask(resolver, host, kind)
            if answer.rrset is not None:
                return Answer(tuple(sorted(record.address for record in answer)), _ttl(answer))
        raise LookupFailed(f"{host} has no address")

    async def services(self, name: str) -> Answer:
        """(target, port) of each SRV record.  Raises LookupFailed.  Source: RFC 2782."""
        answer = await _ask(await self._resolver(), name, "SRV")
        if answer.rrset is None:
            raise LookupFailed(f"{name} has no SRV record")
        # A target of "." says that there is no such service here.
        found = {(record.target.to_text(), record.port) for record in answer if record.target != dns.name.root}
        if not found:
            raise LookupFailed(f"{name} has no service behind it")
        return Answer(tuple(sorted(found)), _ttl(answer))

    async def _resolver(self) -> dns.asyncresolver.Resolver:
        if self._server is None:
            try:
                # Off the loop, and each time: the file may change while the daemon runs, and lie on a slow disk.
                resolver = await asyncio.to_thread(dns.asyncresolver.Resolver, self._conf)
            except (dns.exception.DNSException, OSError) as error:
                raise LookupFailed(f"{self._conf}: {error}") from None
        else:
            resolver = dns.asyncresolver.Resolver(configure=False)
            resolver.nameservers = [self._server[0]]
            resolver.port = self._server[1]
        resolver.lifetime = _LIFETIME
        resolver.timeout = _TRY
        return resolver


async def _ask(resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> dns.resolver.Answer:
    try:
        return await resolver.resolve(dns.name.from_text(name, None), kind, raise_on_no_answer=False, search=True)
    except dns.resolver.NXDOMAIN:
        raise LookupFailed(f"{name} does not exist") from None
    except dns.resolver.LifetimeTimeout:
        servers = ", ".join(str(server) for server in resolver.nameservers)
        raise LookupFailed(f"{name}: no answer from {servers} in {_LIFETIME:.0f} s") from None
    except (dns.exception.DNSException, OSError) as error:
        raise LookupFailed(f"{name}: {' '.join(str(error).split()) or type(error).__name__}") from None


def _ttl(answer: dns.resolver.Answer) -> float:
    return float(answer.chaining_result.minimum_ttl)
