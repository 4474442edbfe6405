"""The gRPC door on real daemons, asked by a client that was made from the .proto alone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from sidecar import Limit
from tests.clusters import Cluster, free_port, listed, running_cluster
from tests.daemons import EPOCH, DaemonProcess, clean_environment, wait_until
from tests.sockets import PATIENCE, Raw, leave_unread
from tests.v1_client import Stranger

WIDE = 1_000_000
DAY = 86_400_000


def hit(key: str, **fields: Any) -> dict[str, Any]:
    """One hit of a wide limit, but for what a test sets."""
    return {"name": "n", "unique_key": key, "hits": 1, "limit": WIDE, "duration": DAY, **fields}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three linked daemons that wait long for each other: this machine may be busy."""
    with running_cluster(3, "--peer-timeout", "20000") as cluster:
        yield cluster


@pytest.fixture
def stranger(cluster: Cluster) -> Iterator[Stranger]:
    """A client of the first node."""
    with Stranger(f"127.0.0.1:{cluster.nodes[0].port}") as stranger:
        yield stranger


# --- Decisions


def test_answers_come_in_order_and_name_their_owners(cluster: Cluster, stranger: Stranger) -> None:
    """A call of 300 keys, asked of one node: each answer is its request's own, and its owner is the node that the ring
    names."""
    keys = [f"order:{number}" for number in range(300)]
    answers = stranger.ask(*(hit(key, hits=number) for number, key in enumerate(keys)))
    assert [answer.remaining for answer in answers] == [WIDE - number for number in range(300)]
    assert [answer.metadata["owner"] for answer in answers] == [cluster.owner("n", key).name for key in keys]
    assert {answer.metadata["owner"] for answer in answers} == {"node-1", "node-2", "node-3"}
    assert not any(answer.error or "degraded" in answer.metadata for answer in answers)


def test_v1_and_the_socket_count_in_one_bucket(cluster: Cluster) -> None:
    """Hits that come through any node's V1 and through its socket are one count, wherever the owner is."""
    key = "shared"
    left = []
    for node in cluster.nodes:
        with Stranger(f"127.0.0.1:{node.port}") as stranger:
            left.append(stranger.ask(hit(key))[0].remaining)
    with cluster.nodes[0].client(timeout=20) as client:
        left.append(client.hit(Limit("n", WIDE, per="1d"), key).remaining)
    assert left == [WIDE - 1, WIDE - 2, WIDE - 3, WIDE - 4]


def test_one_bad_request_fails_alone(stranger: Stranger) -> None:
    """A missing name or key has V1's own words, an unknown algorithm or behavior ours; all come with status
    UNDER_LIMIT and an owner, and the others of the call are answered in their places."""
    bad = [hit("k", name=""), hit(""), {}, hit("k", algorithm=7), hit("k", behavior=64), hit("k", limit=-1)]
    answers = stranger.ask(hit("first"), *bad, hit("last"))
    assert [answer.remaining for answer in answers] == [WIDE - 1, *[0] * 6, WIDE - 1]
    assert {answer.status for answer in answers} == {0}
    assert all(answer.metadata["owner"] for answer in answers)
    errors = [answer.error for answer in answers]
    assert errors[:4] == ["", "field 'namespace' cannot be empty", *["field 'unique_key' cannot be empty"] * 2]
    assert "unknown algorithm 7" in errors[4]
    assert "unknown behavior 64" in errors[5]
    assert "field 'limit'" in errors[6]
    assert errors[7] == ""


@pytest.mark.parametrize("behavior", [0, 1, 2, 8, 16, 32, 2 | 8 | 32])
def test_behaviors_and_their_sums_are_known(stranger: Stranger, behavior: int) -> None:
    """Every behavior of V1, and sums that its enum has no name for."""
    (answer,) = stranger.ask(hit(f"behavior {behavior}", behavior=behavior, metadata={"any": "thing"}))
    assert (answer.error, answer.remaining) == ("", WIDE if behavior & 8 else WIDE - 1)


def test_a_thousand_requests_are_answered_and_one_more_is_out_of_range(stranger: Stranger) -> None:
    """The whole call fails then, and none of it is counted."""
    requests = [hit(f"many:{number}", limit=WIDE + number) for number in range(1_000)]
    assert [answer.limit for answer in stranger.ask(*requests)] == [request["limit"] for request in requests]
    with pytest.raises(grpc.RpcError) as failed:
        stranger.ask(*requests, hit("one more"))
    assert failed.value.code() == grpc.StatusCode.OUT_OF_RANGE
    assert "field 'requests'" in str(failed.value.details())
    assert [answer.remaining for answer in stranger.ask(*requests[:3])] == [WIDE + n - 2 for n in range(3)]


def test_a_call_of_nothing_is_answered_with_nothing(stranger: Stranger) -> None:
    """As V1's is."""
    assert list(stranger.ask()) == []


def test_a_global_limit_is_answered_where_it_is_asked(cluster: Cluster, stranger: Stranger) -> None:
    """By a node that does not own it, hit by hit, and the owner is told all the same."""
    (key,) = cluster.keys(cluster.nodes[1], 1, "n", "global:")
    answers = [stranger.ask(hit(key, limit=5, behavior=2))[0] for _ in range(2)]
    assert [(answer.status, answer.remaining, answer.error) for answer in answers] == [(0, 4, ""), (0, 3, "")]
    assert {answer.metadata["owner"] for answer in answers} == {"node-2"}


# --- Owners that are away


def test_what_a_fallback_decides_says_so(start_cluster: Callable[..., Cluster]) -> None:
    """A crashed owner: with the fallback `local` its keys are decided where they are asked, `degraded` has the cause
    and `error` is empty."""
    cluster = start_cluster(2, "--fallback", "local")
    first, second = cluster.nodes
    (key,) = cluster.keys(second, 1, "n")
    second.crash()
    with Stranger(f"127.0.0.1:{first.port}") as stranger:
        (answer,) = stranger.ask(hit(key, limit=10))
    assert (answer.status, answer.error, answer.limit, answer.remaining) == (0, "", 5, 4)
    assert answer.metadata["owner"] == first.name
    assert answer.metadata["degraded"]


def test_a_calls_deadline_is_its_requests_budget(start_cluster: Callable[..., Cluster]) -> None:
    """An owner that stands still: long before peer_timeout, and before the caller gives up, the call is answered with
    an error for the owner's key and a decision for the other."""
    cluster = start_cluster(2, "--peer-timeout", "60000")
    first, second = cluster.nodes
    cluster.connect(Limit("n", WIDE, per="1d"))
    (own,), (other,) = (cluster.keys(node, 1, "n") for node in (first, second))
    second.pause()
    try:
        with Stranger(f"127.0.0.1:{first.port}") as stranger:
            mine, others = stranger.ask(hit(own), hit(other), timeout=5.0)
    finally:
        second.resume()
    assert (mine.error, mine.remaining) == ("", WIDE - 1)
    assert "in time" in others.error
    assert (others.status, others.remaining) == (0, 0)


def test_a_call_that_is_cancelled_is_given_up(start_cluster: Callable[..., Cluster]) -> None:
    """Its request no longer waits for the owner, and the daemon stops at once, with nothing said of it."""
    cluster = start_cluster(2, "--peer-timeout", "60000", "--grace", "60000")
    first, second = cluster.nodes
    cluster.connect(Limit("n", WIDE, per="1d"))
    (other,) = cluster.keys(second, 1, "n")
    second.pause()
    try:
        with Stranger(f"127.0.0.1:{first.port}") as stranger:
            call, asked = stranger.method("GetRateLimits")
            waiting = call.future(asked(requests=[hit(other)]), timeout=PATIENCE)
            wait_until(lambda: first.peers()["forwarded"] > 1, "the request is on its way")
            waiting.cancel()
            # The daemon has taken note when it answers the next call on this channel.
            stranger.call("LiveCheck")
            assert first.stop(timeout=PATIENCE) == 0
    finally:
        second.resume()
    assert not first.events("internal_error") + first.events("loop_error")


def test_calls_under_way_are_answered_by_a_daemon_that_stops(start_cluster: Callable[..., Cluster]) -> None:
    """Of gRPC and of HTTP, while they wait for an owner that stands still: longer than a second, which is what peers
    are given, and within grace."""
    http = f"127.0.0.1:{free_port()}"
    cluster = start_cluster(2, "--peer-timeout", "3000", "--grace", "60000")
    first, second = cluster.nodes
    first.stop()
    first.options = (*first.options, "--http", http)
    first.start()
    cluster.connect(Limit("n", WIDE, per="1d"))
    (other,) = cluster.keys(second, 1, "n")
    forwarded = first.peers()["forwarded"]
    second.pause()
    try:
        with Stranger(f"127.0.0.1:{first.port}") as stranger, ThreadPoolExecutor() as pool:
            calls = [pool.submit(stranger.ask, hit(other)), pool.submit(post, http, {"requests": [hit(other)]})]
            wait_until(lambda: first.peers()["forwarded"] == forwarded + 2, "both calls wait")
            first.process.terminate()
            (told,) = calls[0].result(PATIENCE)
            (posted,) = calls[1].result(PATIENCE)["responses"]
    finally:
        second.resume()
    assert told.error
    assert posted["error"]
    assert first.process.wait(PATIENCE) == 0


def post(where: str, body: object) -> Any:
    """The JSON answer of POST /v1/GetRateLimits."""
    asked = urllib.request.Request(f"http://{where}/v1/GetRateLimits", json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=PATIENCE) as answered:
        return json.load(answered)


# --- Health and where the door is


def health(target: str, service: str = "") -> Any:
    """What grpc.health.v1 says of a service."""
    with grpc.insecure_channel(target) as channel:
        asked = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(asked, timeout=20).status


@pytest.mark.parametrize("service", ["", "pb.gubernator.V1"])
def test_a_ready_daemon_is_serving(cluster: Cluster, service: str) -> None:
    """By grpc.health.v1, as a whole and for V1 by name."""
    assert health(f"127.0.0.1:{cluster.nodes[1].port}", service) == health_pb2.HealthCheckResponse.SERVING


def test_a_daemon_alone_serves_v1(start_daemon: Callable[..., DaemonProcess], short_path: Path) -> None:
    """Without peers the port is open all the same, on TCP or on a Unix socket; its answers are the table's."""
    for listen in (f"127.0.0.1:{free_port()}", f"unix:{short_path}/v1.sock"):
        start_daemon("--listen", listen)
        with Stranger(listen) as stranger:
            (answer,) = stranger.ask(hit("k", limit=5, duration=1000))
            assert (answer.status, answer.limit, answer.remaining) == (0, 5, 4)
            assert answer.reset_time == EPOCH + 1000
            assert dict(answer.metadata) == {"owner": "test-node"}
            found = stranger.call("HealthCheck")
            assert (found.status, found.peer_count, found.advertise_address) == ("healthy", 1, listen)


def test_the_services_are_listed_and_described_by_reflection(start_daemon: Callable[..., DaemonProcess]) -> None:
    """A client that has no .proto finds V1 and asks by what reflection told it."""
    listen = f"127.0.0.1:{free_port()}"
    start_daemon("--listen", listen)
    with grpc.insecure_channel(listen) as channel:
        found = ProtoReflectionDescriptorDatabase(channel)
        assert set(found.get_services()) == {
            "pb.gubernator.V1",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        with Stranger(listen, descriptor_pool.DescriptorPool(found)) as stranger:
            (answer,) = stranger.ask(hit("k"))
            assert (answer.remaining, answer.metadata["owner"]) == (WIDE - 1, "test-node")


def test_a_draining_daemon_is_not_serving(start_daemon: Callable[..., DaemonProcess]) -> None:
    """By grpc.health.v1, to who asks and to who watches, from SIGTERM on; calls are still decided."""
    listen = f"127.0.0.1:{free_port()}"
    daemon = start_daemon("--listen", listen, "--grace", "60000")
    with Raw(daemon.socket) as raw, Stranger(listen) as stranger:
        watched = health_pb2_grpc.HealthStub(stranger.channel).Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        leave_unread(raw)
        daemon.process.terminate()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert health(listen, "pb.gubernator.V1") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert stranger.call("HealthCheck").status == "unhealthy"
        assert stranger.ask(hit("k"))[0].remaining == WIDE - 1
    assert daemon.process.wait(PATIENCE) == 0


def test_doors_that_are_off_are_not_loaded(start_daemon: Callable[..., DaemonProcess]) -> None:
    """With both off a daemon maps neither gRPC's nor protobuf's library, and listens on no port; with HTTP alone, not
    gRPC's."""
    maps = Path(f"/proc/{start_daemon().process.pid}/maps").read_text()
    assert "uvloop" in maps
    assert "cygrpc" not in maps
    assert "upb" not in maps
    http = start_daemon("--http", f"127.0.0.1:{free_port()}")
    maps = Path(f"/proc/{http.process.pid}/maps").read_text()
    assert "upb" in maps
    assert "cygrpc" not in maps


@pytest.mark.parametrize("door", ["listen", "http"])
@pytest.mark.parametrize("kind", ["port", "path"])
def test_a_place_that_is_taken_ends_the_daemon_with_one_line(
    start_daemon: Callable[..., DaemonProcess], short_path: Path, door: str, kind: str
) -> None:
    """Exit status 2, and the line names the setting to change; who was there first goes on."""
    place = f"127.0.0.1:{free_port()}" if kind == "port" else f"unix:{short_path}/door.sock"
    first = start_daemon(f"--{door}", place)
    other = {"listen": "http", "http": "listen"}[door]
    words = ["serve", "--socket", str(short_path / "other.sock"), f"--{door}", place, f"--{other}", "off"]
    ended = subprocess.run(
        [sys.executable, "-m", "sidecar", *words],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    event = json.loads(line)
    assert (event["event"], event["listen"]) == ("listen_failed", place)
    assert f"set {door} to another address" in event["reason"]
    assert first.process.poll() is None
    if door == "listen":
        assert health(place) == health_pb2.HealthCheckResponse.SERVING


def test_a_unix_socket_has_its_mode_and_goes_with_the_daemon(
    start_daemon: Callable[..., DaemonProcess], short_path: Path
) -> None:
    """A file left behind by a daemon that was killed is replaced."""
    path = short_path / "v1.sock"
    daemon = start_daemon("--listen", f"unix:{path}", "--socket-mode", "0600")
    assert path.stat().st_mode & 0o777 == 0o600
    daemon.kill()
    assert path.exists()
    daemon.start()
    with Stranger(f"unix:{path}") as stranger:
        assert stranger.ask(hit("k"))[0].remaining == WIDE - 1
    assert daemon.stop() == 0
    assert not path.exists()


def test_grpc_connections_are_bounded(start_daemon: Callable[..., DaemonProcess]) -> None:
    """Past max_connections gRPC closes a connection before it says anything; a place that is freed is usable again."""
    port = free_port()
    daemon = start_daemon("--listen", f"127.0.0.1:{port}", "--max-connections", "2")

    def greeting(raw: socket.socket) -> bytes:
        """A server of HTTP/2 speaks first."""
        raw.settimeout(PATIENCE)
        try:
            return raw.recv(100)
        except ConnectionError:
            return b""

    with (
        socket.create_connection(("127.0.0.1", port)) as first,
        socket.create_connection(("127.0.0.1", port)) as second,
    ):
        assert greeting(first)
        assert greeting(second)
        with socket.create_connection(("127.0.0.1", port)) as third:
            assert greeting(third) == b""
        with daemon.client() as client:
            assert client.hit(Limit("n", 5, per="1s"), "k").remaining == 4
        second.close()

        def room() -> bool:
            with socket.create_connection(("127.0.0.1", port)) as again:
                return bool(greeting(again))

        wait_until(room, "the place is free")


def test_peers_may_come_to_a_daemon_that_was_alone(start_cluster: Callable[..., Cluster]) -> None:
    """A list of peers in the settings file and SIGHUP link it; no restart."""
    cluster = start_cluster(2)
    first, second = cluster.nodes
    first.stop()
    first.list_peers("")
    first.start()
    assert first.peers() == {}
    first.list_peers(listed(node.peer for node in cluster.nodes))
    first.hang_up()
    wait_until(first.peers, "the daemon has peers")
    (key,) = cluster.keys(second, 1, "n")
    with Stranger(f"127.0.0.1:{first.port}") as stranger:
        assert stranger.ask(hit(key))[0].metadata["owner"] == second.name
