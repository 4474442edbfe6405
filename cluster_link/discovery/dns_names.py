"""Which texts name a place in DNS to find peers at.

Decides how such a name is written.  Knows no resolver, so that settings can be checked without one.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import NamedTuple

from cluster_link.membership import parse_peers

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?", re.IGNORECASE | re.ASCII)
_SERVICE = re.compile(rf"_{_LABEL}\._(?:tcp|udp)\.({_HOST.pattern})", re.IGNORECASE | re.ASCII)


class DnsName(NamedTuple):
    """host: the name asked for, in lower case.  port: of the peers at its addresses; None: its SRV records tell."""

    host: str
    port: int | None

    def __str__(self) -> str:
        return self.host if self.port is None else f"{self.host}:{self.port}"


def parse_names(text: str) -> tuple[DnsName, ...]:
    """The names of "host:port,_service._tcp.host,...": addresses (A, else AAAA) with a port, or SRV records.

    One given twice counts once.  Raises ValueError with one line that names the part at fault.
    """
    names: dict[DnsName, None] = {}
    for part in text.split(","):
        names[_name(part.strip())] = None
    return tuple(names)


def _name(part: str) -> DnsName:
    if _SERVICE.fullmatch(part) and len(part) <= 253:
        return DnsName(part.lower(), None)
    host, _, port = part.rpartition(":")
    if not _HOST.fullmatch(host) or len(host) > 253 or _is_ip(host):
        raise ValueError(f"{part!r} is not host:port or _service._tcp.host")
    # In the one spelling that peers have, and within a port's bounds.
    (peer,) = parse_peers(f"{host}:{port}")
    host, _, port = peer.address.rpartition(":")
    return DnsName(host, int(port))


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
