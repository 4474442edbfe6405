"""Scale on paper: the ring, the batching and GLOBAL's rules for 10 to 2,000 nodes, without a socket.

`python -m benchmarks.simulate` prints tables, and writes them (scale.md), the raw data (scale.json) and charts (PNG,
with the extra `bench`) into a folder.  What decides is the daemon's own code: Ring, Batcher, Replicas, GlobalSync,
Table.  What is simulated: cores that do one thing after the other, wires that delay, who asks when; seeded, so that
the same inputs give the same figures, but for the seconds that rings took to build.  All nodes share one Ring, which
is immutable: each its own would be 14 MB a node at 2,000.

The costs are inputs.  Their defaults were measured between two daemons on one machine (benchmarks/README.md): they
are of one machine and of loopback, so read how figures grow, not the figures.  docs/scale.md says what they mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.ring import peers
from benchmarks.simulation.forwarding import Forwarding, Load, forwarding, weights
from benchmarks.simulation.moving import Key, Moved, moved
from benchmarks.simulation.shared import NAME, Plan, Shared, shared
from benchmarks.simulation.timeline import Costs, split
from cluster_link.membership import Peer
from cluster_link.ring import Ring

_OUT = Path("benchmarks/scale")
_CHANGES = 3
"""Nodes that join, and that leave, one at a time, at each size."""


_KEEPS_UP = 0.98
"""Of the requests that come, the share answered below which a cluster falls behind, and its times only grow."""


class Row(NamedTuple):
    """One run.  scene: which.  inputs: what is particular to it.  result: what it came to."""

    scene: str
    nodes: int
    inputs: dict[str, Any]
    result: dict[str, Any]


class _Tree:
    """A ring and its owners of the keys, made once for a size."""

    def __init__(self, members: Sequence[Peer], keys: Sequence[Key]) -> None:
        started = time.process_time()
        self.ring = Ring(members)
        self.seconds = time.process_time() - started
        self.owners = [self.ring.owner(*key).name for key in keys]


def held(thing: object) -> int:
    """Bytes of an object and all that it leads to, but for types and functions."""
    seen: dict[int, object] = {}
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, type) and not callable(one):
            seen[id(one)] = one
            waiting.extend(gc.get_referents(one))
    return sum(sys.getsizeof(one) for one in seen.values())


def costs_of(options: argparse.Namespace) -> Costs:
    """The costs from what was measured; ValueError where that contradicts itself."""
    asked = split(options.asked_alone_us, options.asked_many_us, options.many)
    owner = split(options.owner_alone_us, options.owner_many_us, options.many)
    rest = options.round_trip_us - options.asked_alone_us - options.owner_alone_us
    if rest < 0:
        raise ValueError("--round-trip-us: shorter than what both daemons work for it")
    return Costs(options.owned_us, *asked, *owner, wire=rest / 2)


def simulate(options: argparse.Namespace, told: Callable[[str], None]) -> list[Row]:
    """Every scene at every size.  told: of progress."""
    costs = costs_of(options)
    keys = [(NAME, f"account:{number}") for number in range(options.keys)]
    rows: list[Row] = []
    for nodes in options.nodes:
        started = time.monotonic()
        members = peers(nodes)
        tree = _Tree(members, keys)
        rows.append(Row("ring", nodes, {}, {"build_s": tree.seconds, "bytes": held(tree.ring)}))
        rows += _moves(tree, members, keys, Random(f"{options.seed}:moving:{nodes}"))
        numbers = {peer.name: number for number, peer in enumerate(members)}
        owners = [numbers[name] for name in tree.owners]
        for zipf in options.zipf:
            drawn = weights(len(keys), zipf)
            for rate in options.rates:
                seconds = max(options.least_ms / 1000, options.requests / (nodes * rate))
                random = Random(f"{options.seed}:forwarding:{nodes}:{zipf}:{rate}")
                result = forwarding(owners, nodes, costs, Load(rate, seconds), drawn, random)
                inputs = {"zipf": zipf, "rate": rate, "seconds": seconds}
                rows.append(Row("forwarding", nodes, inputs, result._asdict()))
        for name, plan in _plans(options, nodes):
            result_shared = shared(tree.ring, costs, plan, Random(f"{options.seed}:{name}:{nodes}"))
            rows.append(Row(name, nodes, plan._asdict(), result_shared._asdict()))
        gc.collect()
        told(f"{nodes} nodes: {time.monotonic() - started:.0f} s")
    return rows


def _moves(tree: _Tree, members: Sequence[Peer], keys: Sequence[Key], random: Random) -> list[Row]:
    rows = []
    for number in range(_CHANGES):
        newcomer = Peer(f"10.9.9.{number + 1}:1051", f"10.9.9.{number + 1}:1051")
        joined = _Tree([*members, newcomer], keys)
        join = moved(tree.owners, joined.owners, len(members) + 1, newcomer.name)
        leaver = random.choice(members)
        rest = _Tree([peer for peer in members if peer != leaver], keys)
        leave = moved(tree.owners, rest.owners, len(members), leaver.name)
        rows.append(Row("join", len(members), {"who": newcomer.name}, join._asdict()))
        rows.append(Row("leave", len(members), {"who": leaver.name}, leave._asdict()))
    return rows


def _plans(options: argparse.Namespace, nodes: int) -> list[tuple[str, Plan]]:
    rate, interval, seconds = options.global_rate, options.interval_ms, options.global_seconds
    half = max(1, round(nodes * rate * seconds / 2))
    return [
        # Half of what is asked for, so that the limit is reached in the middle, when every node has its replica.
        ("global, limit grows", Plan(1, rate, half, interval, seconds)),
        ("global, limit fixed", Plan(1, rate, options.global_limit, interval, seconds)),
        # Nothing is refused: what reports cost.
        ("global, many keys", Plan(options.global_keys, rate, 10**9, interval, seconds)),
    ]


def tables(rows: Sequence[Row]) -> str:
    """What was found, in Markdown."""
    parts = []

    def table(title: str, heads: str, lines: list[list[str]]) -> None:
        columns = heads.split("|")
        parts.append(f"## {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")

    def of(*scenes: str) -> list[Row]:
        return [row for row in rows if row.scene in scenes]

    table(
        "Plain requests",
        "nodes|keys|asked a node /s|batches sent a node /s|requests a batch|p50 us|p99 us|core, mean|core, busiest"
        "|answered",
        [
            [
                f"{row.nodes:,}",
                _law(row.inputs["zipf"]),
                f"{row.inputs['rate']:,g}",
                f"{got.messages:,.0f}",
                f"{got.batch:.2f}",
                f"{got.p50:,.0f}",
                f"{got.p99:,.0f}",
                f"{got.core:.2f}",
                f"{got.busiest:.2f}",
                f"{got.kept_up:.3f}" if got.kept_up > _KEEPS_UP else f"**{got.kept_up:.3f}**",
            ]
            for row in of("forwarding")
            for got in [Forwarding(**row.result)]
        ],
    )
    table(
        "GLOBAL",
        "nodes|scene|hits|limits|beyond|bound beyond|of the bound, worst key|round trip at most, ms|within the interval"
        "|messages a node /s|asked their owner|core, mean|core, busiest",
        [
            [
                f"{row.nodes:,}",
                row.scene.removeprefix("global, "),
                f"{got.hits:,}",
                f"{got.limits:,}" if got.admitted >= got.limits else "not reached",
                f"{got.over:,}",
                f"{got.bound:,}",
                f"{got.worst:.3f}",
                f"{got.round_trip:.1f}",
                "yes" if got.in_time else "**no**",
                f"{got.messages:.1f}",
                f"{got.asked:.3f}",
                f"{got.core:.2f}",
                f"{got.busiest:.2f}",
            ]
            for row in rows
            if row.scene.startswith("global")
            for got in [Shared(**row.result)]
        ],
    )
    table(
        "Rings and moved keys",
        f"nodes|ring, bytes|built in, s of CPU time|moved by a join, of 1/n ({_CHANGES} joins)"
        f"|moved by a leave, of 1/n ({_CHANGES} leaves)|farthest from 1/n, standard deviations|moved elsewhere",
        [
            [
                f"{row.nodes:,}",
                f"{row.result['bytes']:,}",
                f"{row.result['build_s']:.3f}",
                _ratios(of("join"), row.nodes),
                _ratios(of("leave"), row.nodes),
                f"{max(abs(change.result['sigmas']) for change in _changes(rows, row.nodes)):.1f}",
                str(sum(change.result["astray"] for change in _changes(rows, row.nodes))),
            ]
            for row in of("ring")
        ],
    )
    return "\n".join(parts)


def _law(zipf: float) -> str:
    return f"zipf {zipf:g}" if zipf else "uniform"


def _changes(rows: Sequence[Row], nodes: int) -> list[Row]:
    return [row for row in rows if row.scene in ("join", "leave") and row.nodes == nodes]


def _ratios(rows: Sequence[Row], nodes: int) -> str:
    changes = [Moved(**row.result) for row in rows if row.nodes == nodes]
    return ", ".join(f"{change.share / change.expected:.2f}" for change in changes)


def faults(rows: Sequence[Row]) -> list[str]:
    """What contradicts the promises: more admitted than the bound where its condition holds, keys moved wrongly."""
    found = []
    for row in rows:
        if row.scene.startswith("global") and row.result["in_time"] and row.result["worst"] > 1:
            found.append(f"{row.nodes} nodes, {row.scene}: {row.result['over']} beyond, bound {row.result['bound']}")
        if row.scene in ("join", "leave") and row.result["astray"]:
            found.append(f"{row.nodes} nodes, {row.scene}: {row.result['astray']} keys moved between others")
        if row.scene in ("join", "leave") and abs(row.result["sigmas"]) > 5:
            found.append(f"{row.nodes} nodes, {row.scene}: {row.result['sigmas']:.1f} standard deviations from 1/n")
    return found


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Charts against the cluster's size; none, said on standard error, without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no charts: matplotlib is not installed (pip install 'sidegate[bench]')", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    plain: dict[str, list[Row]] = {}
    for row in rows:
        if row.scene == "forwarding":
            plain.setdefault(f"{row.inputs['rate']:,g}/s a node, {_law(row.inputs['zipf'])}", []).append(row)
    glob: dict[str, list[Row]] = {}
    for row in rows:
        if row.scene.startswith("global"):
            glob.setdefault(row.scene, []).append(row)
    moves = {f"moved by a {name}": [row for row in rows if row.scene == name] for name in ("join", "leave")}

    def lines(series: dict[str, list[Row]], what: str) -> dict[str, list[tuple[int, float]]]:
        return {name: [(row.nodes, row.result[what]) for row in some] for name, some in series.items()}

    limited = {name: some for name, some in glob.items() if "limit" in name}
    over = {f"{name}: admitted beyond": points for name, points in lines(limited, "over").items()}
    bounds = {f"{name}: bound": points for name, points in lines(limited, "bound").items()}
    expected = {"1/n": lines(moves, "expected")["moved by a leave"]}
    return [
        _chart(
            folder / "messages.png",
            "messages a node sends a second",
            {**lines(plain, "messages"), **lines(glob, "messages")},
        ),
        _chart(folder / "batches.png", "requests a batch, mean", lines(plain, "batch")),
        _chart(
            folder / "cores.png", "busiest core, of its time", {**lines(plain, "busiest"), **lines(glob, "busiest")}
        ),
        _chart(folder / "over_admission.png", "admitted beyond the limit", {**over, **bounds}),
        _chart(
            folder / "moved_keys.png", "share of keys that changed their owner", {**lines(moves, "share"), **expected}
        ),
    ]


def _chart(path: Path, what: str, series: dict[str, list[tuple[int, float]]]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(series.items()):
        sizes = sorted({size for size, _ in points})
        middle = [statistics.median(value for at, value in points if at == size) for size in sizes]
        axes.plot(sizes, middle, "osv^Dx"[number % 6] + ("-" if number < 6 else "--"), label=name)
    axes.set_xscale("log")
    axes.set_yscale("symlog" if any(value == 0 for points in series.values() for _, value in points) else "log")
    axes.set_xlabel("nodes")
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=80, metadata={"Software": None})
    return path


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 2 or max(sizes) > 60_000:
        raise argparse.ArgumentTypeError("a cluster has 2 to 60,000 nodes")
    return sizes


def parser() -> argparse.ArgumentParser:
    """The command line; what it defaults to was measured, but for the load."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = made.add_argument
    add(
        "--quick", action="store_true", help="10 to 100 nodes, a tenth of the requests, written to build/scale: seconds"
    )
    add("--out", type=Path, default=_OUT, help="folder to write")
    add("--seed", type=int, default=1)
    add("--nodes", type=_sizes, default="10,30,100,300,1000,2000", help="cluster sizes")
    add("--rates", type=_numbers, default="200,1000,2000,5000", help="requests/s that each node is asked")
    add("--zipf", type=_numbers, default="0,1.1", help="keys' distributions: exponents, 0 is uniform")
    add("--keys", type=int, default=100_000, help="distinct keys")
    add("--requests", type=int, default=50_000, help="requests of a run, more where --least-ms asks for it")
    add("--least-ms", type=float, default=30, help="simulated time of a run at least")
    add("--owned-us", type=float, default=9.7, help="core time of a request decided where it is asked")
    add("--asked-alone-us", type=float, default=283, help="asked daemon's core time, a request in its own batch")
    add("--asked-many-us", type=float, default=26, help="the same a request in batches of --many")
    add("--owner-alone-us", type=float, default=165, help="owner's core time, a request in its own batch")
    add("--owner-many-us", type=float, default=10, help="the same a request in batches of --many")
    add("--many", type=int, default=24, help="requests in a batch when *-many-us were measured")
    add("--round-trip-us", type=float, default=474, help="a lone forwarded request, beyond an owned one's round trip")
    add("--interval-ms", type=float, default=100, help="global_sync_interval")
    add("--global-rate", type=float, default=50, help="GLOBAL hits/s that each node is asked")
    add("--global-seconds", type=float, default=2, help="simulated time of a GLOBAL run")
    add("--global-limit", type=int, default=1_000, help="the limit that does not grow with the cluster")
    add("--global-keys", type=int, default=100, help="GLOBAL keys of the run with many")
    return made


def main() -> None:
    """Simulate, print and write; exits with 1 if a promise did not hold."""
    options = parser().parse_args()
    if options.quick:
        options.nodes = [size for size in options.nodes if size <= 100] or options.nodes[:1]
        options.requests //= 10
        if options.out == _OUT:
            options.out = Path("build/scale")  # the full run's figures stay
        options.global_seconds = min(options.global_seconds, 1)
    try:
        costs = costs_of(options)
    except ValueError as error:
        sys.exit(f"simulate: {error}")
    gc.disable()  # it would look through all that is under way, again and again; collected after each size instead
    rows = simulate(options, lambda text: print(text, file=sys.stderr, flush=True))
    machine = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    machine += f", load average {os.getloadavg()[0]:.1f}"
    inputs = {name: value for name, value in vars(options).items() if name != "out"}
    stated = ", ".join(f"{name} {value}" for name, value in inputs.items())
    split_costs = ", ".join(f"{name} {value:.1f}" for name, value in costs._asdict().items())
    found = faults(rows)
    text = (
        f"# Simulated clusters\n\n{machine}; {time.process_time():.0f} s of CPU time.\n\nInputs: {stated}.\n\n"
        f"Costs that follow, us: {split_costs}.\n\n{tables(rows)}\n"
        f"Promises: {'; '.join(found) if found else 'none broken'}.\n"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scale.md").write_text(text)
    raw = {"machine": machine, "inputs": inputs, "costs_us": costs._asdict(), "rows": [row._asdict() for row in rows]}
    (options.out / "scale.json").write_text(json.dumps(raw, indent=1) + "\n")
    draw(rows, options.out)
    print(text)
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()
