"""Discovery by Kubernetes against our own API server and, where `make kube` built it, a real one: promises of both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_link.discovery.endpoints import Rules
from cluster_link.membership import Peer
from sidecar import Decision, Limit, Status
from sidecar.messages import Behavior
from tests.clusters import free_port
from tests.daemons import DaemonProcess, wait_until
from tests.kube_listener import ME, Listener
from tests.kube_real import RealWorld, built
from tests.kube_server import OwnWorld
from tests.kube_world import World
from tests.test_cluster import command

WITHIN = 2.0
"""Seconds in which a scale-up and a scale-down are followed, from the server's word on."""


@pytest.fixture(scope="module", params=["own", pytest.param("real", marks=pytest.mark.real_kubernetes)])
def opened(request: pytest.FixtureRequest) -> Iterator[World]:
    """One server for all tests here."""
    world: World = OwnWorld() if request.param == "own" else RealWorld(built())
    yield world
    world.close()


@pytest.fixture
def world(opened: World) -> World:
    """A namespace in which there is nothing."""
    opened.renew()
    return opened


def listen(world: World, rules: Rules = Rules("grpc"), pod: str = "", me: Peer = ME) -> Listener:  # noqa: B008
    """Listen to a world as one of its daemons would."""
    return Listener(world.kubeconfig, world.namespace, rules, me, pod)


def add(world: World, number: int, ready: bool = True, port: int = 1051) -> str:
    """One pod, and its uid."""
    return world.add_pod(f"pod-{number}", f"10.1.0.{number}", f"node-{number}", ready=ready, port=port)


def test_a_service_without_pods(world: World) -> None:
    """Nobody is listed: this daemon is alone, and its ring is its own guess."""
    world.add_service("peers")
    with listen(world) as listener:
        listener.becomes({"me"})
        assert listener.standing.provisional
        assert listener.standing.state == "current"


def test_a_service_that_is_made_later(world: World) -> None:
    """A daemon may be there before its Service."""
    with listen(world) as listener:
        listener.becomes({"me"})
        uid = add(world, 1)
        world.add_service("peers")
        listener.becomes({"me", uid})


def test_pods_come_and_go(world: World) -> None:
    """A pod is a member from its address on, ready or not, until it begins to end."""
    world.add_service("peers")
    with listen(world) as listener:
        listener.becomes({"me"})
        one = add(world, 1, ready=False)
        listener.becomes({"me", one})
        two = add(world, 2)
        listener.becomes({"me", one, two})
        world.make_ready("pod-2", False)
        world.make_ready("pod-1", True)
        world.delete_pod("pod-2")
        listener.becomes({"me", one})
        world.finish_pod("pod-2")
        three = add(world, 3)
        listener.becomes({"me", one, three})
        assert Peer(one, "10.1.0.1:1051") in listener.sets[-1]


def test_this_daemon_is_found(world: World) -> None:
    """It is itself by its uid; listed as terminating it is no member any more."""
    world.add_service("peers")
    add(world, 1)
    uid = add(world, 2)
    with listen(world, pod=uid, me=Peer(uid, "10.1.0.2:1051")) as listener:
        wait_until(lambda: listener.sets and len(listener.sets[-1]) == 2, "both are known", 5)
        assert not listener.standing.provisional
        world.delete_pod("pod-2")
        wait_until(lambda: uid not in listener.names, "it is leaving", 5)
        assert len(listener.sets[-1]) == 1
        assert not listener.standing.provisional


@pytest.mark.parametrize(("identity", "name"), [("node", "node-1"), ("pod", "pod-1")])
def test_identity(world: World, identity: str, name: str) -> None:
    """A pod may be called by its node or its name."""
    world.add_service("peers")
    add(world, 1)
    with listen(world, Rules("grpc", identity)) as listener:
        listener.becomes({"me", name})


def test_ports_of_their_own(world: World) -> None:
    """Each pod is called at its own number of the port's name; another name is none of ours."""
    world.add_service("peers")
    add(world, 1, port=1051)
    add(world, 2, port=2051)
    with listen(world) as listener, listen(world, Rules("http")) as other:
        wait_until(lambda: listener.sets and len(listener.sets[-1]) == 3, "both are known", 5)
        assert {peer.address for peer in listener.sets[-1]} == {"10.1.0.1:1051", "10.1.0.2:2051", ME.address}
        other.becomes({"me"})


@pytest.mark.parametrize("ipv6", [False, True])
def test_dual_stack(world: World, ipv6: bool) -> None:
    """A pod of both families is one peer, at the address of the family that is preferred."""
    world.add_service("peers", dual=True)
    uid = world.add_pod("pod-1", "10.1.0.1", "node-1", ips=["10.1.0.1", "fd00::1"])
    expected = Peer(uid, "[fd00::1]:1051" if ipv6 else "10.1.0.1:1051")
    with listen(world, Rules("grpc", ipv6=ipv6)) as listener:
        wait_until(lambda: listener.sets and listener.sets[-1] == {ME, expected}, "both slices are joined", 5)


def test_a_server_that_dies(world: World) -> None:
    """The last members stand while it is away; what happened since is known once it is back."""
    world.add_service("peers")
    one = add(world, 1)
    with listen(world) as listener:
        listener.becomes({"me", one})
        told = len(listener.sets)
        world.kill()
        listener.state_becomes("away")
        assert len(listener.sets) == told
        world.start()
        two = add(world, 2)
        listener.becomes({"me", one, two}, 40)
        listener.state_becomes("current")
        assert [line for line, _ in listener.lines][-1] == "discovery_back"


def test_a_server_that_dies_and_forgets(world: World) -> None:
    """Versions that are gone (410) cost a list, and no change is lost."""
    world.add_service("peers")
    one = add(world, 1)
    with listen(world) as listener:
        listener.becomes({"me", one})
        world.finish_pod("pod-1")
        two = add(world, 2)
        world.compact()
        three = add(world, 3)
        listener.becomes({"me", two, three}, 40)


def test_a_server_that_stands_still(world: World) -> None:
    """It answers nothing for a moment: the members stand, and what it tells afterwards is taken."""
    world.add_service("peers")
    one = add(world, 1)
    with listen(world) as listener:
        listener.becomes({"me", one})
        world.pause()
        told = len(listener.sets)
        with listen(world) as late:
            assert not late.sets
            world.resume()
            two = add(world, 2)
            listener.becomes({"me", one, two}, 20)
            late.becomes({"me", one, two}, 30)
        assert len(listener.sets) == told + 1


def test_it_ends_at_once(world: World) -> None:
    """Whatever it waits for: an event, or a server that says nothing."""
    world.add_service("peers")
    with listen(world) as listener:
        listener.becomes({"me"})
    assert listener.took_to_end < 0.5
    world.pause()
    with listen(world) as silent:
        wait_until(lambda: silent._thread.is_alive(), "it runs")
    world.resume()
    assert silent.took_to_end < 1.5


class Pod(DaemonProcess):
    """A daemon that is a pod of a world: found by its Service, listening on an address of its own."""

    def __init__(self, folder: Path, world: World, number: int) -> None:
        self.name = f"pod-{number}"
        port, host = free_port(), world.host(number)
        self.uid = world.add_pod(self.name, host, f"node-{number}", port=port)
        folder = folder / self.name
        folder.mkdir()
        options = ("--discovery", "kubernetes", "--kubernetes-kubeconfig", str(world.kubeconfig))
        service = ("--kubernetes-service", "peers", "--kubernetes-namespace", world.namespace)
        self.environment = {"POD_UID": self.uid, "POD_IP": host, "POD_IPS": host}
        where = ("--listen", f"{host}:{port}", "--node", self.name)
        os.environ.update(self.environment)
        super().__init__(folder, *options, *service, *where, clock="system")

    def members(self) -> set[str]:
        """The names of the cluster's daemons, as this one knows them."""
        with self.client() as client:
            return {peer["name"] for peer in client.peers()["peers"]}

    def ask(self, limit: Limit, key: str, hits: int = 1) -> Decision:
        """Ask of one key."""
        with self.client() as client:
            return client.check([limit.request(key, hits)])[0]

    def source(self) -> dict[str, object]:
        """What it says of its source."""
        with self.client() as client:
            return dict(client.peers()["discovery"])


def test_three_daemons_are_one(world: World, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One limit asked through all admits exactly its amount; scaling is followed; without a server they go on."""
    for name in ("POD_UID", "POD_IP", "POD_IPS"):
        monkeypatch.setenv(name, "")  # put back at the end
    world.add_service("peers")
    pods: list[Pod] = []
    try:
        pods += [Pod(short_path, world, number) for number in range(3)]
        everyone = {pod.uid for pod in pods}
        for pod in pods:
            wait_until(lambda pod=pod: pod.members() == everyone, "they know each other", 20)  # type: ignore[misc]
        assert admitted(pods, "before", 90) == 90
        assert_they_go_by_their_own_names(pods)

        pods.append(Pod(short_path, world, 3))
        everyone = {pod.uid for pod in pods}
        for pod in pods:
            wait_until(lambda pod=pod: pod.members() == everyone, "a scale-up is followed", WITHIN)  # type: ignore[misc]
        assert admitted(pods, "more", 90) == 90

        gone = pods.pop()
        world.delete_pod(gone.name)
        everyone = {pod.uid for pod in pods}
        for pod in pods:
            wait_until(lambda pod=pod: pod.members() == everyone, "a scale-down is followed", WITHIN)  # type: ignore[misc]
        gone.kill()
        world.finish_pod(gone.name)
        assert admitted(pods, "less", 90) == 90

        world.kill()
        for pod in pods:
            wait_until(lambda pod=pod: pod.source()["state"] == "away", "the source is away", 20)  # type: ignore[misc]
            assert pod.members() == everyone
        assert admitted(pods, "away", 90) == 90
        assert not any(pod.events("discovery_failed") + pod.events("loop_error") for pod in pods)
    finally:
        for pod in pods:
            pod.kill()


def assert_they_go_by_their_own_names(pods: list[Pod]) -> None:
    """Owners are told by the pods' names, of answers from replicas too, and `sidegate peers` tells uid and name."""
    names = {pod.name for pod in pods}
    limit = Limit("names", 1_000, per="1d", behavior=Behavior.GLOBAL)
    for number in range(12):
        for _ in range(3):  # from the owner, and then from the replica
            decision = pods[0].ask(limit, f"account:{number}")
            assert not decision.error, decision
            assert decision.owner in names
    told = command("peers", "--socket", pods[0].socket)
    assert told.returncode == 0, told.stderr
    rows = {line.split()[0]: line.split()[2:] for line in told.stdout.splitlines()[1:]}
    assert rows == {
        pods[0].uid: ["self", "pod-0"],
        pods[1].uid: ["connected", "pod-1"],
        pods[2].uid: ["connected", "pod-2"],
    }


def admitted(pods: list[Pod], key: str, amount: int) -> int:
    """How much of a limit all together are given, asked in turn for half as much again."""
    limit = Limit("conformance", amount, per="1d")
    for pod in pods:  # links are opened by asking; on a busy machine the first try may be too late
        wait_until(lambda pod=pod: not pod.ask(limit, key, 0).error, f"{pod.name} is answered")  # type: ignore[misc]
    given = 0
    for number in range(amount + amount // 2):
        decision = pods[number % len(pods)].ask(limit, key)
        assert not decision.error, decision
        given += decision.status == Status.UNDER_LIMIT
    return given
