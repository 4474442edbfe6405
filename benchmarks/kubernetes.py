"""What discovery by Kubernetes costs a daemon: memory, and how long it holds the loop while large slices arrive.

The API server of the tests runs in this process, what is measured in one of its own.  A timer of the measured loop is
due every millisecond; its lateness is told with the source and without it, since other work on the machine makes it
late too.  uvloop's timers are whole milliseconds, so that 1 to 2 ms is what an idle loop shows.

    python -m benchmarks.kubernetes
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.others import Others
from cluster_link.discovery.endpoints import Rules
from cluster_link.discovery.kubernetes import Kubernetes, Myself, connect_to
from cluster_link.discovery.source import Standing
from cluster_link.membership import Peer
from sidecar.daemon import keep_collector_off_the_table
from tests.clusters import free_port
from tests.daemons import DaemonProcess, wait_until
from tests.kube_server import OwnWorld

ENDPOINTS, SLICES, EVENTS = 1_000, 3, 60
"""Endpoints of a slice, slices listed, and events that each replace one slice."""
EVERY = 0.1
"""Seconds between two events."""
MEMORY_BUDGET, LOOP_BUDGET = 35.0, 5.0
"""MiB; ms."""
_FEED = "from benchmarks.kubernetes import feed; feed()"
WHERE = f"127.0.0.1:{free_port()}"
ME = Peer("me", "10.9.9.9:1051")


def large_slice(number: int, generation: int) -> dict[str, Any]:
    """A slice with as many endpoints as an API server takes, each a little different from the last generation's."""
    ends = [
        {
            "addresses": [f"10.{number}.{n // 250}.{n % 250 + 1}"],
            "conditions": {"ready": True, "serving": True, "terminating": n == generation % ENDPOINTS},
            "targetRef": {"kind": "Pod", "namespace": "x", "name": f"app-{number}-{n}", "uid": f"{number:08}-{n:027}"},
            "nodeName": f"node-{n % 50}",
            "zone": "zone-1",
        }
        for n in range(ENDPOINTS)
    ]
    labels = {"kubernetes.io/service-name": "peers"}
    return {
        "metadata": {"name": f"peers-{number}", "labels": labels, "annotations": {}},
        "addressType": "IPv4",
        "endpoints": ends,
        "ports": [{"name": "grpc", "protocol": "TCP", "port": 1051}],
    }


def added_memory(peers: int) -> float:
    """MiB that a daemon with so many peers holds more for having found them, than with the same in its list."""
    world = OwnWorld(slice_size=ENDPOINTS)
    try:
        found = large_slice(0, ENDPOINTS)
        found["endpoints"] = found["endpoints"][:peers]
        for end in found["endpoints"]:
            end["conditions"] = {}
        world.put(found)
        listed = ",".join(f"{end['targetRef']['uid']}={end['addresses'][0]}:1051" for end in found["endpoints"])
        listed += f",me={WHERE}"
        source = ["--discovery", "kubernetes", "--kubernetes-kubeconfig", str(world.kubeconfig)]
        source += ["--kubernetes-service", "peers", "--kubernetes-namespace", world.namespace]
        os.environ.update(POD_UID="me", POD_IP="10.9.9.9")
        return statistics.median(held(source, peers) - held(["--peers", listed], peers) for _ in range(3))
    finally:
        world.close()


def held(options: list[str], peers: int) -> float:
    """MiB of a daemon that knows so many peers."""
    with tempfile.TemporaryDirectory(prefix="sg-") as folder:
        daemon = DaemonProcess(Path(folder), "--listen", WHERE, *options, clock="system")
        try:
            wait_until(
                lambda: daemon.events("ring_changed")[-1:] and daemon.events("ring_changed")[-1]["members"] >= peers,
                "all are known",
            )
            time.sleep(1)
            return daemon.memory() / 2**20
        finally:
            daemon.kill()


def lateness(kubeconfig: str, namespace: str) -> list[float]:
    """How late the loop's timer was, in ms, in a process of its own that listens to the server for a while."""
    words = [sys.executable, "-m", "benchmarks.kubernetes", "measure", kubeconfig, namespace]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    return [float(number) for number in json.loads(done.stdout)]


async def measure(kubeconfig: str, namespace: str) -> list[float]:
    """In that process.  With the import over and the list taken, half of EVENTS pass by."""
    source = None
    if kubeconfig:
        standing = Standing("kubernetes", time.monotonic, lambda event, **_: None)
        connect = connect_to(namespace, "peers", kubeconfig, os.environ)
        source = Kubernetes(connect, Rules("grpc"), Myself(ME, "", frozenset()), standing)
    told = 0
    known = asyncio.Event()

    async def listen() -> None:
        nonlocal told
        if source is None:
            known.set()
            return
        async for _ in source.members():
            told += 1
            known.set()

    listening = asyncio.create_task(listen())
    await known.wait()
    keep_collector_off_the_table()  # as a daemon does before it serves
    late = []
    loop = asyncio.get_running_loop()
    end = loop.time() + EVENTS * EVERY / 2
    while (begun := time.perf_counter()) and loop.time() < end:
        await asyncio.sleep(0.001)
        late.append((time.perf_counter() - begun) * 1000 - 1)
    if source is not None:
        assert told > EVENTS / 4, f"only {told} sets were told"
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    return late


def main() -> int:
    """Print the figures; 1 if a budget is not kept."""
    others = Others()
    added = {peers: added_memory(peers) for peers in (3, ENDPOINTS)}
    for peers, more in added.items():
        print(f"memory added with {peers:,} peers: {more:.1f} MiB (at most {MEMORY_BUDGET:.0f})")
    quiet = lateness("", "")
    with subprocess.Popen([sys.executable, "-c", _FEED], stdout=subprocess.PIPE, text=True) as feeding:
        assert feeding.stdout is not None
        kubeconfig, namespace = json.loads(feeding.stdout.readline())
        busy = lateness(kubeconfig, namespace)
        feeding.kill()
    for name, late in (("without", quiet), ("with", busy)):
        late.sort()
        parts = ", ".join(f"p{part} {late[int(len(late) * part / 100)]:.2f}" for part in (50, 99))
        print(f"a timer's lateness {name} slices of {ENDPOINTS:,}: {parts}, most {late[-1]:.2f} ms")
    print(f"Other processes and interrupts took {others.share():.1%} of the machine's CPU time meanwhile.")
    return int(max(added.values()) > MEMORY_BUDGET or busy[-1] > LOOP_BUDGET)


def feed() -> None:
    """In a process of its own: serve, and replace a slice now and then."""
    world = OwnWorld(slice_size=ENDPOINTS)
    for number in range(SLICES):
        world.put(large_slice(number, 0))
    print(json.dumps([str(world.kubeconfig), world.namespace]), flush=True)
    for generation in range(1, 100_000):
        time.sleep(EVERY)
        world.put(large_slice(generation % SLICES, generation))


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps(runner.run(measure(*sys.argv[2:4]))))
    else:
        sys.exit(main())
