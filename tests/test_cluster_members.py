"""Members that come, go and move while requests are asked, and lists with mistakes in them."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cluster_link.membership import Peer
from cluster_link.ring import Ring
from sidecar import Client, Decision, Limit, Status
from sidecar.wire import Op
from tests.clusters import Cluster, Load, Watch, free_port, listed, running_cluster
from tests.daemons import DaemonProcess, wait_until
from tests.sockets import PATIENCE, Raw, packed

WIDE = 1_000_000


def plain(name: str, key: str) -> list[object]:
    """A hit as it stands in a frame; its window is a day."""
    return [name, key, 1, WIDE, 86_400_000]


# --- Growing and shrinking


def test_a_newcomer_takes_only_the_keys_that_are_its_own(start_cluster: Callable[..., Cluster]) -> None:
    """A fourth daemon, listed on all by SIGHUP: keys that it does not own keep their owner and their count, asked of
    any node; those it owns are its own from now on."""
    cluster = start_cluster(3, "--peer-timeout", "20000")
    old = list(cluster.nodes)
    limit = Limit("grow", WIDE, per="1d")
    keys = [f"account:{number}" for number in range(400)]
    with old[0].client(timeout=PATIENCE) as client:
        before = client.check([limit.request(key, 5) for key in keys])
    newcomer = cluster.add()
    cluster.follow(cluster.nodes)
    moved = {key for key in keys if cluster.owner("grow", key) == newcomer}
    assert 40 < len(moved) < 200
    for hits, node in enumerate(cluster.nodes, 1):
        with node.client(timeout=PATIENCE) as client:
            after = client.check([limit.request(key) for key in keys])
        for key, then, now in zip(keys, before, after, strict=True):
            assert not now.error
            if key in moved:
                assert (now.owner, now.remaining) == (newcomer.name, WIDE - hits)
            else:
                assert (now.owner, now.remaining) == (then.owner, WIDE - 5 - hits)
    (event, *_) = [event for event in old[0].events("ring_changed") if event["members"] == 4]
    assert (event["joined"], event["left"], event["moved"]) == ([newcomer.name], [], [])


def test_no_request_fails_while_members_come_and_go(start_cluster: Callable[..., Cluster]) -> None:
    """Under load on two nodes a third, which lives, leaves the list and returns, four times: what is in flight
    finishes, what comes follows the new ring, and no request fails."""
    cluster = start_cluster(3, "--peer-timeout", "20000")
    first, second, _ = cluster.nodes
    limit = Limit("come", WIDE, per="1d")
    keys = [f"account:{number}" for number in range(100)]
    cluster.connect(limit)

    def ask(client: Client, number: int) -> list[Decision]:
        return client.check([limit.request(keys[(number * 7 + step) % 100]) for step in range(20)])

    with Load([first, second] * 2, ask, rate=100, timeout=PATIENCE) as load:
        for _ in range(4):
            time.sleep(0.2)
            cluster.follow([first, second])
            time.sleep(0.2)
            cluster.follow(cluster.nodes, tell=[first, second])
    owners: Counter[str] = Counter()
    for result in load.since(0.0):
        assert isinstance(result, list), result
        assert not [each for each in result if each.error or each.degraded]
        owners.update(each.owner for each in result)
    assert set(owners) == {node.name for node in cluster.nodes}


def test_a_request_in_flight_to_an_owner_that_leaves_is_finished(
    start_cluster: Callable[..., Cluster],
) -> None:
    """It was sent to the owner of its moment, whose answer is taken; the next one goes to the new owner."""
    cluster = start_cluster(2, "--peer-timeout", "20000", slow=[1])
    asked, leaver = cluster.nodes
    limit = Limit("flight", WIDE, per="1d")
    (key,) = cluster.keys(leaver, 1, "flight")
    cluster.connect(limit)
    cluster.proxies[1].delay = 0.7
    before = asked.peers()["forwarded"]
    with Raw(asked.socket) as raw:
        raw.send(packed(1, 1, Op.CHECK, [plain("flight", key)]))
        wait_until(lambda: asked.peers()["forwarded"] > before, "it was read")
        cluster.follow([asked])
        assert asked.ask(limit, key).owner == asked.name
        (decision,) = raw.answer()[3]
    assert (decision[0], decision[2], decision[5]) == (Status.UNDER_LIMIT, WIDE - 1, leaver.name)


def test_a_member_that_moved_is_asked_at_its_new_address(start_cluster: Callable[..., Cluster]) -> None:
    """Same name, other port: no key changes its owner, and nobody dials the old address any more."""
    cluster = start_cluster(2)
    asked, mover = cluster.nodes
    limit = Limit("move", WIDE, per="1d")
    (key,) = cluster.keys(mover, 1, "move")
    cluster.connect(limit)
    mover.stop(timeout=PATIENCE)
    old, port = mover.port, free_port()
    mover.peer = Peer(mover.name, f"127.0.0.1:{port}")
    mover.options = (*mover.options, "--listen", f"127.0.0.1:{port}")
    mover.list_peers(listed([asked.peer, mover.peer]))
    mover.start()
    cluster.follow([asked, mover], tell=[asked])
    wait_until(lambda: asked.link(mover)["address"] == mover.peer.address, "the new list is followed")
    with Watch(old) as watch:
        assert asked.ask(limit, key).owner == mover.name
        time.sleep(2.0)
        assert watch.connections == 0
    (event,) = [event for event in asked.events("ring_changed") if event["moved"]]
    assert (event["moved"], event["joined"], event["left"]) == ([mover.name], [], [])


def test_an_owner_that_died_and_left_the_list_is_dialled_no_more(start_cluster: Callable[..., Cluster]) -> None:
    """Whatever its link was at when the list changed: about to dial, dialling, or connected to a black hole."""
    cluster = start_cluster(2)
    asked, dead = cluster.nodes
    limit = Limit("dial", WIDE, per="1d")
    (key,) = cluster.keys(dead, 1, "dial")
    cluster.connect(limit)
    dead.crash()
    for pause in (0.0, 0.3, 1.0):
        wait_until(lambda: asked.ask(limit, key).status == Status.ERROR, "its death is noticed")
        time.sleep(pause)
        cluster.follow([asked])
        with Watch(dead.port) as watch:
            time.sleep(2.0)
            assert watch.connections == 0
        cluster.follow(cluster.nodes, tell=[asked])


# --- Lists with mistakes


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("peers = 'nonsense'\n", id="no address"),
        pytest.param("peers = '127.0.0.1:1,,127.0.0.1:2'\n", id="an empty part"),
        pytest.param("peers = 'a=127.0.0.1:1,a=127.0.0.1:2'\n", id="a name twice"),
        pytest.param("peers = ", id="no TOML"),
        pytest.param("peer = '127.0.0.1:1'\n", id="no such setting"),
        pytest.param("peers = 7\n", id="a number"),
        pytest.param("peers = ['127.0.0.1:1']\n", id="an array"),
        pytest.param(None, id="no file"),
    ],
)
def test_a_broken_list_keeps_the_old_one(broken: Cluster, content: str | None) -> None:
    """SIGHUP with a mistake is an event that says what is wrong; routing goes on as before."""
    node, other = broken.nodes
    limit = Limit("broken", WIDE, per="1d")
    (key,) = broken.keys(other, 1, "broken")
    before = len(node.events("reload_failed"))
    if content is None:
        node.settings.unlink()
    else:
        node.settings.write_text(content)
    node.hang_up()
    wait_until(lambda: len(node.events("reload_failed")) > before, "the mistake is told")
    event = node.events("reload_failed")[-1]
    assert event["level"] == "error"
    assert event["reason"]
    assert "\n" not in event["reason"]
    assert node.members() == {"node-1", "node-2"}
    assert node.ask(limit, key).owner == other.name


@pytest.fixture(scope="module")
def broken() -> Iterator[Cluster]:
    """Two daemons for every broken list; each is survived, so that one pair is enough."""
    with running_cluster(2, "--peer-timeout", "20000") as cluster:
        yield cluster


def test_a_list_mended_after_a_mistake_is_followed(start_cluster: Callable[..., Cluster]) -> None:
    """A mistake is no last word."""
    cluster = start_cluster(2)
    node, _ = cluster.nodes
    node.settings.write_text("peers = '?'\n")
    node.hang_up()
    wait_until(lambda: node.events("reload_failed"), "the mistake is told")
    cluster.follow([node])
    assert node.members() == {node.name}


def test_sighup_with_the_same_list_changes_nothing(start_cluster: Callable[..., Cluster]) -> None:
    """In another order, spelled in another way: no event, no link closed."""
    cluster = start_cluster(2)
    asked, other = cluster.nodes
    limit = Limit("same", WIDE, per="1d")
    cluster.connect(limit)
    batches = asked.link(other)["batches"]
    asked.list_peers(f" {other.name} = {other.peer.address} , {asked.name}={asked.peer.address} ")
    for _ in range(5):
        asked.hang_up()
        time.sleep(0.05)
    assert asked.ask(limit, cluster.keys(other, 1, "same")[0]).owner == other.name
    assert asked.link(other)["batches"] == batches + 1
    assert len(asked.events("ring_changed")) == 1


def test_many_sighups_end_with_the_last_list(start_cluster: Callable[..., Cluster]) -> None:
    """Lists that change faster than they are followed: the last one counts, on every node."""
    cluster = start_cluster(3)
    for number in range(20):
        members = cluster.nodes[: 1 + number % 3]
        for node in cluster.nodes:
            node.list_peers(listed(member.peer for member in members))
            node.hang_up()
    cluster.follow(cluster.nodes)
    limit = Limit("many", WIDE, per="1d")
    cluster.connect(limit)


def test_a_daemon_taken_off_its_own_list_serves_all_keys_itself(start_cluster: Callable[..., Cluster]) -> None:
    """It says so, and asks nobody; put back, it shares again."""
    cluster = start_cluster(2)
    node, other = cluster.nodes
    limit = Limit("off", WIDE, per="1d")
    (key,) = cluster.keys(other, 1, "off")
    node.list_peers(listed([other.peer]))
    node.hang_up()
    wait_until(lambda: node.events("not_among_peers"), "it says so")
    wait_until(lambda: len(node.peers()["peers"]) == 1, "it is alone")
    assert node.ask(limit, key).owner == node.name
    cluster.follow(cluster.nodes, tell=[node])
    assert node.ask(limit, key).owner == other.name


def test_a_daemon_alone_survives_sighup(start_daemon: Callable[..., DaemonProcess]) -> None:
    """SIGHUP is "read again", with peers or without: a daemon that was given none must not die of it."""
    daemon = start_daemon(clock="system")
    daemon.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert daemon.process.poll() is None
    with daemon.client() as client:
        assert client.ping() == "test-node"


# --- Addresses that are no good


@contextmanager
def mute_listener() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        streams: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    streams.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for stream in streams:
            stream.close()


def test_bad_addresses_never_block_the_good_ones(start_cluster: Callable[..., Cluster]) -> None:
    """A port where nobody is, and one where somebody takes connections and says nothing: their keys fall back, first
    after a time-out and then at once; the other owners' keys are answered throughout."""
    cluster = start_cluster(2, "--peer-timeout", "2000", "--fallback", "allow")
    with mute_listener() as mute:
        peers = [
            *(node.peer for node in cluster.nodes),
            Peer("nobody", f"127.0.0.1:{free_port()}"),
            Peer("mute", f"127.0.0.1:{mute}"),
        ]
        for node in cluster.nodes:
            node.list_peers(listed(peers))
            node.hang_up()
            wait_until(lambda node=node: len(node.members()) == 4, "the list is followed")  # type: ignore[misc]
        ring = Ring(peers)
        limit = Limit("bad", WIDE, per="1d")
        keys = [f"account:{number}" for number in range(200)]
        owners = [ring.owner("bad", key).name for key in keys]
        asked = cluster.nodes[0]
        with asked.client(timeout=PATIENCE) as client:
            for _ in range(3):
                decisions = client.check([limit.request(key) for key in keys])
                for owner, decision in zip(owners, decisions, strict=True):
                    assert decision.degraded == (owner in ("nobody", "mute"))
                    assert decision.owner == (asked.name if decision.degraded else owner)
            wait_until(
                lambda: {peer["name"]: peer["state"] for peer in asked.peers()["peers"]}["mute"] == "away",
                "the mute one counts as away",
            )
            start = time.monotonic()
            for key in keys:
                client.hit(limit, key)
            # About a hundred of them are those of bad addresses.
            assert time.monotonic() - start < 20.0
