"""The real client against an API server that fails: what the loop's side sees of each trouble."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster_link.discovery.connections import Connections
from cluster_link.discovery.kube_api import KubeApi
from cluster_link.discovery.reflector import Trouble
from tests.daemons import wait_until
from tests.kube_listener import Listener
from tests.kube_server import OwnWorld, Scripted, error_event, failure


@pytest.fixture
def world() -> Iterator[OwnWorld]:
    """A server with one Service and one pod."""
    world = OwnWorld()
    world.add_service("peers")
    world.add_pod("pod-0", "10.1.0.0", "node-0")
    yield world
    world.close()


def add(world: OwnWorld, number: int) -> str:
    """One pod more, and its uid."""
    return world.add_pod(f"pod-{number}", f"10.1.0.{number}", f"node-{number}")


def listen(world: OwnWorld) -> Listener:
    """Listen to it, and wait for the pod that is there."""
    listener = Listener(world.kubeconfig, world.namespace)
    wait_until(lambda: listener.sets and len(listener.sets[-1]) == 2, "the pod is known", 10)
    return listener


def next_pod_is_known(world: OwnWorld, listener: Listener, number: int, seconds: float = 10.0) -> None:
    """Another pod comes, and is found."""
    before = set(listener.names)
    listener.becomes(before | {add(world, number)}, seconds)


@pytest.mark.parametrize(
    "scripted",
    [
        Scripted([error_event(410, "Expired", "too old resource version: 2 (8)")], verb="watch"),
        Scripted([failure(410)], 410, verb="watch"),
        Scripted([error_event(500, "InternalError")], verb="watch"),
        Scripted([error_event(504, "Timeout", "Too large resource version: 221, current: 218")], verb="watch"),
        Scripted([failure(429)], 429, ["Retry-After: 1"], "watch"),
        Scripted([failure(503)], 503, ["Retry-After: 1"], "watch"),
        Scripted([failure(500)], 500, verb="watch"),
        Scripted([b'{"type":"MODIFIED","object":{"kind":"EndpointSl', None], verb="watch"),
        Scripted([b'{"type":"MODIFIED",'], verb="watch"),
        Scripted([None], verb="watch"),
        Scripted([b"<html>a proxy's page</html>\n"], verb="watch"),
        Scripted([b"\n", b"  \n"], verb="watch"),
        Scripted([b"moved"], 302, ["Location: /elsewhere"], "watch"),
    ],
)
def test_a_watch_that_fails(world: OwnWorld, scripted: Scripted) -> None:
    """Whatever a watch comes to, the members stand and the next change is found."""
    with listen(world) as listener:
        # Else the first watch might meet the fault, and lose it by the cut.
        wait_until(lambda: world.verbs("watch"), "it watches")
        told = len(listener.sets)
        world.script(scripted)
        world.cut()
        wait_until(lambda: not world.scripted, "the fault has happened", 10)
        assert len(listener.sets) == told
        if scripted.status >= 400 and scripted.status != 410:
            wait_until(lambda: f"HTTP {scripted.status}" in str(listener.lines), "the reason is told", 5)
        next_pod_is_known(world, listener, 1)
        listener.state_becomes("current")


def test_retry_after_is_honoured(world: OwnWorld) -> None:
    """A server that asks for a second is left alone for one."""
    world.script(Scripted([failure(429)], 429, ["Retry-After: 1"], "list"))
    with listen(world):
        first, second = world.verbs("list")[:2]
        assert first.status == 429
        assert 1.0 <= second.at - first.at < 2.0
        assert (first.version, second.version) == ("0", "0"), "it is no reason to doubt what a cache says"


def test_a_rotated_token(world: OwnWorld, tmp_path: Path) -> None:
    """401 has the token's file read again; the same holds for a pod's own token."""
    token = tmp_path / "token"
    token.write_text("token-1")
    world.write_kubeconfig({"tokenFile": str(token)})
    with listen(world) as listener:
        world.tokens = {"token-2"}
        world.cut()
        listener.state_becomes("away")
        wait_until(lambda: "401" in listener.standing.why, "it is refused", 10)
        token.write_text("token-2")
        listener.state_becomes("current")
        next_pod_is_known(world, listener, 1)


def test_a_role_that_comes_late(world: OwnWorld) -> None:
    """403 is told once, counted each time, and tried again until it is allowed."""
    world.allow(False)
    with Listener(world.kubeconfig, world.namespace) as listener:
        wait_until(lambda: listener.standing.failures >= 4, "it tries again", 20)
        assert [line for line, _ in listener.lines] == ["discovery_away"]
        assert "403" in listener.standing.why
        assert not listener.sets
        assert listener.standing.provisional
        world.allow(True)
        wait_until(lambda: listener.sets, "the members are known", 20)
        assert [line for line, _ in listener.lines] == ["discovery_away", "discovery_back"]


def test_a_restore(world: OwnWorld) -> None:
    """The version goes backwards, and changes are followed from there."""
    for number in range(1, 4):
        add(world, number)
    with Listener(world.kubeconfig, world.namespace) as listener:
        wait_until(lambda: listener.sets and len(listener.sets[-1]) == 5, "all are known", 10)
        world.restore(50)
        next_pod_is_known(world, listener, 4, 20)
        assert int(world.verbs("watch")[-1].version or 0) < 100


def test_a_connection_that_is_half_open(world: OwnWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes a watch and is silent, without bookmarks, is given up after the read time-out."""
    monkeypatch.setattr("cluster_link.discovery.kube_api._SILENT", 0.5)
    world.script(Scripted([20.0], verb="watch"))
    with listen(world) as listener:
        wait_until(lambda: "silent" in listener.standing.why, "it is given up", 5)
        next_pod_is_known(world, listener, 1)


def test_nobody_is_believed_on_second_asking(world: OwnWorld) -> None:
    """The Service's slices are gone for the watch alone: a fresh list does not confirm it, and the members stand."""
    with listen(world) as listener:
        told = len(listener.sets)
        name = next(name for space, name in world.store.objects if space == world.namespace)
        item = json.dumps({"metadata": {"name": name, "resourceVersion": "101"}, "addressType": "IPv4"})
        world.script(Scripted([b'{"type":"DELETED","object":' + item.encode() + b"}\n", 5.0], verb="watch"))
        world.cut()
        wait_until(lambda: [asked.version for asked in world.verbs("list")][-1] is None, "it lists afresh", 10)
        next_pod_is_known(world, listener, 1)
        assert len(listener.sets) == told + 1


def test_what_is_asked(world: OwnWorld) -> None:
    """One Service's slices only, with bookmarks, for four to six minutes."""
    with listen(world):
        wait_until(lambda: world.verbs("watch"), "it watches", 5)
    (one,) = world.verbs("list")
    assert (one.version, one.query["labelSelector"]) == ("0", "kubernetes.io/service-name=peers")
    (one,) = world.verbs("watch")
    assert one.query["labelSelector"] == "kubernetes.io/service-name=peers"
    assert one.query["allowWatchBookmarks"].lower() == "true"
    assert 240 <= int(one.query["timeoutSeconds"]) <= 360


def test_bookmarks_carry_the_version(world: OwnWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens elsewhere moves the version on, so that the next watch costs no list."""
    monkeypatch.setattr("cluster_link.discovery.reflector._WATCH", (2.0, 2.0))
    with listen(world):
        wait_until(lambda: world.verbs("watch"), "it watches", 5)
        before = int(world.verbs("watch")[-1].version or 0)
        with world.lock:
            world.store.version += 1_000
        wait_until(lambda: int(world.verbs("watch")[-1].version or 0) >= before + 1_000, "it watches from there", 10)
        assert len(world.verbs("list")) == 1


@pytest.mark.parametrize("silent", ["events", "headers", "handshake"])
def test_it_ends_within_a_moment(world: OwnWorld, silent: str) -> None:
    """Whatever the thread waits for."""
    if silent == "events":
        with listen(world) as listener:
            wait_until(lambda: world.verbs("watch"), "it watches", 5)
    else:
        with listen(world) as listener:
            world.pause()
            if silent == "handshake":
                world.cut()
                listener.state_becomes("away")
                time.sleep(0.5)
    assert listener.took_to_end < (1.5 if silent == "handshake" else 0.3)
    world.resume()
    wait_until(lambda: not any(thread.name == "discovery" for thread in threading.enumerate()), "no thread is left", 10)


def test_a_fault_of_ours_is_not_swallowed(world: OwnWorld) -> None:
    """The thread's exception is raised by the source, whose listener opens it anew."""

    def broken(connections: Connections) -> KubeApi:
        raise ZeroDivisionError

    with Listener(world.kubeconfig, world.namespace, connect=broken) as listener:
        wait_until(lambda: listener.fault is not None, "it is told", 5)
        assert isinstance(listener.fault, ZeroDivisionError)


KUBECONFIGS: list[tuple[str, Callable[[Path], str], str]] = [
    ("no file", lambda folder: str(folder / "none"), "No configuration found"),
    ("not YAML", lambda folder: _written(folder, "a: [b"), "credentials: "),
    ("not a kubeconfig", lambda folder: _written(folder, "[]"), "credentials: "),
    ("empty", lambda folder: _written(folder, ""), "credentials: "),
    ("no server", lambda folder: _written(folder, "current-context: x\nclusters: []\n"), "credentials: "),
]


def _written(folder: Path, text: str) -> str:
    (folder / "kubeconfig").write_text(text)
    return str(folder / "kubeconfig")


@pytest.mark.parametrize(("make", "why"), [row[1:] for row in KUBECONFIGS], ids=[row[0] for row in KUBECONFIGS])
def test_credentials_that_cannot_be_had(tmp_path: Path, make: Callable[[Path], str], why: str) -> None:
    """A line that says so, as trouble that is tried again: files of a pod may come late."""
    with pytest.raises(Trouble) as raised:
        KubeApi("ring", "peers", make(tmp_path))
    assert why.lower() in str(raised.value).lower()
    assert "\n" not in str(raised.value)


def test_a_pods_own_credentials(world: OwnWorld, tmp_path: Path) -> None:
    """In a cluster: the server by its variables, the token and the CA by their files."""
    token = tmp_path / "token"
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(world.port)}
    with pytest.raises(Trouble, match="token file"):
        KubeApi(world.namespace, "peers", "", environ, token=str(token), ca=str(world.ca))
    token.write_text("token-1")
    with pytest.raises(Trouble, match="host/port"):
        KubeApi(world.namespace, "peers", "", {}, token=str(token), ca=str(world.ca))
    answer = KubeApi(world.namespace, "peers", "", environ, token=str(token), ca=str(world.ca)).list("0")
    assert answer.status == 200
    answer.close()


def test_a_ca_that_did_not_sign(world: OwnWorld, tmp_path: Path) -> None:
    """A server that somebody else vouches for is not asked, and the reason is told."""
    other = OwnWorld()
    try:
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(world.port)}
        token = tmp_path / "token"
        token.write_text("token-1")
        with pytest.raises(Trouble, match="certificate verify failed"):
            KubeApi(world.namespace, "peers", "", environ, token=str(token), ca=str(other.ca)).list("0")
        assert not world.verbs("list")
    finally:
        other.close()
