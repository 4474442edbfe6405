"""From EndpointSlices to the members of a cluster: tables, and any way to deal the same pods to slices."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_link.discovery.endpoints import Endpoint, Rules, address, endpoints_of, leaving_of, members_of
from cluster_link.membership import Peer

CASES = Path(__file__).parent / "cases" / "kubernetes"
GRPC = Rules("grpc")
T, F = True, False


def end(ip: str = "10.0.0.1", uid: str | None = "u1", node: str | None = "n1", **conditions: bool) -> dict[str, Any]:
    """An endpoint."""
    target = None if uid is None else {"kind": "Pod", "name": f"pod-{uid}", "uid": uid}
    return {"addresses": [ip], "conditions": conditions, "targetRef": target, "nodeName": node}


def a_slice(*ends: dict[str, Any], family: str = "IPv4", port: int = 1051, name: str | None = "grpc") -> dict[str, Any]:
    """A slice of these."""
    ports = [{"name": "http", "port": 80, "protocol": "TCP"}, {"name": name, "port": port, "protocol": "TCP"}]
    return {"addressType": family, "endpoints": list(ends), "ports": ports}


def members(*slices: dict[str, Any], rules: Rules = GRPC) -> set[Peer]:
    """Who they say is in."""
    return set(members_of(list(chain.from_iterable(endpoints_of(one, rules) for one in slices))))


@pytest.mark.parametrize(
    ("conditions", "member"),
    [
        ({"ready": F, "serving": F, "terminating": F}, T),  # an app that is not ready has a healthy sidecar
        ({"ready": T, "serving": T, "terminating": F}, T),
        ({"ready": F, "serving": T, "terminating": T}, F),
        ({"ready": T, "serving": F, "terminating": T}, F),
        ({}, T),  # missing: not terminating
        ({"terminating": None}, T),
    ],
)
def test_conditions(conditions: dict[str, Any], member: bool) -> None:
    """A member is listed and not terminating."""
    assert members(a_slice(end(**conditions))) == ({Peer("u1", "10.0.0.1:1051")} if member else set())


@pytest.mark.parametrize(
    ("rules", "name"),
    [(GRPC, "u1"), (Rules("grpc", "node"), "n1"), (Rules("grpc", "pod"), "pod-u1")],
)
def test_identity(rules: Rules, name: str) -> None:
    """A pod is called by its uid, its node or its own name."""
    assert members(a_slice(end()), rules=rules) == {Peer(name, "10.0.0.1:1051")}


@pytest.mark.parametrize("identity", ["uid", "node", "pod"])
def test_identity_that_is_missing(identity: str) -> None:
    """The uid stands in, and where that is missing the address: alike on all daemons, as all read the same."""
    rules = Rules("grpc", identity)
    assert members(a_slice(end(uid=None, node=None)), rules=rules) == {Peer("10.0.0.1:1051", "10.0.0.1:1051")}
    if identity == "node":
        assert members(a_slice(end(node=None)), rules=rules) == {Peer("u1", "10.0.0.1:1051")}


@pytest.mark.parametrize(
    "odd",
    [
        {"addressType": "IPv4", "endpoints": None, "ports": None},
        {"addressType": "", "endpoints": None, "ports": None},
        {},
        a_slice(end(), name="other"),
        a_slice(end(), name=None),
        a_slice(end("example.org"), family="FQDN"),
        a_slice(end("example.org")),
        a_slice(end("fd00::1")),  # of another family than its slice says
        a_slice({"addresses": None}),
        a_slice({"addresses": []}),
        a_slice(end(uid="u" * 254)),
        a_slice(end(), port=0),
        a_slice(end(), port=65_536),
        {"addressType": "IPv4", "endpoints": [end()], "ports": [{"name": "grpc", "port": None}]},
        {"addressType": "IPv4", "endpoints": [end()], "ports": [{"name": "grpc", "port": 1, "protocol": "UDP"}]},
    ],
)
def test_nobody(odd: dict[str, Any]) -> None:
    """What cannot be used lists nobody, and does not keep others from being listed."""
    assert members(odd) == set()
    assert members(odd, a_slice(end("10.0.0.2", "u2"))) == {Peer("u2", "10.0.0.2:1051")}


def test_each_slice_has_its_own_number() -> None:
    """A port is known by its name; pods of one Service may have different numbers."""
    found = members(a_slice(end(), port=1), a_slice(end("10.0.0.2", "u2"), port=65_535))
    assert found == {Peer("u1", "10.0.0.1:1"), Peer("u2", "10.0.0.2:65535")}


def test_dual_stack() -> None:
    """Both families' entries of a pod are one peer, at the preferred family's address where there is one."""
    slices = (a_slice(end(), end("10.0.0.2", "u2")), a_slice(end("FD00:0::1"), end("fd00::3", "u3"), family="IPv6"))
    both = {Peer("u2", "10.0.0.2:1051"), Peer("u3", "[fd00::3]:1051")}
    assert members(*slices) == both | {Peer("u1", "10.0.0.1:1051")}
    assert members(*slices, rules=Rules("grpc", ipv6=True)) == both | {Peer("u1", "[fd00::1]:1051")}


def test_a_pod_in_two_slices() -> None:
    """For a moment it may stand in both; terminating in one, it is leaving."""
    assert members(a_slice(end()), a_slice(end())) == {Peer("u1", "10.0.0.1:1051")}
    for slices in ([a_slice(end()), a_slice(end(terminating=T))], [a_slice(end(terminating=T)), a_slice(end())]):
        assert members(*slices) == set()


def test_a_node_whose_pod_is_replaced() -> None:
    """The old pod is terminating, the new one bears the node's name; while both run, all choose the same."""
    rules = Rules("grpc", "node")
    old, new = end("10.0.0.9", "old"), end("10.0.0.1", "new")
    assert members(a_slice(old, new), rules=rules) == members(a_slice(new, old), rules=rules)
    assert members(a_slice(old | {"conditions": {"terminating": T}}, new), rules=rules) == {Peer("n1", "10.0.0.1:1051")}


def test_who_is_leaving() -> None:
    """Both by its uid and by its address."""
    assert leaving_of(endpoints_of(a_slice(end(terminating=T), end("10.0.0.2", "u2")), GRPC)) == {"u1", "10.0.0.1:1051"}


@pytest.mark.parametrize(
    ("ip", "expected"),
    [
        ("10.0.0.1", "10.0.0.1:1"),
        ("fd00:0:0::00a", "[fd00::a]:1"),
        ("::ffff:10.0.0.1", "10.0.0.1:1"),
        ("", None),
        ("host", None),
        ("10.0.0.01", None),
    ],
)
def test_address(ip: str, expected: str | None) -> None:
    """One spelling for each address."""
    assert address(ip, 1) == expected


PODS = st.lists(
    st.builds(
        end,
        ip=st.integers(1, 20).map(lambda n: f"10.0.0.{n}"),
        uid=st.sampled_from([None, *(f"u{n}" for n in range(12))]),
        node=st.sampled_from([None, "n1", "n2", "n3"]),
        ready=st.booleans(),
        terminating=st.booleans(),
    ),
    max_size=20,
)


@given(PODS, st.data(), st.sampled_from(["uid", "node", "pod"]))
def test_any_deal(pods: list[dict[str, Any]], data: st.DataObject, identity: str) -> None:
    """However the pods are dealt to slices, some to several, and in whichever order: the same members, by one name
    each."""
    rules = Rules("grpc", identity)
    expected = members(a_slice(*pods), rules=rules)
    rooms: list[list[dict[str, Any]]] = [[] for _ in range(5)]
    for pod in data.draw(st.permutations(pods)):
        for number in data.draw(st.sets(st.integers(0, 4), min_size=1, max_size=3)):
            rooms[number].append(pod)
    assert members(*(a_slice(*room) for room in data.draw(st.permutations(rooms))), rules=rules) == expected
    assert len(dict(expected)) == len(expected)


def test_recorded_answers() -> None:
    """What a 1.36 server said of one pod, from its first address to its end."""
    listed = json.loads((CASES / "list-empty-service.http").read_text().partition("\n\n")[2])
    assert [members(item) for item in listed["items"]] == [set()]
    lines = (CASES / "watch.http").read_text().partition("\n\n")[2].splitlines()
    told = [endpoints_of(json.loads(line)["object"], GRPC) for line in lines]
    uid = "e8f9545a-b8c6-4632-9947-8e56975952c0"
    pod = Endpoint(uid, uid, False, 0, "10.1.2.3:50051")
    assert told == [(pod,), (pod,), (pod._replace(terminating=True),), (), (), ()]
