"""Who is in the cluster by Kubernetes' EndpointSlices: what one slice says of pods, and what all of them say together.

Decides who is a member, what it is called on the ring, which of its addresses counts, and what an endpoint that
cannot be used is: nobody.  Knows no server, no order of events and no time: the same slices are the same members,
however the endpoints are dealt to them.

A member is listed and not terminating.  `ready` is never read: an application that is not ready must not throw a
healthy sidecar off the ring.  Whoever is terminating hands over: no pod comes back from that, so one slice that says
so outweighs another that does not yet.  An endpoint may stand in two slices for a moment.

Fields, and what a missing one means: discovery.k8s.io/v1 EndpointSlice, as recorded (tests/cases/kubernetes).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Any, NamedTuple

from cluster_link.membership import MAX_NAME, Peer

IDENTITIES = ("uid", "node", "pod")
"""What a pod is called on the ring: by its own uid, by the node it runs on, or by its name."""
_Family = type[IPv4Address] | type[IPv6Address]
_FAMILIES: dict[str, _Family] = {"IPv4": IPv4Address, "IPv6": IPv6Address}
_LAST_PORT = 65_535
_REST_EVERY = 128
"""Endpoints looked at between two rests: about 0.2 ms."""


class Rules(NamedTuple):
    """How endpoints become peers.

    port: the name of the Service's port that peers call.  identity: one of IDENTITIES; where an endpoint lacks it, its
    uid stands in, and where that is missing too, its address.
    ipv6: of a pod with addresses of both families, the IPv6 one counts.
    """

    port: str
    identity: str = "uid"
    ipv6: bool = False


class Endpoint(NamedTuple):
    """What one slice says of one pod.  pod: what its entries are joined by: its uid, else its address and port.
    family: 0 for the preferred one, else 1.  address: as in Peer."""

    pod: str
    name: str
    terminating: bool
    family: int
    address: str


def endpoints_of(
    endpoint_slice: Mapping[str, Any], rules: Rules, rest: Callable[[], object] = lambda: None
) -> tuple[Endpoint, ...]:
    """What this slice says; nothing, if it has not the port or if its addresses are no IP addresses.

    rest: called every 0.2 ms or so, here and below, so that another thread can have the interpreter.
    """
    parse = _FAMILIES.get(endpoint_slice.get("addressType") or "")
    port = _port(endpoint_slice.get("ports") or (), rules.port)
    found = []
    if parse is not None and port is not None:
        family = int((parse is IPv6Address) != rules.ipv6)
        for number, given in enumerate(endpoint_slice.get("endpoints") or ()):
            if number % _REST_EVERY == 0:
                rest()
            endpoint = _endpoint(given, parse, port, family, rules.identity)
            if endpoint is not None:
                found.append(endpoint)
    return tuple(found)


def members_of(endpoints: Collection[Endpoint], rest: Callable[[], object] = lambda: None) -> frozenset[Peer]:
    """The members, each name once.

    endpoints: of all slices.  Where pods share a name (two on a node while a DaemonSet surges), the one whose address
    sorts first bears it, so that every daemon chooses alike.
    """
    leaving = {endpoint.pod for endpoint in endpoints if endpoint.terminating}
    best: dict[str, tuple[int, str]] = {}
    for number, endpoint in enumerate(endpoints):
        if number % _REST_EVERY == 0:
            rest()
        if endpoint.pod not in leaving:
            rank = (endpoint.family, endpoint.address)
            best[endpoint.name] = min(rank, best.get(endpoint.name, rank))
    members = set()
    for number, (name, (_, where)) in enumerate(best.items()):
        if number % _REST_EVERY == 0:
            rest()
        members.add(Peer(name, where))
    rest()
    return frozenset(members)


def leaving_of(endpoints: Iterable[Endpoint]) -> frozenset[str]:
    """The pods (Endpoint.pod) and the addresses that are listed as terminating."""
    return frozenset(
        text for endpoint in endpoints if endpoint.terminating for text in (endpoint.pod, endpoint.address)
    )


def address(ip: str, port: int) -> str | None:
    """A Peer's address from an IP address of either family in any spelling; None if it is none."""
    for parse in _FAMILIES.values():
        try:
            return _spelled(parse(ip), port)
        except AddressValueError:
            continue
    return None


def _port(ports: Iterable[Mapping[str, Any]], name: str) -> int | None:
    for port in ports:
        number = port.get("port")
        # No protocol means TCP; a Service may have the same name for UDP only in another slice.
        if (port.get("name") or "") == name and (port.get("protocol") or "TCP") == "TCP":
            return number if isinstance(number, int) and 0 < number <= _LAST_PORT else None
    return None


def _endpoint(endpoint: Mapping[str, Any], parse: _Family, port: int, family: int, identity: str) -> Endpoint | None:
    # The first address alone counts: the rest are for those who know what the slice's maker meant by them.
    try:
        where = _spelled(parse((endpoint.get("addresses") or ("",))[0]), port)
    except AddressValueError:
        return None
    target = endpoint.get("targetRef") or {}
    pod = target.get("uid") or where
    name = {"node": endpoint.get("nodeName"), "pod": target.get("name")}.get(identity) or pod
    if not isinstance(name, str) or not isinstance(pod, str) or len(name) > MAX_NAME:
        return None
    conditions = endpoint.get("conditions") or {}
    return Endpoint(pod, name, bool(conditions.get("terminating")), family, where)


def _spelled(ip: IPv4Address | IPv6Address, port: int) -> str:
    if isinstance(ip, IPv4Address):
        return f"{ip}:{port}"
    return f"{ip.ipv4_mapped}:{port}" if ip.ipv4_mapped else f"[{ip}]:{port}"
