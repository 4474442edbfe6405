"""A daemon as a pod: what its settings and the downward API make of it, and what deploy/kubernetes gives it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cluster_link.discovery.kubernetes import Myself
from cluster_link.discovery.reflector import Snapshot
from cluster_link.discovery.source import Standing
from cluster_link.membership import Peer
from sidecar.config import ConfigError, load
from sidecar.discovery import identity, open_source
from sidecar.pods import myself
from tests.daemons import DaemonProcess

DEPLOY = Path(__file__).parent.parent / "deploy" / "kubernetes"
POD = {
    "POD_UID": "u1",
    "POD_NAME": "app-1",
    "POD_NAMESPACE": "my-app",
    "POD_IP": "10.0.0.1",
    "POD_IPS": "10.0.0.1,fd00::1",
    "NODE_NAME": "n1",
}
SETTINGS = {"discovery": "kubernetes", "listen": "0.0.0.0:1051"}


def made(environ: dict[str, str] = POD, **settings: str) -> Myself:
    """How a daemon of these knows itself."""
    return myself(load(SETTINGS | settings, {})[0], environ)


def test_a_pod() -> None:
    """Its uid is its name, POD_IP and the port of `listen` its address; it knows all its addresses."""
    peer = Peer("u1", "10.0.0.1:1051")
    assert made() == Myself(peer, "u1", frozenset({"10.0.0.1:1051", "[fd00::1]:1051"}))
    assert identity(load(SETTINGS, {})[0], POD) == peer
    assert made(POD | {"POD_IP": "fd00::1"}).peer.address == "[fd00::1]:1051"
    assert made(advertise="Example.org:2051").peer.address == "example.org:2051"
    assert made(kubernetes_identity="node").peer.name == "n1"
    assert made(kubernetes_identity="pod").peer.name == "app-1"


@pytest.mark.parametrize(
    ("missing", "settings", "reason"),
    [
        ("POD_UID", {}, "kubernetes_identity: uid needs the variable POD_UID"),
        ("NODE_NAME", {"kubernetes_identity": "node"}, "kubernetes_identity: node needs the variable NODE_NAME"),
        ("POD_IP", {}, "advertise: needs a host:port where the variable POD_IP holds no IP address"),
        ("", {"listen": "unix:/run/s"}, "advertise: is needed where `listen` is a path"),
        ("POD_NAMESPACE", {}, "kubernetes_namespace: is needed where the variable POD_NAMESPACE is missing"),
    ],
)
def test_what_is_missing(missing: str, settings: dict[str, str], reason: str) -> None:
    """One line names the setting, and the variable."""
    config, _ = load(SETTINGS | settings, {})
    environ = {name: value for name, value in POD.items() if name != missing}
    standing = Standing("kubernetes", lambda: 0.0, lambda event, **_: None)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        open_source(config, Peer("u1", "x:1"), standing, environ)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kubernetes_namespace", "My"),
        ("kubernetes_service", "-a"),
        ("kubernetes_service", "a" * 64),
        ("kubernetes_port", "a b"),
        ("kubernetes_identity", "ip"),
        ("kubernetes_kubeconfig", "a\0b"),
    ],
)
def test_settings_that_cannot_be(setting: str, value: str) -> None:
    """Refused by name."""
    with pytest.raises(ConfigError, match=f"--{setting.replace('_', '-')}: must be"):
        load(SETTINGS | {setting: value}, {})


def test_a_daemon_that_lacks_a_variable_does_not_start(
    start_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says which, and ends with status 2."""
    monkeypatch.delenv("POD_UID", raising=False)
    with pytest.raises(AssertionError, match="needs the variable POD_UID"):
        start_daemon("--discovery", "kubernetes", "--listen", "127.0.0.1:1")


HERE, THERE = Peer("u1", "10.0.0.1:1051"), Peer("u2", "10.0.0.2:1051")
BARE = Peer("10.0.0.1:1051", "10.0.0.1:1051")


@pytest.mark.parametrize(
    ("members", "leaving", "seen", "listed"),
    [
        ({HERE, THERE}, set(), {HERE, THERE}, True),
        ({THERE}, set(), {HERE, THERE}, False),
        (set(), set(), {HERE}, False),
        ({THERE}, {"u1", "10.0.0.1:1051"}, {THERE}, True),
        (set(), {"u1"}, set(), True),
        ({Peer("u1", "[fd00::1]:1051")}, set(), {Peer("u1", "[fd00::1]:1051")}, True),  # the other family
        ({BARE, THERE}, set(), {BARE, THERE}, True),  # slices without targetRef
        ({Peer("u0", "10.0.0.1:1051")}, set(), {Peer("u0", "10.0.0.1:1051"), HERE}, False),  # had this address before
        ({THERE}, {"u0", "10.0.0.1:1051"}, {HERE, THERE}, False),  # so had this one, which is leaving
    ],
)
def test_finding_itself(members: set[Peer], leaving: set[str], seen: set[Peer], listed: bool) -> None:
    """By its uid; by an address only where slices name nobody; not there yet, it adds itself."""
    snapshot = Snapshot(frozenset(members), frozenset(leaving))
    assert made().seen_in(snapshot) == (frozenset(seen), listed)


def documents(name: str) -> list[dict[str, Any]]:
    """What a file of ours holds."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.mark.parametrize("version", ["1.33", "1.36"])
@pytest.mark.parametrize("name", sorted(path.name for path in DEPLOY.glob("*.yaml")))
def test_files_are_what_kubernetes_takes(name: str, version: str) -> None:
    """Strictly: no field that it does not know."""
    assert documents(name)
    for document in documents(name):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_files_fit_the_daemon() -> None:
    """The Service is the default's, its selector and port are the pod's, whose variables the daemon takes."""
    service, role, binding = documents("peers.yaml")
    (deployment,) = documents("pod.yaml")
    template = deployment["spec"]["template"]
    (sidecar,) = template["spec"]["initContainers"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert service["spec"]["publishNotReadyAddresses"] is True
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] == sidecar["ports"][0]["containerPort"]
    assert [rule["verbs"] for rule in role["rules"]] == [["list", "watch"]]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    given = {entry["name"]: entry.get("value") or "given" for entry in sidecar["env"]}
    assert {"POD_IP", "POD_IPS", "POD_NAME", "POD_NAMESPACE", "POD_UID", "NODE_NAME"} <= set(given)
    config, _ = load({}, {name: value for name, value in given.items() if name.startswith("SIDEGATE_")})
    assert config.discovery == "kubernetes"
    assert config.kubernetes_service == service["metadata"]["name"]
    assert config.kubernetes_port == port["name"]
    assert config.listen.endswith(f":{port['targetPort']}")
    socket = {entry["name"]: entry.get("value") for entry in template["spec"]["containers"][0]["env"]}
    assert os.path.dirname(socket["SIDEGATE_SOCKET"]) == sidecar["volumeMounts"][0]["mountPath"]
