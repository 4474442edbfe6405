"""An owner that is dead, stopped, slow or talks nonsense: only its keys are touched, each answered in time."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pytest

from cluster_link.membership import Peer
from cluster_link.ring import Ring
from sidecar import Client, Decision, Limit, RequestRefused, SidegateError, Status
from sidecar.messages import Fallback
from sidecar.wire import Op
from tests.clusters import Cluster, Load, Node, Watch, free_port
from tests.daemons import wait_until
from tests.helpers import NOON
from tests.sockets import PATIENCE, Raw, packed

WIDE = 1_000_000
BUSY = 2.0
"""Seconds by which anything may be late on a machine that runs tests."""
POLICIES = ("error", "local", "allow", "deny")


def plain(name: str, key: str, limit: int = WIDE) -> list[object]:
    """A hit as it stands in a frame; its window is a day."""
    return [name, key, 1, limit, 86_400_000]


def kind(decision: Decision) -> str:
    """What answered: "owner", or the policy that did."""
    if not decision.degraded:
        return "error" if decision.status == Status.ERROR else "owner"
    assert decision.error, "a fallback says why"
    if decision.status == Status.OVER_LIMIT:
        return "deny"
    return "local" if decision.reset_time else "allow"


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of work(0), work(1), ... at once."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


# --- An owner that is dead


@pytest.mark.parametrize("setting", POLICIES)
def test_a_dead_owners_keys_are_answered_as_the_daemon_is_set_or_the_request_asks(
    start_cluster: Callable[..., Cluster], setting: str
) -> None:
    """Every setting, and every wish of a request beside it, by a Limit's fallback; other keys are not touched."""
    cluster = start_cluster(3, "--fallback", setting, "--peer-timeout", "5000")
    asked, good, dead = cluster.nodes
    cluster.connect(Limit("policy", 90, per="1d"))
    dead.crash()
    keys = cluster.keys(dead, 5, "policy")
    for wish, key in zip(("", *POLICIES), keys, strict=True):
        limit = Limit("policy", 90, per="1d", fallback=wish or Fallback.DAEMONS)
        policy = wish or setting
        decisions = [asked.ask(limit, key) for _ in range(40)]
        assert {kind(each) for each in decisions[:30]} == {policy}
        if policy == "local":
            # An equal share: 30 of 90 for each of three nodes.
            assert [(each.allowed, each.limit, each.remaining) for each in decisions] == [
                *((True, 30, left) for left in range(29, -1, -1)),
                *((False, 30, 0) for _ in range(10)),
            ]
        elif policy != "error":
            assert {each.limit for each in decisions} == {90}
        assert {each.owner for each in decisions} == {asked.name}
        with asked.client() as client:
            if policy == "error":
                with pytest.raises(RequestRefused, match=dead.name):
                    client.hit(limit, key)
            else:
                assert client.hit(limit, key).degraded
            with pytest.raises(SidegateError, match=dead.name):
                client.reset(limit, key)
    for node in (asked, good):
        limit = Limit("policy", 90, per="1d")
        decisions = [asked.ask(limit, key) for key in cluster.keys(node, 20, "policy")]
        assert {(kind(each), each.owner) for each in decisions} == {("owner", node.name)}


def test_a_share_of_a_calendar_day_ends_with_the_daemons_own_day(start_cluster: Callable[..., Cluster]) -> None:
    """In India (UTC+5:30), a share of a daily limit ends where an owned bucket does: at 18:29:59.999 UTC."""
    cluster = start_cluster(2, "--fallback", "local", "--time-zone", "Asia/Kolkata", clock=f"manual:{NOON}")
    asked, dead = cluster.nodes
    limit = Limit("daily", 90, per="calendar day")
    cluster.connect(limit)
    dead.crash()
    share = asked.ask(limit, cluster.keys(dead, 1, "daily")[0])
    owned = asked.ask(limit, cluster.keys(asked, 1, "daily")[0])
    assert (share.degraded, share.remaining, owned.degraded, owned.remaining) == (True, 44, False, 89)
    assert share.reset_time == owned.reset_time
    assert share.reset_time % 86_400_000 == (18 * 60 + 30) * 60_000 - 1


def test_an_owner_killed_under_load_touches_only_its_keys(start_cluster: Callable[..., Cluster]) -> None:
    """200 requests a second over 1,000 keys, of every policy: after the owner's death each of its keys is answered by
    the policy within the time-out; once the members are told, no request fails and nobody dials the dead address."""
    cluster = start_cluster(3, "--peer-timeout", "2000")
    first, second, dead = cluster.nodes
    limits = {wish: Limit("load", WIDE, per="1d", fallback=wish or 0) for wish in ("", *POLICIES)}
    keys = [f"account:{number}" for number in range(1_000)]
    owners = {key: cluster.owner("load", key).name for key in keys}
    wishes = {key: ("", *POLICIES)[number % 5] for number, key in enumerate(keys)}
    cluster.connect(limits[""])

    def ask(client: Client, number: int) -> tuple[str, Decision]:
        key = keys[number * 7 % 1_000]
        return key, client.check([limits[wishes[key]].request(key)])[0]

    with Load([first, second] * 4, ask, rate=25) as load:
        time.sleep(1.0)
        killed = time.monotonic()
        dead.crash()
        gone = time.monotonic()
        time.sleep(2.0)
        told = time.monotonic()
        cluster.follow([first, second])
        following = time.monotonic()
        with Watch(dead.port) as watch:
            time.sleep(3.0)
            assert watch.connections == 0
    assert len(load.results) > 200

    lost: dict[str, list[float]] = defaultdict(list)
    for result, start, end in load.results:
        assert isinstance(result, tuple), result  # the daemons that were asked live: each gave an answer
        key, decision = result
        if owners[key] != dead.name or end < killed or start > following:
            assert kind(decision) == "owner", (key, decision)
        elif gone < start and end < told:
            assert kind(decision) == (wishes[key] or "error"), (key, decision)
            lost[kind(decision)].append(end - start)
        if owners[key] != dead.name:
            assert decision.owner == owners[key]
        elif start > following:
            assert decision.owner in (first.name, second.name)
    assert set(lost) == set(POLICIES), "keys of every policy were asked of the dead owner"
    assert max(max(seconds) for seconds in lost.values()) < 2.0 + BUSY
    assert first.members() == second.members() == {first.name, second.name}


def test_a_dead_owner_that_comes_back_is_used_again(start_cluster: Callable[..., Cluster]) -> None:
    """Within five seconds of being up, without anybody being told."""
    cluster = start_cluster(2)
    asked, owner = cluster.nodes
    limit = Limit("back", WIDE, per="1d")
    (key,) = cluster.keys(owner, 1, "back")
    cluster.connect(limit)
    for _ in range(2):
        owner.crash()
        wait_until(lambda: kind(asked.ask(limit, key)) == "error", "its death is noticed")
        time.sleep(1.0)
        owner.start()
        wait_until(lambda: kind(asked.ask(limit, key)) == "owner", "it is used again", 5.0)
    names = [event["event"] for event in asked.events()]
    assert names.count("peer_away") >= 1
    assert "loop_error" not in names


# --- An owner that stands still


def test_a_stopped_owner_costs_one_time_out_and_is_used_again_when_it_goes_on(
    start_cluster: Callable[..., Cluster],
) -> None:
    """SIGSTOP: the kernel still takes its bytes.  After one time-out further requests fail at once, those of other
    owners go on throughout, and within five seconds of SIGCONT it is asked again."""
    cluster = start_cluster(3, "--peer-timeout", "2000")
    asked, good, stopped = cluster.nodes
    limit = Limit("hole", WIDE, per="1d")
    keys, others = cluster.keys(stopped, 100, "hole"), cluster.keys(good, 100, "hole")
    cluster.connect(limit)
    for _ in range(2):
        stopped.pause()
        start = time.monotonic()
        assert kind(asked.ask(limit, keys[0])) == "error"
        assert 1.0 < time.monotonic() - start < 2.0 + BUSY
        start = time.monotonic()
        for key, other in zip(keys, others, strict=True):
            assert kind(asked.ask(limit, key)) == "error"
            assert kind(asked.ask(limit, other)) == "owner"
        assert time.monotonic() - start < 20.0, "a hundred requests cost more than a tenth of a time-out each"
        stopped.resume()
        wait_until(lambda: kind(asked.ask(limit, keys[0])) == "owner", "it is used again", 5.0)
    assert all(kind(asked.ask(limit, key)) == "owner" for key in keys)


def test_requests_that_wait_for_a_stopped_owner_fail_together(start_cluster: Callable[..., Cluster]) -> None:
    """Forty threads at once wait one time-out, not one after the other."""
    cluster = start_cluster(2, "--peer-timeout", "1000")
    asked, stopped = cluster.nodes
    limit = Limit("together", WIDE, per="1d")
    keys = cluster.keys(stopped, 40, "together")
    cluster.connect(limit)
    stopped.pause()
    start = time.monotonic()
    found = in_threads(40, lambda number: kind(asked.ask(limit, keys[number])))
    assert time.monotonic() - start < 1.0 + BUSY
    assert set(found) == {"error"}


def test_a_callers_time_out_is_enough_to_get_the_policys_answer(start_cluster: Callable[..., Cluster]) -> None:
    """The time-out of a client is the budget of its request: the daemon answers by the policy within it, and not at
    the moment at which the client gives up (three such calls would have it believe the daemon itself away)."""
    cluster = start_cluster(2, "--peer-timeout", "60000", "--fallback", "allow")
    asked, stopped = cluster.nodes
    limit = Limit("budget", WIDE, per="1d")
    keys = cluster.keys(stopped, 20, "budget")
    cluster.connect(limit)
    stopped.pause()

    def ask(number: int) -> str:
        with asked.client(timeout=1.0) as client:
            try:
                return kind(client.hit(limit, keys[number]))
            except SidegateError as error:
                return type(error).__name__

    found = Counter(ask(number) for number in range(4))
    found += Counter(in_threads(8, lambda number: ask(4 + number)))
    # Most of them: a busy machine may be late for one or the other.
    assert found["allow"] > 6, found


def test_a_callers_short_deadline_on_a_stopped_owner_leaves_its_own_keys_alone(
    start_cluster: Callable[..., Cluster],
) -> None:
    """A client with the time-out it has by default, whose remote keys get no answer, goes on with keys of this node."""
    cluster = start_cluster(2, "--peer-timeout", "60000")
    asked, stopped = cluster.nodes
    limit = Limit("mixed", WIDE, per="1d")
    (mine,), theirs = cluster.keys(asked, 1, "mixed"), cluster.keys(stopped, 6, "mixed")
    cluster.connect(limit)
    stopped.pause()
    with asked.client(timeout=0.5) as client:
        for key in theirs:
            with pytest.raises(SidegateError):
                client.hit(limit, key)
        assert client.hit(limit, mine).owner == asked.name


def test_a_queue_over_its_bound_fails_at_once_by_the_policy(start_cluster: Callable[..., Cluster]) -> None:
    """What waits for one peer is bounded: the request past it is answered at once; those within are answered by the
    owner when it goes on."""
    cluster = start_cluster(2, "--peer-timeout", "60000", "--peer-queue", "10", "--fallback", "deny")
    asked, stopped = cluster.nodes
    (key,) = cluster.keys(stopped, 1, "queue")
    cluster.connect(Limit("queue", WIDE, per="1d"))
    stopped.pause()
    with Raw(asked.socket) as raw:
        raw.send(packed(1, 1, Op.CHECK, [plain("queue", key)]))
        wait_until(lambda: asked.link(stopped)["queued"] == 0, "the first has left")
        for number in range(2, 31):
            raw.send(packed(1, number, Op.CHECK, [plain("queue", key)]))
        refused = [raw.answer() for _ in range(19)]
        assert [answer[1] for answer in refused] == list(range(12, 31))
        for answer in refused:
            (decision,) = answer[3]
            assert (decision[0], decision[6]) == (Status.OVER_LIMIT, True)
            assert "10 requests" in decision[7]
        assert asked.link(stopped)["queued"] == 10
        stopped.resume()
        answers = [raw.answer() for _ in range(11)]
        assert [(answer[1], answer[3][0][2]) for answer in answers] == [
            (number, WIDE - number) for number in range(1, 12)
        ]


def test_callers_that_go_while_their_owner_is_stopped_harm_nobody(start_cluster: Callable[..., Cluster]) -> None:
    """Two hundred close their sockets mid-flight.  The daemon goes on, charges each at most once, holds no connection
    and no request for them, and ends promptly when told to."""
    cluster = start_cluster(2, "--peer-timeout", "3000", "--grace", "60000")
    asked, stopped = cluster.nodes
    limit = Limit("gone", WIDE, per="1d")
    (key,), (mine,) = cluster.keys(stopped, 1, "gone"), cluster.keys(asked, 1, "gone")
    cluster.connect(limit)
    stopped.pause()
    callers = [Raw(asked.socket) for _ in range(200)]
    for caller in callers:
        caller.send(packed(1, 1, Op.CHECK, [plain("gone", key), plain("gone", mine)]))
    wait_until(lambda: asked.left(limit, mine) == WIDE - 200, "all their requests were read")
    for caller in callers:
        caller.close()
    wait_until(lambda: asked.connections()["open"] == 1, "their connections are gone")
    stopped.resume()
    wait_until(lambda: kind(asked.ask(limit, key)) == "owner", "the owner is asked again")
    used = WIDE - stopped.left(limit, key)
    assert 1 <= used <= 201 + 200
    wait_until(lambda: asked.link(stopped)["queued"] == 0, "nothing is left in the queue")
    assert not asked.events("internal_error")
    assert not asked.events("loop_error")
    start = time.monotonic()
    assert asked.stop(timeout=PATIENCE) == 0
    assert time.monotonic() - start < 20.0, "it waited for those who had gone"


@pytest.mark.parametrize("fallback", [True, 1.0])
def test_an_odd_fallback_does_not_end_a_link(start_cluster: Callable[..., Cluster], fallback: object) -> None:
    """A client that sends a fallback of the wrong type hurts nobody, not even while the owner is away."""
    cluster = start_cluster(2, "--peer-timeout", "1000")
    asked, stopped = cluster.nodes
    limit = Limit("odd", WIDE, per="1d")
    (key,) = cluster.keys(stopped, 1, "odd")
    cluster.connect(limit)
    stopped.pause()
    with Raw(asked.socket) as raw:
        raw.socket.settimeout(10.0)
        raw.send(packed(1, 1, Op.CHECK, [[*plain("odd", key), 0, 0, 0, None, fallback]]))
        assert raw.answer()[3][0][0] == Status.ERROR
    assert kind(asked.ask(limit, key)) == "error"
    stopped.resume()
    wait_until(lambda: kind(asked.ask(limit, key)) == "owner", "the owner is asked again", 10.0)


# --- An owner that is slow


def test_a_slow_owner_charges_at_most_once(start_cluster: Callable[..., Cluster]) -> None:
    """300 ms away, with a caller that waits 100 ms: the caller is told within its time, and the hit counts once or
    not at all."""
    cluster = start_cluster(2, "--peer-timeout", "5000", slow=[1])
    asked, slow = cluster.nodes
    limit = Limit("slow", WIDE, per="1d")
    keys = cluster.keys(slow, 20, "slow")
    cluster.connect(limit)
    cluster.proxies[1].delay = 0.3
    with Raw(asked.socket) as raw:
        for number, key in enumerate(keys, 1):
            start = time.monotonic()
            raw.send(packed(1, number, Op.CHECK, [plain("slow", key)], 100))
            _, request_id, _, (decision,), _ = raw.answer()
            assert time.monotonic() - start < 0.1 + BUSY
            assert (request_id, decision[0]) == (number, Status.ERROR)
    cluster.proxies[1].delay = 0.0
    time.sleep(0.5)
    assert asked.ask(limit, "any")
    charged = Counter(WIDE - slow.left(limit, key) for key in keys)
    assert set(charged) <= {0, 1}
    assert charged[1], "nothing ever reached the owner: this tested nothing"


def test_a_slow_owner_is_no_absent_one(start_cluster: Callable[..., Cluster]) -> None:
    """Whoever waits long enough gets its answer, with many batches on their way at a time."""
    cluster = start_cluster(2, "--peer-timeout", "20000", slow=[1])
    asked, slow = cluster.nodes
    limit = Limit("late", WIDE, per="1d")
    keys = cluster.keys(slow, 30, "late")
    cluster.connect(limit)
    cluster.proxies[1].delay = 0.3
    assert {kind(each) for each in in_threads(30, lambda number: asked.ask(limit, keys[number]))} == {"owner"}
    assert [slow.left(limit, key) for key in keys] == [WIDE - 1] * 30


# --- Nodes that come and go


def test_each_node_restarts_in_turn_under_load(start_cluster: Callable[..., Cluster]) -> None:
    """In the gaps a request fails as a SidegateError or by the policy, and in no other way; then all is well."""
    cluster = start_cluster(3)
    limit = Limit("turns", WIDE, per="1d")
    keys = [f"account:{number}" for number in range(100)]
    owners = {key: cluster.owner("turns", key).name for key in keys}
    cluster.connect(limit)

    def ask(client: Client, number: int) -> tuple[str, Decision]:
        key = keys[number * 7 % 100]
        return key, client.check([limit.request(key)])[0]

    def well() -> bool:
        try:
            return all(
                kind(decision) == "owner" and decision.owner == owners[key]
                for node in cluster.nodes
                for key in keys
                for decision in [node.ask(limit, key)]
            )
        except SidegateError:
            return False

    with Load(cluster.nodes * 2, ask, rate=30) as load:
        for node in cluster.nodes:
            assert node.stop(timeout=PATIENCE) == 0
            node.start()
            wait_until(well, "all keys are answered by their owners, asked of any node")
        healthy = time.monotonic()
        time.sleep(0.5)
    for result in load.since(0.0):
        if isinstance(result, tuple):
            key, decision = result
            assert kind(decision) in ("owner", "error")
            assert kind(decision) == "error" or decision.owner == owners[key]
    # A client's own circuit to a daemon that was away may be open for a second more.
    assert len([result for result in load.since(healthy) if isinstance(result, tuple)]) > 10
    for node in cluster.nodes:
        assert not node.events("loop_error")
        assert not node.events("internal_error")


def test_sigterm_finishes_the_requests_in_flight(start_cluster: Callable[..., Cluster]) -> None:
    """Fifty frames that wait for a slow owner are answered by it before the node that was asked ends."""
    cluster = start_cluster(2, "--peer-timeout", "20000", "--grace", "20000", slow=[1])
    asked, slow = cluster.nodes
    limit = Limit("term", WIDE, per="1d")
    (key,) = cluster.keys(slow, 1, "term")
    cluster.connect(limit)
    cluster.proxies[1].delay = 1.0
    before = asked.peers()["forwarded"]
    with Raw(asked.socket) as raw:
        for number in range(1, 51):
            raw.send(packed(1, number, Op.CHECK, [plain("term", key)]))
        wait_until(lambda: asked.peers()["forwarded"] >= before + 50, "all have been read")
        asked.process.send_signal(signal.SIGTERM)
        answers = raw.answers()
    assert [(answer[1], answer[3][0][2]) for answer in answers] == [(number, WIDE - number) for number in range(1, 51)]
    assert asked.process.wait(PATIENCE) == 0


# --- A peer that talks nonsense


@contextmanager
def fake_peer(answer: Callable[[int, Any], bytes]) -> Iterator[Peer]:
    """A gRPC server that answers a greeting well and a check as it likes: answer(batch id, requests)."""

    def carry(batches: Iterator[bytes], _: object) -> Iterator[bytes]:
        for batch in batches:
            _, batch_id, op, payload, _ = msgpack.unpackb(batch)
            yield answer(batch_id, payload) if op == Op.CHECK else msgpack.packb((1, batch_id, 0, None, "fake"))

    server = grpc.server(ThreadPoolExecutor(8))
    handler: Any = grpc.stream_stream_rpc_method_handler(carry)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("sidegate.Peer", {"Carry": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield Peer("fake", f"127.0.0.1:{port}")
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize(
    "nonsense",
    [
        pytest.param(lambda batch_id: b"garbage", id="no msgpack"),
        pytest.param(lambda batch_id: msgpack.packb((2, batch_id, 0, [], "fake")), id="a later version"),
        pytest.param(lambda batch_id: msgpack.packb((1, batch_id, 0, [], "fake")), id="too few answers"),
        pytest.param(lambda batch_id: msgpack.packb((1, batch_id, 0, [5], "fake")), id="an answer that is none"),
        pytest.param(lambda batch_id: msgpack.packb((1, batch_id, 0, None, "fake")), id="no answers"),
        pytest.param(lambda batch_id: msgpack.packb((1, batch_id + 1, 0, [], "fake")), id="an id never sent"),
        pytest.param(lambda batch_id: msgpack.packb((1, batch_id, 1, "no", "fake")), id="a refusal"),
    ],
)
def test_a_peer_that_talks_nonsense_is_used_again_when_it_talks_sense(
    short_path: Path, nonsense: Callable[[int], bytes]
) -> None:
    """The requests of that batch fall back; the link is not lost, and the daemon serves its own throughout."""
    sane = threading.Event()

    def answer(batch_id: int, payload: Any) -> bytes:
        if not sane.is_set():
            return nonsense(batch_id)
        return bytes(msgpack.packb((1, batch_id, 0, [(0, 10, 9, 1, 0)] * len(payload), "fake")))

    with fake_peer(answer) as peer:
        port = free_port()
        me = Peer("me", f"127.0.0.1:{port}")
        node = Node(short_path, "me", port, me, f"me={me.address},fake={peer.address}", clock="system")
        try:
            limit = Limit("sense", 10, per="1d")
            ring = Ring([me, peer])
            keys = {ring.owner("sense", f"account:{number}").name: f"account:{number}" for number in range(100)}
            decisions = node.ask_all(limit, [keys["fake"], keys["me"]])
            assert [kind(each) for each in decisions] == ["error", "owner"]
            sane.set()
            wait_until(lambda: kind(node.ask(limit, keys["fake"])) == "owner", "the peer is asked again", 10.0)
            assert node.ask(limit, keys["fake"]).owner == "fake"
        finally:
            node.kill()
