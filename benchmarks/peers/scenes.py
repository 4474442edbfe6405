"""The scenes: what work is given to whom.  Numbered as the issue that asked for them numbers them; 10 is how long
a call takes at which rate.

Decides keys, workers, nodes and who takes part.  In each round all contenders take their turns, so that what the
machine does in the meantime falls on all.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial

from benchmarks.load import NAME
from benchmarks.peers import hits
from benchmarks.peers.arithmetic import MOST_LATE
from benchmarks.peers.bench import Bench
from benchmarks.peers.contenders import Contender
from benchmarks.peers.driver import Plan
from benchmarks.peers.hits import Call, Hit
from benchmarks.peers.owners import LINKED, owners
from benchmarks.peers.systems import Endpoint
from benchmarks.processes import resident

WORKERS = 8
NODES = 3
KEYS_A_WORKER = 1_000
_WARM = 50
_PLENTY = 1_000_000_000
"""A limit that a hot key does not reach in a run."""
_MOST_SECONDS_TO_FILL = 150.0
RATES_OF_10 = tuple(250.0 * 2**step for step in range(8))
"""Calls a second of scene 10: 250 to 32,000."""
CASES_OF_10 = ("owned", "forwarded")
_ROUNDS_OF_10 = 3
_TOO_LONG = 10_000.0
"""us of a median call at which a system is past what it can do."""
_ONE_A_SYSTEM = ("sidegate", "gubernator-grpc", "redis-fixed", "redis-moving", "redis-lua")


def _plans(bench: Bench, calls: Callable[[int], list[Call]], workers: int = WORKERS) -> list[Plan]:
    every = [calls(who) for who in range(workers)]
    return [Plan(made, made[:_WARM], bench.seconds) for made in every]


def _alternate(bench: Bench, scene: int, contenders: list[Contender], nodes: int, cases: dict[str, list[Plan]]) -> None:
    with bench.servers(contenders, nodes) as servers:
        for number in range(bench.rounds):
            for case, plans in cases.items():
                for one in contenders:
                    bench.measure(scene, case, one, number, servers[one.system], plans)


def one_worker(bench: Bench) -> None:
    """1: one worker, one hit a call."""
    plans = _plans(bench, lambda who: hits.one_each(who, KEYS_A_WORKER), 1)
    _alternate(bench, 1, bench.those(), 1, {"": plans})


def eight_workers(bench: Bench) -> None:
    """2: 8 workers, one hit a call."""
    plans = _plans(bench, lambda who: hits.one_each(who, KEYS_A_WORKER))
    _alternate(bench, 2, bench.those(shared=True), 1, {"": plans})


def two_limits(bench: Bench) -> None:
    """3: 8 workers, 2 limits a call."""
    plans = _plans(bench, lambda who: hits.two_limits(who, KEYS_A_WORKER))
    _alternate(bench, 3, bench.those(shared=True), 1, {"": plans})


def batches(bench: Bench) -> None:
    """4: one worker, 100 and 1,000 hits a call."""
    cases = {}
    for size in (100, 1_000):
        calls = hits.batches(size, 10 * KEYS_A_WORKER)
        cases[f"{size:,} a call"] = [Plan(calls, calls[:2], bench.seconds)]
    _alternate(bench, 4, bench.those(), 1, cases)


def three_nodes(bench: Bench) -> None:
    """5: three nodes on this machine, random keys, 8 workers on one node."""
    plans = _plans(bench, lambda who: hits.live(100 * KEYS_A_WORKER, who, 10 * KEYS_A_WORKER))
    contenders = bench.those(clustered=True)
    some = [hits.scattered(number) for number in range(5 * KEYS_A_WORKER)]
    with bench.servers(contenders, NODES) as servers:
        owned = {
            system: sum(owners(system, endpoint, NAME, some).values()) / len(some)
            for system, endpoint in servers.items()
        }
        for number in range(bench.rounds):
            for one in contenders:
                bench.measure(5, "", one, number, servers[one.system], plans, owned=owned[one.system])


def hot_key(bench: Bench) -> None:
    """6: one key from 8 workers, plain and GLOBAL; in a cluster a key that the asked node does not own."""
    contenders = bench.those(clustered=True) + bench.those(shared=True, clustered=False, decides=True)
    candidates = [hits.scattered(number) for number in range(100)]
    with bench.servers(contenders, NODES) as servers:
        keys = {}
        for system, endpoint in servers.items():
            mine = owners(system, endpoint, "hot", candidates) if system in LINKED else {}
            keys[system] = next(key for key in candidates if not mine.get(key))
        for number in range(bench.rounds):
            for case, behavior in (("plain", 0), ("GLOBAL", hits.GLOBAL)):
                for one in contenders:
                    if behavior and not one.clustered:
                        continue
                    call = [Hit("hot", keys[one.system], _PLENTY, behavior)]
                    plans = [Plan([call], [call] * _WARM, bench.seconds)] * WORKERS
                    bench.measure(6, case, one, number, servers[one.system], plans)


def live_keys(bench: Bench) -> None:
    """7: 100,000 and 1,000,000 live keys: two workers fill, one probes 200 times a second; then 8 ask at random."""
    for keys in bench.keys:
        parts = [hits.filling(keys, first, 2, 100) for first in range(2)]
        for number in range(max(1, bench.rounds // 3) if keys == min(bench.keys) else 1):
            for one in bench.those(*_ONE_A_SYSTEM):
                with bench.servers([one], 1) as servers:
                    endpoint = servers[one.system]
                    empty = sum(map(resident, endpoint.pids))
                    finished = multiprocessing.get_context("fork").Event()
                    fill = [Plan(part, [], _MOST_SECONDS_TO_FILL, once=True, finished=finished) for part in parts]
                    watch = hits.one_each(0, 100)
                    probe = Plan(watch, watch, _MOST_SECONDS_TO_FILL, rate=200, finished=finished)
                    bench.fill(7, f"{keys:,} keys, filling", one, number, endpoint, fill, probe, empty)
                    plans = _plans(bench, partial(_live, keys))
                    bench.measure(7, f"{keys:,} keys, live", one, number, endpoint, plans)


def _live(keys: int, who: int) -> list[Call]:
    return hits.live(keys, who, 20 * KEYS_A_WORKER)


def abuse(bench: Bench) -> None:
    """8: 8 workers, 95 of 100 hits over their limit."""
    plans = []
    for who in range(WORKERS):
        spend, calls = hits.abuse(who, 2 * KEYS_A_WORKER)
        plans.append(Plan(calls, spend, bench.seconds))
    _alternate(bench, 8, bench.those(shared=True, decides=True), 1, {"": plans})


def held_rate(bench: Bench) -> None:
    """9: 8 workers at 70 % of what they reach together with each system when they do not wait."""
    contenders = bench.those(shared=True, decides=True)
    calls = [hits.one_each(who, KEYS_A_WORKER) for who in range(WORKERS)]
    with bench.servers(contenders, 1) as servers:
        for one in contenders:
            endpoint = servers[one.system]
            plans = [Plan(made, made[:_WARM], 3 * bench.seconds) for made in calls]
            highest = bench.measure(9, "maximum", one, 0, endpoint, plans)["rate"]
            bench.measure(9, "70 %", one, 0, endpoint, paced(calls, 0.7 * highest, bench.hold))


def under_a_millisecond(bench: Bench) -> None:
    """10: how long a call takes at rates from 250/s up, of keys the asked node owns and of keys the others own; beside
    them what a bare echo and a bare gRPC stream take, which decide nothing."""
    contenders = bench.those("sidegate", "gubernator-grpc", "echo", "stream")
    candidates = [hits.scattered(number) for number in range(12 * KEYS_A_WORKER)]
    with bench.servers(contenders, NODES) as servers:
        work: list[tuple[str, Contender, list[list[Call]]]] = []
        for one in contenders:
            if one.decides:
                mine = owners(one.system, servers[one.system], NAME, candidates)
                kinds = {kind: [key for key in candidates if mine[key] is (kind == "owned")] for kind in CASES_OF_10}
            else:
                kinds = {"": candidates}
            for case, keys in kinds.items():
                work.append((case, one, [[[Hit(NAME, key)] for key in keys[who::WORKERS]] for who in range(WORKERS)]))
        for number in range(min(bench.rounds, _ROUNDS_OF_10)):
            for case, one, calls in work:
                _climb(bench, case, one, number, servers[one.system], calls)


def _climb(bench: Bench, case: str, one: Contender, number: int, endpoint: Endpoint, calls: list[list[Call]]) -> None:
    """Each rate in turn, up to the first at which calls are not made in time any more."""
    for rate in RATES_OF_10:
        record = bench.measure(10, case, one, number, endpoint, paced(calls, rate, 2 * bench.seconds), tried=rate)
        if record["late"] > MOST_LATE or record["p50"] > _TOO_LONG:
            return


def paced(calls: list[list[Call]], rate: float, seconds: float) -> list[Plan]:
    """Workers that together make so many calls a second, evenly and in turn."""
    each = rate / len(calls)
    return [Plan(made, made[:_WARM], seconds, each, who / rate) for who, made in enumerate(calls)]


SCENES: dict[int, Callable[[Bench], None]] = {
    1: one_worker,
    2: eight_workers,
    3: two_limits,
    4: batches,
    5: three_nodes,
    6: hot_key,
    7: live_keys,
    8: abuse,
    9: held_rate,
    10: under_a_millisecond,
}
CLUSTERED = {5, 6, 10}
"""Those that need several linked nodes."""
