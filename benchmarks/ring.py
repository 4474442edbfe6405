"""What a ring costs: building it beside a serving loop, looking up an owner, how evenly keys spread.

`python -m benchmarks.ring` prints a row for 10, 100 and 1,000 peers.  A stall is how much later than asked a timer
of 1 ms fires in the main thread's loop while a worker thread builds.  Of each build its worst stall counts, of
several builds the middle one, with the worst of all in brackets; the same for an idle loop stands beside it, since
shared machines pause by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.one_host import Figure
from cluster_link.membership import Peer
from cluster_link.ring import Ring

SIZES = (10, 100, 1000)
KEYS = 100_000
_KEYS_A_PEER = 10_000
"""Enough that the fullest peer tells of the ring: with 100 keys a peer, chance alone makes one a third too full."""
_TICK = 0.001


class Build(NamedTuple):
    """One ring built in a worker thread: how long it took, and the loop's worst stall, seconds, then and idle."""

    seconds: float
    stall: float
    idle: float


def peers(count: int) -> list[Peer]:
    """So many peers, named as addresses in one private network are."""
    addresses = [f"10.0.{number // 250}.{number % 250 + 1}:1051" for number in range(count)]
    return [Peer(address, address) for address in addresses]


def give_way() -> None:
    """What a daemon's worker thread does between pieces of the build."""
    time.sleep(0)


def no_rest() -> None:
    """For comparison: the worker thread gives way only when it is made to."""


def build(count: int, rest: Callable[[], None] = give_way) -> Build:
    """Build a ring of so many peers beside a loop, swap it in and let the old one go there, as a daemon does."""
    return asyncio.run(_build(peers(count), rest))


async def _build(members: list[Peer], rest: Callable[[], None]) -> Build:
    serving = Ring(members)
    gc.collect()
    stop = asyncio.Event()
    watch = asyncio.create_task(_worst_stall(stop))
    started = time.perf_counter()
    built = await asyncio.to_thread(Ring, members, rest=rest)
    seconds = time.perf_counter() - started
    assert built == serving
    # The old ring's last reference goes here, on the loop, and a timer that waits for it is late.
    serving = built
    await asyncio.sleep(5 * _TICK)
    stop.set()
    stall = await watch
    stop.clear()
    watch = asyncio.create_task(_worst_stall(stop))
    await asyncio.sleep(seconds)
    stop.set()
    return Build(seconds, stall, await watch)


async def _worst_stall(stop: asyncio.Event) -> float:
    worst = 0.0
    while not stop.is_set():
        asked = time.perf_counter() + _TICK
        await asyncio.sleep(_TICK)
        worst = max(worst, time.perf_counter() - asked)
    return worst


def lookup(ring: Ring) -> float:
    """Seconds an owner takes to find, each key another."""
    names = [("requests_per_sec", f"account:{number}") for number in range(KEYS)]
    owner = ring.owner
    started = time.perf_counter()
    for name, unique_key in names:
        owner(name, unique_key)
    return (time.perf_counter() - started) / KEYS


def spread(ring: Ring) -> float:
    """What the fullest peer holds, as a multiple of its share; of 10 peers, of 100,000 keys."""
    keys = _KEYS_A_PEER * len(ring)
    held = Counter(ring.owner("requests_per_sec", f"account:{number}") for number in range(keys))
    return max(held.values()) * len(ring) / keys


def figures(rounds: int = 7) -> list[Figure]:
    """The rows that have a target, for the table of `make bench`."""
    largest = max(SIZES)
    builds = [build(largest) for _ in range(rounds)]
    seconds = statistics.median(one.seconds for one in builds)
    stalls, idle = [one.stall for one in builds], [one.idle for one in builds]
    detail = f"built in {seconds:.2f} s; middle (worst) of {rounds} builds {_ms(stalls)}, idle loop {_ms(idle)}"
    stall = statistics.median(stalls) * 1e3
    return [
        Figure(f"worst stall while building a ring of {largest:,} peers", stall, 10, "ms", False, detail),
        Figure("fullest of 10 peers, 100,000 keys, of its share", spread(Ring(peers(10))), 1.2, "x", False, ""),
    ]


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ({max(seconds) * 1e3:.1f}) ms"


def main() -> None:
    """Print the machine and a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring")
    parser.add_argument("--rounds", type=int, default=7, help="rings built of each size (default 7)")
    rounds = parser.parse_args().rounds
    print(f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores\n")
    print("| peers | build | worst stall | without rests | idle loop | fullest peer, of its share | lookup |")
    print("|---|---|---|---|---|---|---|")
    for count in SIZES:
        builds = [build(count) for _ in range(rounds)]
        seconds = statistics.median(one.seconds for one in builds)
        stall, idle = _ms([one.stall for one in builds]), _ms([one.idle for one in builds])
        hasty = _ms([build(count, no_rest).stall for _ in range(rounds)])
        ring = Ring(peers(count))
        found = min(lookup(ring) for _ in range(rounds)) * 1e6
        times = f"{seconds:.3f} s | {stall} | {hasty} | {idle}"
        print(f"| {count:,} | {times} | {spread(ring):.3f} x | {found:.2f} us |", flush=True)


if __name__ == "__main__":
    main()
