"""What discovery by Kubernetes may cost: memory of the daemon, and the interpreter while large slices arrive.

Processor time of the thread is what is bounded here, as a busy test machine stretches all else; how late a loop's timer
is measured by benchmarks/kubernetes.py.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster_link.discovery.endpoints import Rules
from cluster_link.discovery.reflector import Reflector
from sidecar.daemon import keep_collector_off_the_table
from tests.clusters import free_port
from tests.daemons import DaemonProcess, wait_until
from tests.kube_server import OwnWorld
from tests.test_reflector import Server, bookmark, event, watched

MEMORY, HELD = 35.0, 0.005
"""MiB; seconds."""
ENDPOINTS, SLICES = 1_000, 3


def large(number: int, version: int) -> dict[str, Any]:
    """A slice with as many endpoints as a server takes, much as the real one writes them."""
    ends = [
        {
            "addresses": [f"10.{number}.{n // 250}.{n % 250}"],
            "conditions": {"ready": True, "serving": True, "terminating": n == version % ENDPOINTS},
            "targetRef": {"kind": "Pod", "namespace": "rl", "name": f"app-{number}-{n}", "uid": f"{number}-{n:034}"},
            "nodeName": f"node-{n % 50}",
            "zone": "z1",
        }
        for n in range(ENDPOINTS)
    ]
    ports = [{"name": "grpc", "protocol": "TCP", "port": 50_051}]
    metadata = {"name": f"peers-{number}", "resourceVersion": str(version)}
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": ends, "ports": ports}


def pieces_of_work() -> list[float]:
    """Seconds of processor time that the thread took without a rest, for a list and a change of every slice."""
    items = [large(number, 1) for number in range(SLICES)]
    body = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": "9"}, "items": items}
    changes = [event("MODIFIED", large(number, 10 + number)) for number in range(SLICES)]
    whole = json.dumps(body).encode()
    pieces = [whole[at : at + 65_536] for at in range(0, len(whole), 65_536)]
    server = Server((200, pieces), watched(*changes, bookmark(99), 300.0), watched(300.0))
    held: list[float] = []
    begun = 0.0

    def rest() -> None:
        nonlocal begun
        held.append(time.thread_time() - begun)
        begun = time.thread_time()

    reflector = Reflector(
        server.connect, Rules("grpc"), server.told.append, server.wait, lambda: server.now, server.uniform, rest
    )
    thresholds = gc.get_threshold()
    keep_collector_off_the_table()  # as the daemon has it
    try:
        begun = time.thread_time()
        reflector.run()
        rest()
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    assert len(server.snapshots) == SLICES + 1
    assert len(server.snapshots[0]) == SLICES * (ENDPOINTS - 1), "one of each slice is leaving"
    return sorted(held)


def test_the_interpreter_is_let_go_of() -> None:
    """Between two rests the thread computes for less than 5 ms, whatever comes."""
    # The best of three: what else runs on the machine makes the longest piece longer, never shorter.
    held = min((pieces_of_work() for _ in range(3)), key=lambda pieces: pieces[-1])
    print(f"{len(held)} pieces: median {held[len(held) // 2] * 1000:.2f} ms, longest {held[-1] * 1000:.2f} ms")
    assert held[-1] < HELD, [round(piece * 1000, 2) for piece in held[-5:]]


def rings(daemon: DaemonProcess) -> list[int]:
    """How many members each of its rings had."""
    return [line["members"] for line in daemon.events("ring_changed")]


def test_memory(start_daemon: Callable[..., DaemonProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three pods found through it cost a daemon at most 35 MiB more than three listed."""
    world = OwnWorld()
    try:
        monkeypatch.setenv("POD_IP", "127.0.0.1")
        monkeypatch.setenv("POD_UID", "me")
        world.add_service("peers")
        where = f"127.0.0.1:{free_port()}"
        uids = [world.add_pod(f"pod-{n}", f"10.1.0.{n}", f"node-{n}") for n in range(3)]
        source = ("--discovery", "kubernetes", "--kubernetes-kubeconfig", str(world.kubeconfig))
        service = ("--kubernetes-service", "peers", "--kubernetes-namespace", world.namespace)
        listed = ",".join(f"{uid}=10.1.0.{n}:1051" for n, uid in enumerate(uids)) + f",me={where}"
        held = []
        for options in ((*source, *service), ("--peers", listed)):
            daemon = start_daemon("--listen", where, *options)
            wait_until(lambda daemon=daemon: rings(daemon)[-1:] == [4], "all are known")  # type: ignore[misc]
            held.append(daemon.memory() / 2**20)
            daemon.kill()
        print(f"{held[0]:.1f} MiB found, {held[1]:.1f} MiB listed: {held[0] - held[1]:.1f} MiB more")
        assert held[0] - held[1] <= MEMORY
    finally:
        world.close()
