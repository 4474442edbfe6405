"""Who is in the cluster: a peer, a list of peers as an operator writes it, and what changed between two sets.

Decides which texts name a peer, and what joining, leaving and moving mean.  Knows no ring and no network: a
host's name is never looked up here, and nobody knows whether a peer is alive.

A peer's name is what it is; its address is only where it is found now.  So that hosts given the same list in
different spellings agree on the names, an address has one spelling here: host names in lower case, IPv6 in its
short form, ports without leading zeros.
"""

from __future__ import annotations

import re
from collections.abc import Set
from ipaddress import IPv6Address
from typing import NamedTuple

MAX_NAME = 253
"""The longest name, in characters; also the longest host name in DNS."""

_ADDRESS = re.compile(r"(?:\[([\w:.%-]+)\]|([\w.-]{1,253})):([0-9]+)", re.IGNORECASE | re.ASCII)
_LAST_PORT = 65_535


class Peer(NamedTuple):
    """One daemon of the cluster.

    name: its identity, which alone places it on the ring.
    address: "host:port" of its gRPC listener, an IPv6 host in brackets.
    """

    name: str
    address: str


class Change(NamedTuple):
    """What turns one set of peers into another.  moved: known by name, now at this other address."""

    joined: frozenset[Peer]
    left: frozenset[Peer]
    moved: frozenset[Peer]

    def __bool__(self) -> bool:
        """Whether anything changed at all."""
        return bool(self.joined or self.left or self.moved)


def change(before: Set[Peer], after: Set[Peer]) -> Change:
    """What changed; either set holds a name once."""
    old = dict(before)
    new = dict(after)
    return Change(
        joined=frozenset(peer for peer in after if peer.name not in old),
        left=frozenset(peer for peer in before if peer.name not in new),
        moved=frozenset(peer for peer in after if old.get(peer.name, peer.address) != peer.address),
    )


def find(members: Set[Peer], name: str, address: str) -> Peer | None:
    """The member at that address, else the one of that name."""
    by_address = next((peer for peer in members if peer.address == address), None)
    return by_address or next((peer for peer in members if peer.name == name), None)


def parse_peers(text: str) -> frozenset[Peer]:
    """The peers of "host:port,name=host:port,..."; without a name, the address is the name.

    Spaces around a part, a name or an address do not matter, nor does a peer given twice; no text is no peers.
    Raises ValueError with one line that names the part at fault.
    """
    if not text.strip():
        return frozenset()
    by_name: dict[str, Peer] = {}
    by_address: dict[str, Peer] = {}
    for part in text.split(","):
        peer = _peer(part.strip(), text)
        first = by_name.setdefault(peer.name, peer)
        if first != peer:
            raise ValueError(f"peer {peer.name!r} has two addresses, {first.address} and {peer.address}")
        # One daemon under two names would be handed another's share of the keys, and know itself by one name only.
        first = by_address.setdefault(peer.address, peer)
        if first != peer:
            raise ValueError(f"address {peer.address} has two names, {first.name!r} and {peer.name!r}")
    return frozenset(by_name.values())


def _peer(part: str, text: str) -> Peer:
    # Most often a variable that was not set; passing over it would make a ring that the other hosts don't share.
    if not part:
        raise ValueError(f"a peer is empty in {text.strip()!r}")
    name, separator, address = part.rpartition("=")
    name = name.strip()
    address = _address(address.strip(), part)
    if not separator:
        return Peer(address, address)
    if not name.isprintable() or "=" in name or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"peer {part!r}: a name has 1 to {MAX_NAME} printable characters, no comma and no =")
    return Peer(name, address)


def _address(address: str, part: str) -> str:
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"peer {part!r} is not host:port or name=host:port, an IPv6 host in brackets")
    ipv6, host, port = found.groups()
    # Few digits first: int() of a long text is slow, and of a very long one an error of its own.
    digits = port.lstrip("0")
    if not digits or len(digits) > len(str(_LAST_PORT)) or int(digits) > _LAST_PORT:
        raise ValueError(f"peer {part!r}: a port lies in 1..{_LAST_PORT}")
    if ipv6 is None:
        return f"{host.lower()}:{digits}"
    try:
        ip = IPv6Address(ipv6)
    except ValueError:
        raise ValueError(f"peer {part!r}: {ipv6!r} is not an IPv6 address") from None
    # Python 3.13 began to write ::ffff:7f00:1 as ::ffff:127.0.0.1; written as the IPv4 address that it means, every
    # version agrees.
    return f"{ip.ipv4_mapped}:{digits}" if ip.ipv4_mapped else f"[{ip}]:{digits}"
