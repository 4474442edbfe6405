"""Real daemons that find each other through a real etcd, and what may befall it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from cluster_link.discovery.etcd import Etcd, Settings
from cluster_link.discovery.etcd_link import Files
from cluster_link.discovery.proto import etcd_pb2 as pb
from cluster_link.discovery.proto import etcd_pb2_grpc as stubs
from cluster_link.discovery.source import Standing
from cluster_link.membership import Peer
from sidecar import Limit, Status
from tests.authority import Authority
from tests.clusters import Node, SlowProxy, Watch, free_port
from tests.daemons import clean_environment, wait_until
from tests.etcd_server import EtcdServer, need_etcd

TTL = 3
SOON = 2.0
PREFIX = "/sidegate/peers/"


class House:
    """Daemons and an etcd, all ended at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.servers: list[EtcdServer] = []
        self.nodes: list[Node] = []

    def etcd(self, *options: str, authority: Authority | None = None) -> EtcdServer:
        """One more etcd."""
        self.servers.append(EtcdServer(self._folder / f"etcd-{len(self.servers)}", *options, authority=authority))
        return self.servers[-1]

    def node(self, endpoints: str, *options: str, name: str = "") -> Node:
        """One more daemon."""
        name = name or f"node-{len(self.nodes) + 1}"
        folder = self._folder / f"daemon-{len(self.nodes) + 1}"
        folder.mkdir()
        port = free_port()
        words = ("--discovery", "etcd", "--etcd-endpoints", endpoints, "--etcd-ttl", str(TTL), *options)
        node = Node(folder, name, port, Peer(name, f"127.0.0.1:{port}"), "", *words, clock="system")
        self.nodes.append(node)
        return node

    def close(self) -> None:
        """End them, whatever state they are in."""
        for node in self.nodes:
            node.kill()
        for server in self.servers:
            server.kill()


@pytest.fixture
def house(short_path: Path) -> Iterator[House]:
    """An empty one."""
    need_etcd()
    house = House(short_path)
    yield house
    house.close()


def follow(nodes: list[Node], names: set[str], seconds: float = 30.0) -> None:
    """Wait until all these know exactly these names, and are listed themselves."""
    for node in nodes:
        wait_until(
            lambda node=node: node.members() == names and not node.peers()["discovery"]["provisional"],  # type: ignore[misc]
            f"{node.name} knows {sorted(names)}",
            seconds,
        )


def three(house: House, endpoints: str, *options: str) -> list[Node]:
    """Three daemons that know each other."""
    nodes = [house.node(endpoints, *options) for _ in range(3)]
    follow(nodes, {"node-1", "node-2", "node-3"})
    return nodes


def admitted(nodes: list[Node], key: str, limit: int = 30) -> int:
    """How many of twice as many hits on one limit, asked of each in turn, are admitted."""
    asked = Limit("etcd", limit, per="1d")
    answers = [nodes[number % len(nodes)].ask(asked, key) for number in range(2 * limit)]
    assert not [answer.error for answer in answers if answer.error]
    return sum(answer.status == Status.UNDER_LIMIT for answer in answers)


def answers_as_one(nodes: list[Node], name: str) -> None:
    """Of several keys, each is admitted exactly to its limit; a link's first batch may be late on a busy machine, so
    the links are opened before."""
    warm = Limit("warm", 1_000_000, per="1d")
    for node in nodes:
        for number in range(20):
            wait_until(lambda node=node, number=number: not node.ask(warm, f"{number}").error, "links are open")  # type: ignore[misc]
    for number in range(4):
        assert admitted(nodes, f"{name}-{number}") == 30


def rings(node: Node) -> int:
    """How often its ring has changed."""
    return len(node.events("ring_changed"))


def test_three_daemons_answer_as_one_and_follow_those_who_come_and_go(house: House) -> None:
    """One limit of N asked through all admits exactly N; a fourth daemon is followed within two seconds of its start,
    its clean end within two seconds, and its kill within its lease and two seconds."""
    server = house.etcd()
    nodes = three(house, server.endpoint)
    assert set(server.registered()) == {PREFIX + node.name for node in nodes}
    answers_as_one(nodes, "three")
    fourth = house.node(server.endpoint)
    follow([*nodes, fourth], {"node-1", "node-2", "node-3", "node-4"}, SOON)
    answers_as_one([*nodes, fourth], "four")
    fourth.process.send_signal(signal.SIGTERM)
    follow(nodes, {"node-1", "node-2", "node-3"}, SOON)
    assert fourth.process.wait(10) == 0
    nodes[2].crash()
    follow(nodes[:2], {"node-1", "node-2"}, TTL + SOON)
    answers_as_one(nodes[:2], "two")
    for node in nodes:
        assert not node.events("discovery_away")


def test_limiting_goes_on_while_etcd_is_stopped_and_over_its_restart(house: House) -> None:
    """A stopped etcd and a dead one leave the ring as it is and the limit exact; attempts are few; with its old data
    and with none it is registered at anew, and the ring never changes."""
    server = house.etcd()
    nodes = three(house, server.endpoint)
    answers_as_one(nodes, "before")
    before = [rings(node) for node in nodes]

    def away() -> bool:
        return all(node.peers()["discovery"]["state"] == "away" for node in nodes)

    def back() -> bool:
        found = [node.peers()["discovery"] for node in nodes]
        return all(one["state"] == "current" and not one["provisional"] for one in found)

    server.pause()
    wait_until(away, "a stopped etcd is noticed", TTL / 3 + 10)
    answers_as_one(nodes, "stopped")
    time.sleep(TTL)  # all leases end while it stands still
    server.resume()
    wait_until(back, "it is back")
    server.kill()
    wait_until(away, "a dead etcd is noticed")
    failures = nodes[0].peers()["discovery"]["failures"]
    begin = time.monotonic()
    answers_as_one(nodes, "dead")
    time.sleep(max(0.0, 6.0 - (time.monotonic() - begin)))
    took = time.monotonic() - begin
    tried = nodes[0].peers()["discovery"]["failures"] - failures
    assert tried <= 6 + took / 2.5, f"{tried} attempts in {took:.1f} s"
    server.start()
    wait_until(back, "it is back with its data")
    server.kill()
    server.start(empty=True)
    wait_until(lambda: len(server.registered()) == 3, "all are registered anew")
    wait_until(back, "it is back without its data")
    answers_as_one(nodes, "after")
    time.sleep(1)  # longer than changes are gathered
    assert [rings(node) for node in nodes] == before
    for node in nodes:
        assert node.events("discovery_away")
        assert node.events("discovery_back")
        assert not node.events("discovery_failed")
        assert not node.events("loop_error")


def test_a_lost_lease_is_registered_anew(house: House) -> None:
    """One line tells it; no ring changes, since the key is back before changes have gathered."""
    server = house.etcd()
    nodes = three(house, server.endpoint)
    before = [rings(node) for node in nodes]
    key = PREFIX + "node-2"
    lease = server.registered()[key]
    server.revoke(lease)
    wait_until(lambda: server.registered().get(key, lease) != lease, "there is another lease", SOON)
    server.ctl("del", key)
    wait_until(lambda: key in server.registered(), "the key is back", SOON)
    time.sleep(TTL + 1)
    assert key in server.registered(), "the new lease is renewed"
    assert [rings(node) for node in nodes] == before
    assert [event["key"] for event in nodes[1].events("discovery_forgotten")][:1] == [key]
    assert not nodes[0].events("discovery_forgotten")
    assert not nodes[1].events("discovery_away")


def test_a_second_daemon_of_one_name_owns_nothing_until_the_first_is_gone(house: House) -> None:
    """The first keeps the name; the second says who has it, asks it like any other, and takes its place in the end."""
    server = house.etcd()
    first, other = house.node(server.endpoint), house.node(server.endpoint)
    second = house.node(server.endpoint, name="node-1")
    follow([first, other], {"node-1", "node-2"})
    wait_until(lambda: second.members() == {"node-1", "node-2"}, "the second knows both")
    wait_until(lambda: second.events("discovery_name_taken"), "it tells")
    assert second.peers()["discovery"]["provisional"]
    answers_as_one([first, other, second], "taken")
    time.sleep(TTL)
    (told,) = second.events("discovery_name_taken")
    assert (told["peer"], told["address"]) == ("node-1", first.peer.address)
    assert first.stop() == 0
    follow([other, second], {"node-1", "node-2"}, SOON)
    answers_as_one([other, second], "its own")


def test_bad_values_of_others_are_passed_over_and_told_once(house: House) -> None:
    """What is no address is no peer; it is told once, and the rest is followed."""
    server = house.etcd()
    server.ctl("put", PREFIX + "odd", "not an address")
    server.ctl("put", "/sidegate/peers-of-others/x", "127.0.0.1:1")
    node = house.node(server.endpoint)
    follow([node], {"node-1"})
    server.ctl("put", PREFIX + "hand", "10.0.0.9:1051")
    follow([node], {"node-1", "hand"}, SOON)
    time.sleep(TTL)
    (told,) = node.events("discovery_passed_over")
    assert told["peer"] == "odd"
    assert "is not host:port" in told["reason"]


def test_a_user_with_a_password_over_tls(house: House, tmp_path: Path) -> None:
    """A role for the prefix is enough; a token that has expired is asked for anew; a wrong password and a wrong CA are
    one line each, and the daemon limits all the same."""
    authority = Authority()
    server = house.etcd("--auth-token-ttl", "1", authority=authority)
    server.ctl("user", "add", "root:secret")
    server.ctl("user", "grant-role", "root", "root")
    server.ctl("role", "add", "peers")
    server.ctl("role", "grant-permission", "--prefix=true", "peers", "readwrite", PREFIX)
    server.ctl("user", "add", "sidegate:pass word")
    server.ctl("user", "grant-role", "sidegate", "peers")
    server.ctl("auth", "enable")
    server.user = "root:secret"
    pair = authority.issue()
    files = {"ca": authority.pem, "cert": pair.cert, "key": pair.key, "other": Authority().pem}
    foreign = Authority().issue()
    files |= {"foreign": foreign.cert, "foreign-key": foreign.key}
    for name, content in files.items():
        (tmp_path / f"{name}.pem").write_bytes(content)
    (tmp_path / "password").write_text("pass word\n")
    (tmp_path / "wrong").write_text("password\n")

    def options(
        ca: str = "ca.pem", password: str = "password", cert: str = "cert.pem", key: str = "key.pem"
    ) -> tuple[str, ...]:
        user = ("--etcd-user", "sidegate", "--etcd-password-file", str(tmp_path / password))
        shown = ("--etcd-cert", str(tmp_path / cert), "--etcd-key", str(tmp_path / key))
        return ("--etcd-ca", str(tmp_path / ca), *shown, *user)

    nodes = three(house, server.endpoint, *options())
    answers_as_one(nodes, "tls")
    time.sleep(3)
    asked = server.calls("Authenticate")
    key = PREFIX + "node-1"
    lease = server.registered()[key]
    server.revoke(lease)
    wait_until(lambda: server.registered().get(key, lease) != lease, "it is registered anew")
    assert server.calls("Authenticate") > asked
    assert not nodes[0].events("discovery_away")
    for changed, reason in (
        ({"password": "wrong"}, "etcd_user or the password in etcd_password_file is wrong"),
        ({"ca": "other.pem"}, "its certificate is signed by no CA in etcd_ca"),
        ({"cert": "foreign.pem", "key": "foreign-key.pem"}, "it wants a certificate that it trusts"),
    ):
        node = house.node(server.endpoint, *options(**changed))
        wait_until(lambda node=node: node.events("discovery_away"), "it tells")  # type: ignore[misc]
        time.sleep(2)
        (told,) = node.events("discovery_away")
        assert reason in told["reason"]
        assert "pass word" not in node.log.read_text()
        assert admitted([node], "alone") == 30


def test_a_file_that_is_missing_ends_the_start(short_path: Path) -> None:
    """One line names the setting and the file."""
    words = ("--socket", str(short_path / "s"), "--http", "off", "--listen", f"127.0.0.1:{free_port()}")
    asked = ("--discovery", "etcd", "--etcd-endpoints", "127.0.0.1:1", "--etcd-ca", str(short_path / "ca.pem"))
    run = [sys.executable, "-m", "sidecar", "serve", *words, *asked]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=clean_environment())
    assert done.returncode == 2
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["event"], line["reason"]) == ("settings_unusable", f"etcd_ca: {short_path}/ca.pem: is missing")


def test_another_server_is_asked_where_one_hangs_up(house: House) -> None:
    """Endpoints are tried in turn, at growing intervals, and one that was given up is dialled no more."""
    server = house.etcd()
    port = free_port()
    with Watch(port) as dead:
        node = house.node(f"127.0.0.1:{port},127.0.0.1:{port},{server.endpoint}")
        follow([node], {"node-1"}, 10)
        time.sleep(0.5)
        seen = dead.connections
        assert seen <= 4
        time.sleep(3)
        assert dead.connections == seen
        server.kill()
        time.sleep(6)
        assert dead.connections - seen <= 12
        failures = node.peers()["discovery"]["failures"]
        assert failures <= 16


def test_no_change_is_missed_while_keys_are_listed_and_compacted(house: House) -> None:
    """Neither puts nor deletions that come between the request for a watch and the list are, on a slow line, even if
    they are compacted at once."""
    server = house.etcd()
    proxy = SlowProxy(server.port)
    proxy.delay = 0.1
    over = threading.Event()

    def compact() -> None:
        number = 0
        while not over.is_set():
            number += 1
            server.ctl("put", PREFIX + f"peer-{number}", f"10.0.0.1:{number}")
            server.ctl("del", PREFIX + f"peer-{number - 1}")
            revision = server.ctl("get", "-w", "fields", "none").split('"Revision" : ')[1].split("\n")[0]
            server.ctl("compact", revision)
        server.ctl("put", PREFIX + "last", "10.0.0.2:1")

    async def run() -> None:
        told: list[str] = []
        standing = Standing("etcd", time.monotonic, lambda event, **_: told.append(event))
        settings = Settings([f"127.0.0.1:{proxy.port}"], PREFIX.rstrip("/"), TTL, Files().read)
        storm = asyncio.create_task(asyncio.to_thread(compact))
        for life in range(6):
            source = Etcd(settings, Peer("me", "127.0.0.1:1051"), standing)
            async with asyncio.timeout(20), aclosing(source.members()) as sets:
                async for found in sets:
                    if life == 5:
                        over.set()
                    names = {peer.name for peer in found}
                    if standing.listed and (life < 5 or (names >= {"me", "last"} and len(names) == 3)):
                        break
        await storm
        assert not told

    try:
        asyncio.run(run())
    finally:
        over.set()
        proxy.close()


def test_keys_are_listed_again_after_a_compaction(house: House) -> None:
    """A daemon that stood still while more happened than etcd buffers for it, all of it compacted since, lists anew."""
    server = house.etcd()
    nodes = [house.node(server.endpoint, "--etcd-ttl", "60") for _ in range(2)]
    follow(nodes, {"node-1", "node-2"})
    lists = server.calls("Range")
    nodes[0].pause()
    with grpc.insecure_channel(server.endpoint) as channel:
        kv = stubs.KVStub(channel)  # type: ignore[no-untyped-call]

        def put(key: str, value: bytes) -> None:
            request = pb.RequestOp(request_put=pb.PutRequest(key=(PREFIX + key).encode(), value=value))
            kv.Txn(pb.TxnRequest(success=[request]), timeout=30)

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda number: put(f"big-{number % 20}", bytes(20_000)), range(3_000)))
        put("late", b"10.0.0.9:1051")
    server.ctl("del", PREFIX + "big-0", PREFIX + "big-9")
    server.ctl("compact", server.ctl("get", "-w", "fields", "none").split('"Revision" : ')[1].split("\n")[0])
    own = server.calls("Range") - lists
    nodes[0].resume()
    follow(nodes, {"node-1", "node-2", "late"})
    assert server.calls("Range") - lists > own, "it has listed again"
    assert not nodes[0].events("discovery_away")
