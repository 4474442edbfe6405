"""Three daemons that are one limiter: whichever is asked, the owner decides, in order, and each gets its own answer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sidecar import Behavior, Client, Limit, SidegateError, Status
from sidecar.wire import Op
from tests.clusters import Cluster, free_port, running_cluster
from tests.daemons import EPOCH, clean_environment, wait_until
from tests.sockets import PATIENCE, Raw, packed

WIDE = 1_000_000


@pytest.fixture(scope="module")
def trio() -> Iterator[Cluster]:
    """Three daemons that several tests share, each with names of its own; none of these tests harms one.

    Their time-out is long: a busy machine is no reason for an owner to count as away.
    """
    with running_cluster(3, "--peer-timeout", "20000") as cluster:
        yield cluster


def plain(name: str, key: str, hits: int = 1, limit: int = WIDE, behavior: int = 0) -> list[object]:
    """A request as it stands in a frame; its window is a day."""
    return [name, key, hits, limit, 86_400_000, 0, behavior]


# --- One limit


def test_a_limit_of_100_asked_300_times_through_three_daemons_admits_exactly_100(trio: Cluster) -> None:
    """Nine threads, three on each daemon, at once; for a key of each owner."""
    limit = Limit("exactly", 100, per="1d")
    for owner in trio.nodes:
        (key,) = trio.keys(owner, 1, "exactly")
        start = threading.Barrier(9)

        def ask(number: int, key: str = key, start: threading.Barrier = start) -> list[bool]:
            with trio.nodes[number % 3].client(timeout=PATIENCE) as client:
                start.wait()
                return [client.hit(limit, key).allowed for _ in range(34 if number < 3 else 33)]

        with ThreadPoolExecutor(9) as pool:
            admitted = [each for part in pool.map(ask, range(9)) for each in part]
        assert len(admitted) == 300
        assert sum(admitted) == 100
        assert [node.left(limit, key) for node in trio.nodes] == [0, 0, 0]


def test_the_owner_is_told_and_is_the_same_whichever_daemon_is_asked(trio: Cluster) -> None:
    """`owner` is the name of the node that decided: the one on whose ring place the key lies."""
    limit = Limit("owners", WIDE, per="1d")
    keys = [f"user:{number}" for number in range(200)]
    wanted = [trio.owner("owners", key).name for key in keys]
    assert set(wanted) == {"node-1", "node-2", "node-3"}
    for asked, node in enumerate(trio.nodes, 1):
        with node.client() as client:
            decisions = client.check([limit.request(key) for key in keys])
        assert [decision.owner for decision in decisions] == wanted
        assert {decision.remaining for decision in decisions} == {WIDE - asked}
        assert not any(decision.degraded or decision.error for decision in decisions)


def test_the_owners_clock_decides(start_cluster: Callable[..., Cluster]) -> None:
    """Nodes' clocks differ; a bucket knows its owner's only, whoever asks."""
    cluster = start_cluster(2, "--peer-timeout", "20000", clock=f"manual:{EPOCH}")
    limit = Limit("clock", 5, per="1s")
    asked, owner = cluster.nodes
    (key,) = cluster.keys(owner, 1, "clock")
    assert asked.ask(limit, key, 5).reset_time == EPOCH + 1_000
    with asked.client() as client:
        client.advance_clock(60_000)
    assert asked.ask(limit, key).status == Status.OVER_LIMIT
    with owner.client() as client:
        client.advance_clock(1_000)
    assert asked.ask(limit, key).reset_time == EPOCH + 2_000


# --- Order


def test_2500_keys_of_one_owner_in_one_moment(trio: Cluster) -> None:
    """Three frames at once, of 1,000, 1,000 and 500 keys: all decided by that owner, each answer in its place."""
    asked, owner = trio.nodes[0], trio.nodes[1]
    keys = trio.keys(owner, 2_500, "moment")
    frames = [keys[:1_000], keys[1_000:2_000], keys[2_000:]]
    # Hits tell the requests apart; keys that differ in length make the bytes differ as well.
    with Raw(asked.socket) as raw:
        raw.send(
            b"".join(
                packed(1, number, Op.CHECK, [plain("moment", key, int(key.partition(":")[2]) + 1) for key in part])
                for number, part in enumerate(frames, 1)
            )
        )
        answers = {answer[1]: answer for answer in (raw.answer() for _ in frames)}
    for number, part in enumerate(frames, 1):
        _, _, outcome, decisions, _ = answers[number]
        assert outcome == 0
        assert [(each[0], WIDE - each[2] - 1, each[5]) for each in decisions] == [
            (0, int(key.partition(":")[2]), owner.name) for key in part
        ]


def test_one_buckets_requests_are_judged_in_the_order_they_came(trio: Cluster) -> None:
    """In one frame, between keys of other nodes, and over frames sent without waiting for the answer."""
    asked, owner, other = trio.nodes
    (key,) = trio.keys(owner, 1, "order")
    others = [*trio.keys(other, 2, "order"), *trio.keys(asked, 2, "order")]
    frames = 200
    with Raw(asked.socket) as raw:
        for number in range(1, frames + 1):
            mixed = [plain("order", each) for pair in zip(others, [key] * 4, strict=True) for each in pair]
            raw.send(packed(1, number, Op.CHECK, mixed))
        answers = {answer[1]: answer[3] for answer in (raw.answer() for _ in range(frames))}
    left = [each[2] for number in range(1, frames + 1) for each in answers[number][1::2]]
    assert left == [WIDE - used for used in range(1, 4 * frames + 1)]


def test_requests_without_batching_keep_the_order_and_come_through(trio: Cluster) -> None:
    """NO_BATCHING leaves alone and at once, after those of the same bucket that came before."""
    asked, owner = trio.nodes[2], trio.nodes[0]
    (key,) = trio.keys(owner, 1, "alone")
    with Raw(asked.socket) as raw:
        requests = [plain("alone", key, behavior=Behavior.NO_BATCHING if number % 3 else 0) for number in range(300)]
        raw.send(packed(1, 1, Op.CHECK, requests))
        *_, decisions, _ = raw.answer()
    assert [(each[0], each[2], each[5]) for each in decisions] == [
        (0, WIDE - used, owner.name) for used in range(1, 301)
    ]


def test_no_batching_leaves_in_a_batch_of_its_own(trio: Cluster) -> None:
    """Ten of them are ten batches; ten plain ones in one frame are one."""
    asked, owner = trio.nodes[1], trio.nodes[2]
    keys = trio.keys(owner, 10, "single")
    limit = Limit("single", WIDE, per="1d")
    asked.ask(limit, keys[0])
    for behavior, batches in ((0, 1), (Behavior.NO_BATCHING, 10)):
        before = asked.link(owner)
        single = Limit("single", WIDE, per="1d", behavior=behavior)
        with asked.client() as client:
            assert all(client.check([single.request(key) for key in keys]))
        after = asked.link(owner)
        assert (after["batches"] - before["batches"], after["requests"] - before["requests"]) == (batches, 10)


def test_no_batching_does_not_wait_for_others_to_gather(start_cluster: Callable[..., Cluster]) -> None:
    """With batch_wait set, a plain hit waits that long for company; one without batching leaves at once."""
    cluster = start_cluster(2, "--peer-timeout", "20000", "--batch-wait", "1000")
    asked, owner = cluster.nodes
    keys = cluster.keys(owner, 4, "gather")
    patient = Limit("gather", WIDE, per="1d")
    hasty = Limit("gather", WIDE, per="1d", behavior=Behavior.NO_BATCHING)
    asked.ask(patient, keys[0])
    seconds = []
    for limit in (patient, hasty, hasty, hasty):
        start = time.monotonic()
        assert asked.ask(limit, keys[1])
        seconds.append(time.monotonic() - start)
    assert seconds[0] >= 0.9
    assert min(seconds[1:]) < 0.5


# --- Other operations on a remote key


def test_peek_refund_and_reset_of_a_remote_key(trio: Cluster) -> None:
    """Each does at the owner what it does at home; a reset says whether there was a bucket."""
    asked, owner = trio.nodes[0], trio.nodes[2]
    (key,) = trio.keys(owner, 1, "remote")
    limit = Limit("remote", 10, per="1d")
    with asked.client() as client:
        assert client.reset(limit, key) is False
        assert client.peek(limit, key).remaining == 10
        assert client.hit(limit, key, 7).remaining == 3
        assert client.refund(limit, key, 2).remaining == 5
        assert client.peek(limit, key).remaining == 5
        assert owner.left(limit, key) == 5
        assert client.reset(limit, key) is True
        assert owner.left(limit, key) == 10
        assert client.hit(limit, key).owner == owner.name


def test_a_bad_request_gets_its_own_error_and_its_neighbours_their_answers(trio: Cluster) -> None:
    """Whatever is wrong with it, and whether this node or the owner sees it."""
    asked, owner = trio.nodes[0], trio.nodes[1]
    keys = trio.keys(owner, 4, "beside")
    good = plain("beside", keys[0])
    bad: list[object] = [
        plain("beside", keys[1], limit=-1),
        plain("beside", keys[1], hits=2**64 - 1),
        plain("beside", keys[1], behavior=64),
        plain("beside", keys[1], limit=2**63),
        plain("beside", ""),
        plain("", keys[1]),
        plain("beside", "é" * 600),
        ["beside", keys[1], 1, 10],
        [*plain("beside", keys[1]), 0, None, 9],
        [*plain("beside", keys[1]), 0, None, True],
        [*plain("beside", keys[1]), 0, None, 1.0],
        [*plain("beside", keys[1]), 0, None, {}],
        [*plain("beside", keys[1]), 0, "now"],
        ["beside", keys[1], "1", 10, 1000],
        ["beside", keys[1], True, 10, 1000],
        "text",
        None,
    ]
    with Raw(asked.socket) as raw:
        for number, odd in enumerate(bad, 1):
            raw.send(packed(1, number, Op.CHECK, [good, odd, good]))
            _, request_id, outcome, decisions, _ = raw.answer()
            assert (request_id, outcome) == (number, 0), (odd, decisions)
            first, error, last = decisions
            assert (first[5], last[5], first[2] - last[2]) == (owner.name, owner.name, 1), odd
            assert error[0] == Status.ERROR, odd
            assert error[7], odd


def test_a_reset_that_names_no_bucket_is_refused(trio: Cluster) -> None:
    """A key that is too long is refused by whoever it would belong to; the connection lives on."""
    with Raw(trio.nodes[0].socket) as raw:
        for number, key in enumerate(("é" * 600, "k" * 1_025, ""), 1):
            raw.send(packed(1, number, Op.RESET, ["n", key]))
            assert raw.answer()[1:3] == [number, 1]


def test_a_frame_of_the_longest_keys_is_answered(trio: Cluster) -> None:
    """A thousand remote keys of 1,000 bytes each: more than a megabyte in a batch."""
    asked, owner = trio.nodes[0], trio.nodes[1]
    keys = trio.keys(owner, 1_000, "long", "x" * 990)
    limit = Limit("long", 5, per="1d")
    with asked.client(timeout=PATIENCE) as client:
        decisions = client.check([limit.request(key) for key in keys])
    assert Counter((each.owner, each.remaining) for each in decisions) == {(owner.name, 4): 1_000}


# --- What a daemon says of its cluster


def command(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment(**more),
    )


def test_peers_shows_the_set_and_each_ones_state(start_cluster: Callable[..., Cluster]) -> None:
    """itself, one that was never asked, one that is connected, one that is away; as lines and as JSON."""
    cluster = start_cluster(4)
    asked, _, connected, dead = cluster.nodes
    limit = Limit("states", WIDE, per="1d")
    wait_until(
        lambda: not asked.ask(limit, cluster.keys(connected, 1, "states")[0]).error, "the connected one was asked"
    )
    dead.crash()
    asked.ask(limit, cluster.keys(dead, 1, "states")[0])
    wait_until(lambda: asked.link(dead)["state"] == "away", "the dead one counts as away")
    lines = command("peers", "--socket", asked.socket)
    assert lines.returncode == 0, lines.stderr
    rows = [line.split() for line in lines.stdout.splitlines()]
    assert rows == [
        [node.name, node.peer.address, state]
        for node, state in zip(cluster.nodes, ("self", "idle", "connected", "away"), strict=True)
    ]
    facts = json.loads(command("peers", "--json", "--socket", asked.socket).stdout)
    assert facts["me"] == asked.peer.address
    assert [[peer["name"], peer["address"], peer["state"]] for peer in facts["peers"]] == rows
    assert facts["forwarded"] >= 2
    assert facts["fallbacks"] >= 1


def test_a_daemon_that_finds_itself_not_among_its_peers_serves_its_own(start_cluster: Callable[..., Cluster]) -> None:
    """It says so once, clearly, and decides every key itself."""
    cluster = start_cluster(1)
    (node,) = cluster.nodes
    elsewhere = f"a=127.0.0.1:{free_port()},b=127.0.0.1:{free_port()}"
    node.stop()
    node.list_peers(elsewhere)
    node.start()
    (event,) = node.events("not_among_peers")
    assert event["level"] == "warning"
    assert node.peer.address in json.dumps(event)
    limit = Limit("lost", WIDE, per="1d")
    for number in range(50):
        decision = node.ask(limit, f"k{number}")
        assert (decision.owner, decision.error, decision.degraded) == (node.name, "", False)


def test_a_second_daemon_on_one_listen_address_ends_with_one_clear_line(start_cluster: Callable[..., Cluster]) -> None:
    """Exit status 2; the first goes on."""
    cluster = start_cluster(2)
    first, _ = cluster.nodes
    address = first.peer.address
    words = ["--listen", address, "--http", "off", "--peers", f"{address},127.0.0.1:1"]
    ended = command("serve", "--socket", str(cluster.folder / "s"), *words)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    event = json.loads(line)
    assert (event["event"], event["listen"]) == ("listen_failed", address)
    with first.client() as client:
        assert client.ping() == first.name


def test_logs_of_daemons_that_end_are_lines_of_json(start_cluster: Callable[..., Cluster]) -> None:
    """Linked daemons stop with status 0 on SIGTERM, whatever order, and write nothing but events."""
    cluster = start_cluster(3)
    cluster.connect(Limit("ends", WIDE, per="1d"))
    for node in cluster.nodes:
        assert node.stop(timeout=PATIENCE) == 0
        names = [event["event"] for event in node.events()]
        assert "loop_error" not in names
        assert names[-1] == "daemon_stopped"


# --- A cluster for trying


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_cluster_tells_how_to_ask_and_stops_all(short_path: Path, number: signal.Signals) -> None:
    """One line for each node, which works as it stands; Ctrl-C ends every daemon and exits with 0."""
    words = [sys.executable, "-m", "sidecar", "cluster", "--nodes", "3", "--folder", str(short_path / "trial")]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=clean_environment()
    )
    try:
        assert process.stdout
        lines = [process.stdout.readline().split() for _ in range(3)]
        assert [line[:2] for line in lines] == [["sidegate", "hit"]] * 3
        sockets = [line[line.index("--socket") + 1] for line in lines]
        assert len(set(sockets)) == 3
        owners = []
        for line in lines:
            answer = command(*line[1:], "--json")
            assert answer.returncode == 0, answer.stderr
            owners.append((json.loads(answer.stdout)["owner"], json.loads(answer.stdout)["remaining"]))
        (owner,) = {owner for owner, _ in owners}
        assert owner.startswith("node-")
        assert [left for _, left in owners] == [99, 98, 97]
        pids = []
        for path in sockets:
            with Client(path, timeout=PATIENCE) as client:
                pids.append(client.info()["pid"])
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        for path in sockets:
            with pytest.raises(SidegateError), Client(path) as client:
                client.ping()
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its daemons
            process.wait(PATIENCE)


@pytest.mark.parametrize("nodes", ["0", "33", "-1"])
def test_the_command_cluster_refuses_odd_sizes(nodes: str) -> None:
    """One line, and status 2."""
    ended = command("cluster", "--nodes", nodes)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1


def test_hit_asks_a_remote_owner_through_the_command(trio: Cluster) -> None:
    """`sidegate hit` and `sidegate reset` work on any node."""
    (key,) = trio.keys(trio.nodes[1], 1, "typed")
    words = ("typed", key, "--limit", "1", "--per", "1d")
    for node, status in zip(trio.nodes, (0, 1, 1), strict=True):
        assert command("hit", *words, "--socket", node.socket, "--timeout", "20").returncode == status
    found = command("reset", "typed", key, "--socket", trio.nodes[2].socket, "--json", "--timeout", "20")
    assert json.loads(found.stdout) == {"existed": True}
