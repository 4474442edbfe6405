"""The figures of the link: two daemons, the same load on keys that the asked one owns and on keys the other owns.

Decides what is compared; how, see one_host.py.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks import load
from benchmarks.one_host import Figure
from benchmarks.processes import daemon, run_apart, together
from cluster_link.membership import Peer
from cluster_link.ring import Ring
from sidecar.trial import free_ports

CLIENTS = 32


def link(folder: Path, rounds: int, seconds: float) -> Iterator[Figure]:
    """Forwarded against owned: 32 processes, one process, frames of 1,000."""
    first, second, echo_port = free_ports(3)
    peers = [Peer(f"127.0.0.1:{port}", f"127.0.0.1:{port}") for port in (first, second)]
    ring = Ring(peers)
    keys: dict[str, list[str]] = {"owned": [], "remote": []}
    for number in range(8_000):
        key = f"account:{number}"
        keys["owned" if ring.owner(load.NAME, key) == peers[0] else "remote"].append(key)
    listed = ",".join(peer.address for peer in peers)
    asked = folder / "first"
    runs: list[dict[str, float]] = []
    with ExitStack() as stack:
        for port, path in ((first, asked), (second, folder / "second")):
            stack.enter_context(daemon(path, "--listen", f"127.0.0.1:{port}", "--peers", listed))
        floor = subprocess.Popen([sys.executable, "-m", "benchmarks.stream", "serve", str(echo_port)])
        stack.callback(floor.wait)
        stack.callback(floor.terminate)
        time.sleep(1.0)
        for _ in range(rounds):
            run = {}
            for where in keys:
                parts = [keys[where][who::CLIENTS] for who in range(CLIENTS)]
                loads = together(load.asking, [(str(asked), seconds, 1, part) for part in parts])
                run[where] = sum(one.rate for one in loads)
                run[f"{where} frames"] = together(load.asking, [(str(asked), seconds, 1000, keys[where])])[0].rate
                run[f"{where} p50"] = together(load.asking, [(str(asked), seconds, 1, keys[where])])[0].p50
            run["stream p50"] = run_apart("benchmarks.stream", "round_trip", echo_port, seconds, 60)
            runs.append(run)

    def middle(name: str) -> float:
        return statistics.median(run[name] for run in runs)

    yield Figure(
        "one-hit frames of remote keys, 32 processes, of owned keys' rate",
        statistics.median(run["remote"] / run["owned"] for run in runs),
        0.35,
        "x",
        True,
        f"{middle('remote'):,.0f}/s, owned {middle('owned'):,.0f}/s",
    )
    yield Figure(
        "one client's p50 of remote keys, of a bare stream's round trip",
        statistics.median(run["remote p50"] / run["stream p50"] for run in runs),
        1.6,
        "x",
        False,
        f"{middle('remote p50'):.0f} us, stream {middle('stream p50'):.0f} us, owned {middle('owned p50'):.0f} us",
    )
    yield Figure(
        "frames of 1,000 remote keys, decisions of owned keys' frames",
        statistics.median(run["remote frames"] / run["owned frames"] for run in runs),
        0.25,
        "x",
        True,
        f"{1000 * middle('remote frames'):,.0f}/s, owned {1000 * middle('owned frames'):,.0f}/s",
    )
