"""A worker: makes calls for a time, as fast as they are answered or at a given rate, one at a time.

Decides when a call begins and how long it took.  Knows no scene; runs in a process of its own.
"""

from __future__ import annotations

import os
import resource
import time
from array import array
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.hits import Call
from benchmarks.peers.systems import Endpoint
from benchmarks.processes import processor_seconds


class Plan(NamedTuple):
    """What one worker does.

    warm: calls made once before the clock runs, then `calls` again and again (once, if `once`).
    seconds: how long.  rate: calls a second; 0: the next when the last is answered.  offset: of the first, in s.
    finished: set by a worker that made its calls once; a worker with a rate ends when it is set.
    """

    calls: list[Call]
    warm: list[Call]
    seconds: float
    rate: float = 0.0
    offset: float = 0.0
    once: bool = False
    finished: Event | None = None


class Part(NamedTuple):
    """What one worker did.

    cpu: its own CPU seconds, servers: those of the servers in the same time.  trips: seconds of each call, an
    array("d") as bytes.  late: calls that were due and not made.  busy: CPU seconds of everything on the machine.
    """

    calls: int
    decisions: int
    over: int
    seconds: float
    cpu: float
    servers: float
    trips: bytes
    late: int
    busy: float


def work(start: Callable[[], object], contender: str, endpoint: Endpoint, plan: Plan) -> Part:
    """Do what the plan says; `start` lets all workers begin at once."""
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_work(start, contender, endpoint, plan))


async def _work(start: Callable[[], object], contender: str, endpoint: Endpoint, plan: Plan) -> Part:
    caller = CONTENDERS[contender].caller(endpoint)  # type: ignore[call-arg]  # every caller takes the endpoint
    ask, clock, calls = caller.ask, time.perf_counter, plan.calls
    for call in plan.warm:
        await ask(call)
    trips = array("d")
    made = over = 0
    start()
    cpu, servers, busy = _cpu(), _servers(endpoint.pids), _busy()
    began = before = clock()
    end = began + plan.seconds
    if plan.rate:
        due = began + plan.offset
        while due < end and clock() < end and not (plan.finished and plan.finished.is_set()):
            rest = due - clock()
            since = due
            if rest > 0:
                # Nothing else waits for this loop: one call at a time.  Waking late is the machine's doing, not the
                # contender's; being late because the last call took long is, and counts from when this one was due.
                time.sleep(rest)
                since = clock()
            over += await ask(calls[made % len(calls)])
            trips.append(clock() - since)
            made += 1
            due += 1 / plan.rate
        before = clock()
    else:
        while before < end and not (plan.once and made == len(calls)):
            over += await ask(calls[made % len(calls)])
            now = clock()
            trips.append(now - before)
            before = now
            made += 1
        if plan.once and plan.finished:
            plan.finished.set()
    seconds = before - began
    cpu, servers, busy = _cpu() - cpu, _servers(endpoint.pids) - servers, _busy() - busy
    await caller.close()
    decisions = sum(map(len, calls)) * (made // len(calls)) + sum(map(len, calls[: made % len(calls)]))
    late = 0 if plan.finished else max(0, int((plan.seconds - plan.offset) * plan.rate) - made)
    return Part(made, decisions, over, seconds, cpu, servers, trips.tobytes(), late, busy)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _servers(pids: Sequence[int]) -> float:
    return sum(processor_seconds(pid) for pid in pids)


def _busy() -> float:
    # user, nice, system, (idle, waiting,) irq, softirq, steal: proc(5)
    words = Path("/proc/stat").read_text().split(maxsplit=9)
    return sum(int(words[place]) for place in (1, 2, 3, 6, 7, 8)) / os.sysconf("SC_CLK_TCK")
