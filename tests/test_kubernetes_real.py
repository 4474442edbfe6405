"""Discovery by Kubernetes and what only a real control plane does to it: backups, roles, tokens, flow control."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from cluster_link.discovery.connections import Connections
from cluster_link.discovery.endpoints import Rules
from cluster_link.discovery.kube_api import KubeApi
from cluster_link.membership import Peer
from tests.daemons import wait_until
from tests.kube_listener import Listener
from tests.kube_reader import Reader, slices_path
from tests.kube_real import HOME, RealWorld, built

pytestmark = pytest.mark.real_kubernetes

RULES = Rules("grpc", "pod")
ME = Peer("pod-0", "10.1.0.100:1051")
SLICE_SIZE = 3
PATIENCE = 45.0
"""Seconds: after a trouble that lasted, the next try may be half a minute away."""
_FLOW = "/apis/flowcontrol.apiserver.k8s.io/v1"


@pytest.fixture(scope="module")
def opened() -> Iterator[RealWorld]:
    """One control plane for all tests here; four pods are two slices."""
    world = RealWorld(built(), SLICE_SIZE)
    yield world
    world.close()


@pytest.fixture
def world(opened: RealWorld) -> RealWorld:
    """A namespace with a Service, this daemon's own pod, and two others."""
    opened.renew()
    opened.add_service("peers")
    for number in range(3):
        add(opened, number)
    return opened


@pytest.fixture
def listener(world: RealWorld) -> Iterator[Listener]:
    """A source that has told of the world's pods."""
    with Listener(world.kubeconfig, world.namespace, RULES, ME) as listener:
        listener.becomes(pods(0, 1, 2))
        yield listener


def add(world: RealWorld, number: int) -> None:
    """Add pod-<number>."""
    world.add_pod(f"pod-{number}", f"10.1.0.{100 + number}", f"node-{number}")


def pods(*numbers: int) -> set[str]:
    """Their names."""
    return {f"pod-{number}" for number in numbers}


def names(members: frozenset[Peer]) -> set[str]:
    """Of a set that was told."""
    return {peer.name for peer in members}


def says(listener: Listener, what: str, seconds: float = 15.0) -> None:
    """Wait until the source says that it is away, and why."""
    try:
        wait_until(lambda: what in listener.standing.why, f"it says {what}", seconds)
    except AssertionError:
        assert what in listener.standing.why


def test_slices_fill_and_empty(world: RealWorld, listener: Listener) -> None:
    """A scale-up over several slices and a scale-down are followed; who moves to another slice is never missing."""
    for number in range(3, 10):
        add(world, number)
    listener.becomes(pods(*range(10)))
    slices = Reader(world.kubeconfig).slices(world.namespace)["items"]
    assert len(slices) >= 10 / SLICE_SIZE
    before = len(listener.sets) - 1
    for number in range(1, 9):
        world.finish_pod(f"pod-{number}")
    listener.becomes(pods(0, 9))
    for earlier, later in pairwise(listener.sets[before:]):
        assert later <= earlier, "while pods only go, none comes"
        assert pods(0, 9) <= names(later)


def test_restored_from_a_backup(world: RealWorld, listener: Listener) -> None:
    """After a restore, with which versions go backwards, the ring is the backup's, and what changes then is followed,
    though such a change bears a version that another had before.

    A real server says nothing of that: a watch from a version that is not there yet is 200 and silent, and what
    happens before that version is never told.
    """
    copy = world.plane.copy_state()
    for number in range(3, 9):
        add(world, number)
    listener.becomes(pods(*range(9)))
    newest = int(Reader(world.kubeconfig).slices(world.namespace)["metadata"]["resourceVersion"])
    world.plane.restore(copy)
    listener.becomes(pods(0, 1, 2), PATIENCE)
    add(world, 20)
    assert int(Reader(world.kubeconfig).slices(world.namespace)["metadata"]["resourceVersion"]) < newest
    listener.becomes(pods(0, 1, 2, 20))
    world.await_controllers()
    assert all(pods(0, 1, 2) <= names(members) for members in listener.sets)


def test_role_taken_away(world: RealWorld, listener: Listener) -> None:
    """Without its role it keeps the members, and says what is refused; with the role it follows again."""
    world.allow(False)
    # An open watch is not asked whether it may go on; the next one is.
    world.kill()
    world.start()
    says(listener, "403")
    assert "endpointslices" in listener.standing.why
    assert listener.names == pods(0, 1, 2)
    assert listener.standing.state == "away"
    add(world, 3)
    world.allow(True)
    listener.becomes(pods(0, 1, 2, 3), PATIENCE)
    assert listener.standing.state == "current"


def test_token_rotated(world: RealWorld, tmp_path: Path) -> None:
    """A token that has ended is refused (401); its file is read again, and what it holds by then is used."""
    secrets = f"/api/v1/namespaces/{HOME}/secrets"
    file = tmp_path / "token"
    place = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(world.plane.port)}

    def write(secret: str) -> None:
        """A token that is good while this secret is there."""
        world.plane.create(secrets, {"metadata": {"name": secret}})
        file.write_text(world.token(secret))

    def connect(made: Connections) -> KubeApi:
        return KubeApi(world.namespace, "peers", "", place, made, token=str(file), ca=str(world.plane.ca))

    write("first")
    with Listener(world.kubeconfig, world.namespace, RULES, ME, connect=connect) as listener:
        listener.becomes(pods(0, 1, 2))
        world.plane.delete(f"{secrets}/first")
        # By this it also forgets that it found the token good a moment ago.
        world.kill()
        world.start()
        says(listener, "401")
        assert listener.names == pods(0, 1, 2)
        write("second")
        add(world, 3)
        listener.becomes(pods(0, 1, 2, 3), PATIENCE)
        assert listener.standing.state == "current"


def test_storage_away(world: RealWorld, listener: Listener) -> None:
    """While the server is there without its storage, the members stand."""
    world.plane.etcd.end()
    with Listener(world.kubeconfig, world.namespace, RULES, ME) as late:
        wait_until(lambda: late.sets, "the server's cache answers", PATIENCE)
        assert late.names == pods(0, 1, 2)
    assert listener.names == pods(0, 1, 2)
    world.plane.start()
    world.await_controllers()
    add(world, 3)
    listener.becomes(pods(0, 1, 2, 3), PATIENCE)


def test_too_many_requests(world: RealWorld) -> None:
    """Where the server's flow control refuses this user (429, Retry-After: 1), it is left in peace in between."""
    with Crowd(world) as crowd, Listener(world.kubeconfig, world.namespace, RULES, ME) as listener:
        says(listener, "429")
        before, began = listener.standing.failures, time.monotonic()
        wait_until(lambda: time.monotonic() - began > 5, "five seconds are over")
        assert listener.standing.failures - before <= 5
        assert not listener.sets
        crowd.end()
        listener.becomes(pods(0, 1, 2), PATIENCE)


class Crowd:
    """Fills the one place that the server's flow control leaves to the world's user, so that it refuses whatever else
    this user asks.

    The place is held by lists from a version that there is not yet, for which the server waits 3 s.
    """

    def __init__(self, world: RealWorld) -> None:
        self._world = world
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]

    def __enter__(self) -> Crowd:
        limited = {"nominalConcurrencyShares": 0, "lendablePercent": 0, "limitResponse": {"type": "Reject"}}
        level = {"type": "Limited", "limited": {**limited, "borrowingLimitPercent": 0}}
        user = {"kind": "ServiceAccount", "serviceAccount": {"name": "daemon", "namespace": HOME}}
        every = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"]}
        schema = {
            "priorityLevelConfiguration": {"name": "one-place"},
            "matchingPrecedence": 2,
            "rules": [{"subjects": [user], "resourceRules": [every]}],
        }
        for kind, spec in (("prioritylevelconfigurations", level), ("flowschemas", schema)):
            self._world.plane.create(f"{_FLOW}/{kind}", {"metadata": {"name": "one-place"}, "spec": spec})
        for thread in self._threads:
            thread.start()
        reader, path = Reader(self._world.kubeconfig), slices_path(self._world.namespace)
        try:
            wait_until(lambda: reader.get(path)[0] == 429, "the user is refused")
        except BaseException:
            self.end()
            raise
        return self

    def _ask(self) -> None:
        reader, path = Reader(self._world.kubeconfig), slices_path(self._world.namespace)
        while not self._over.is_set():
            reader.get(path, resourceVersion="999999999")

    def end(self) -> None:
        """Have the user served again."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        for kind in ("flowschemas", "prioritylevelconfigurations"):
            self._world.plane.delete(f"{_FLOW}/{kind}/one-place")

    def __exit__(self, *_: object) -> None:
        self.end()
