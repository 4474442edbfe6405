"""The worlds that the tests of discovery stand on keep what World promises, and do what the real controller does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.daemons import wait_until
from tests.kube_reader import Reader, Seen, slices_path
from tests.kube_real import RealWorld, built
from tests.kube_server import OwnWorld
from tests.kube_world import World

T, F = True, False


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


@pytest.fixture
def reader(world: World) -> Reader:
    """What the world's user sees."""
    return Reader(world.kubeconfig)


def becomes(reader: Reader, world: World, expected: list[Seen], service: str = "peers") -> None:
    """The slices come to say this."""
    last: list[Seen] = []

    def same() -> bool:
        nonlocal last
        last = reader.endpoints(world.namespace, service)
        return last == expected

    try:
        wait_until(same, "the slices say what is expected", 10)
    except AssertionError:
        assert last == expected


def pod(number: int, ready: bool = T, serving: bool = T, terminating: bool = F, port: int = 1051) -> Seen:
    """How a pod of `add_pod(f"pod-{number}", ...)` is seen."""
    return Seen(f"pod-{number}", f"10.1.0.{number}", f"node-{number}", port, ready, serving, terminating)


def add(world: World, number: int, ready: bool = T, port: int = 1051) -> str:
    """Add one pod."""
    return world.add_pod(f"pod-{number}", f"10.1.0.{number}", f"node-{number}", ready=ready, port=port)


@pytest.mark.parametrize(
    ("publishes", "fresh", "ready", "leaving", "leaving_unready"),
    [
        (F, (F, F, F), (T, T, F), (F, T, T), (F, F, T)),
        (T, (T, F, F), (T, T, F), (T, T, T), (T, F, T)),
    ],
    ids=["plain", "publishNotReadyAddresses"],
)
def test_conditions(
    world: World,
    reader: Reader,
    publishes: bool,
    fresh: tuple[bool, bool, bool],
    ready: tuple[bool, bool, bool],
    leaving: tuple[bool, bool, bool],
    leaving_unready: tuple[bool, bool, bool],
) -> None:
    """ready, serving and terminating of a pod from its first address to its end."""
    world.add_service("peers", publish_not_ready=publishes)
    add(world, 1, ready=False)
    becomes(reader, world, [pod(1, *fresh)])
    world.make_ready("pod-1", True)
    becomes(reader, world, [pod(1, *ready)])
    world.delete_pod("pod-1")
    becomes(reader, world, [pod(1, *leaving)])
    world.make_ready("pod-1", False)
    becomes(reader, world, [pod(1, *leaving_unready)])
    world.finish_pod("pod-1")
    becomes(reader, world, [])


def test_no_pods(world: World, reader: Reader) -> None:
    """A Service without pods has a slice, with nothing in it: not an empty list, but null."""
    world.add_service("peers")
    wait_until(lambda: reader.slices(world.namespace)["items"], "there is a slice", 10)
    (one,) = reader.slices(world.namespace)["items"]
    assert one["endpoints"] is None
    assert one["ports"] is None


def test_service_after_pods(world: World, reader: Reader) -> None:
    """Pods that were there before their Service are in its slices; each says its own port."""
    add(world, 1, port=1051)
    add(world, 2, port=2051)
    world.add_service("peers")
    becomes(reader, world, [pod(1), pod(2, port=2051)])
    assert len(reader.slices(world.namespace)["items"]) == 2, "a slice has one number for a port's name"


def test_targets(world: World, reader: Reader) -> None:
    """An endpoint names its pod's uid, which another pod of the same name does not share."""
    world.add_service("peers")
    uids = []
    for _ in range(2):
        uids.append(add(world, 1))
        becomes(reader, world, [pod(1)])
        ends = [end for one in reader.slices(world.namespace)["items"] for end in one["endpoints"]]
        assert [end["targetRef"]["uid"] for end in ends] == uids[-1:]
        world.finish_pod("pod-1")
        becomes(reader, world, [])
    assert uids[0] != uids[1]


def test_dual_stack(world: World, reader: Reader) -> None:
    """A Service of both families has slices of both, with the same pods."""
    world.add_service("peers", dual=True)
    world.add_service("one-family")
    for number in (1, 2):
        ips = [f"10.1.0.{number}", f"fd00::{number}"]
        world.add_pod(f"pod-{number}", ips[0], f"node-{number}", ips=ips)
    both = [seen for number in (1, 2) for seen in (pod(number), pod(number)._replace(address=f"fd00::{number}"))]
    becomes(reader, world, both)
    becomes(reader, world, [pod(1), pod(2)], "one-family")
    kinds = sorted(one["addressType"] for one in reader.slices(world.namespace)["items"])
    assert kinds == ["IPv4", "IPv6"]


def test_least_role(world: World, reader: Reader) -> None:
    """The user lists and watches EndpointSlices of the world's namespaces, and may do nothing else."""
    world.add_service("peers")
    here = slices_path(world.namespace)
    assert reader.get(here)[0] == 200
    assert reader.first_event(world.namespace, "0")[0] == 200
    for path in (slices_path("default"), f"/api/v1/namespaces/{world.namespace}/pods", f"{here}/one"):
        status, answer = reader.get(path)
        assert (status, answer["reason"]) == (403, "Forbidden"), path


def test_renew(world: World, reader: Reader) -> None:
    """A new namespace is empty, and the old one is left as it was."""
    world.add_service("peers")
    add(world, 1)
    becomes(reader, world, [pod(1)])
    old = world.namespace
    world.renew()
    assert world.namespace != old
    assert reader.slices(world.namespace)["items"] == []
    assert reader.endpoints(old) == [pod(1)]


def test_pause(world: World, reader: Reader) -> None:
    """A paused server takes a connection and says nothing; resumed, it goes on."""
    world.add_service("peers")
    add(world, 1)
    becomes(reader, world, [pod(1)])
    world.pause()
    with pytest.raises(TimeoutError):
        Reader(world.kubeconfig, seconds=0.5).get(slices_path(world.namespace))
    world.resume()
    assert reader.endpoints(world.namespace) == [pod(1)]
    add(world, 2)
    becomes(reader, world, [pod(1), pod(2)])


def test_kill(world: World, reader: Reader) -> None:
    """A killed server refuses connections; started, it has all it had, and goes on."""
    world.add_service("peers")
    add(world, 1)
    becomes(reader, world, [pod(1)])
    world.kill()
    with pytest.raises(ConnectionRefusedError):
        reader.get(slices_path(world.namespace))
    world.start()
    world.start()
    assert reader.endpoints(world.namespace) == [pod(1)]
    add(world, 2)
    becomes(reader, world, [pod(1), pod(2)])


def test_renew_after_trouble(world: World, reader: Reader) -> None:
    """A world that was left paused or dead by a test serves the next one."""
    for trouble in (world.pause, world.kill):
        trouble()
        world.renew()
        assert reader.slices(world.namespace)["items"] == []


def test_compact(world: World, reader: Reader) -> None:
    """After a compaction no version seen before can be watched: 410, reason Expired; a fresh one can."""
    world.add_service("peers")
    add(world, 1)
    becomes(reader, world, [pod(1)])
    version = reader.slices(world.namespace)["metadata"]["resourceVersion"]
    assert reader.first_event(world.namespace, version)[0] == 200
    world.compact()
    status, event = reader.first_event(world.namespace, version)
    gone = event["object"] if status == 200 else event
    assert (gone["code"], gone["reason"]) == (410, "Expired"), (status, event)
    version = reader.slices(world.namespace)["metadata"]["resourceVersion"]
    add(world, 2)
    becomes(reader, world, [pod(1), pod(2)])
    assert reader.first_event(world.namespace, version)[1]["type"] in ("ADDED", "MODIFIED")


def test_a_version_to_come(world: World, reader: Reader) -> None:
    """A watch from a version that is not there yet, as after a restore from a backup, is taken, and told nothing of
    what happens before that version; a list from there is refused."""
    world.add_service("peers")
    add(world, 1)
    becomes(reader, world, [pod(1)])
    later = str(int(reader.slices(world.namespace)["metadata"]["resourceVersion"]) + 1000)
    timer = threading.Timer(0.2, add, (world, 2))
    timer.start()
    assert reader.first_event(world.namespace, later) == (200, {})
    timer.join()
    becomes(reader, world, [pod(1), pod(2)])
    status, answer = reader.get(slices_path(world.namespace), resourceVersion=later)
    assert (status, answer["reason"], answer["details"]["retryAfterSeconds"]) == (504, "Timeout", 1)


def test_host(world: World, reader: Reader) -> None:
    """The server takes a daemon's address into a slice."""
    world.add_service("peers")
    address = world.host(0)
    world.add_pod("pod-1", address, "node-1")
    becomes(reader, world, [pod(1)._replace(address=address)])
