"""The gRPC door on real daemons, asked by a client that was made from the .proto alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sidecar import Limit
from tests.clusters import Cluster, free_port, running_cluster
from tests.daemons import EPOCH, DaemonProcess
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
