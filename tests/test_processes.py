"""Many processes, threads, forks and signals on one daemon; each gets its own answers and no one else's."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sidecar import Client, Limit, RateLimit, SidegateError
from tests.daemons import DaemonProcess, clean_environment, wait_until

PATIENT = 30.0
"""The time-out of clients here: machines that run tests are busy."""
WIDE = Limit("processes", 1_000_000, per="1d")


# What runs in interpreters of its own: pytest's have threads and handlers that a fork should not inherit.


class Fresh:
    """A function of this file in a new interpreter; its stdin says when to begin, its stdout holds the result."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        code = (
            "import json, sys; from tests import test_processes; "
            f"result = test_processes.{function.__name__}(*json.loads(sys.argv[1])); "
            "print(json.dumps(result), flush=True)"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(arguments)],
            cwd=Path(__file__).parent.parent,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def ready(self) -> None:
        """Wait for the line that says it is ready."""
        assert self.process.stdout
        assert self.process.stdout.readline() == b"ready\n", self.process.communicate()[1].decode()

    def go(self) -> None:
        """Let it begin."""
        assert self.process.stdin
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        """End its stdin and wait for what it returns."""
        out, errors = self.process.communicate(timeout=100)
        assert self.process.returncode == 0, errors.decode()
        return json.loads(out)


@contextmanager
def fresh(count: int, function: Callable[..., object], *arguments: object) -> Iterator[list[Fresh]]:
    """`count` such interpreters, ready to begin; none is left behind."""
    processes = [Fresh(function, *arguments) for _ in range(count)]
    try:
        for process in processes:
            process.ready()
        yield processes
    finally:
        for process in processes:
            if process.process.poll() is None:
                process.process.kill()
            process.process.communicate()


def wait_for_go() -> None:
    """The other side of `Fresh.ready` and `Fresh.go`."""
    print("ready", flush=True)
    sys.stdin.readline()


def told_to_stop() -> bool:
    """Whether our stdin has ended."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def hit_many(path: str, algorithm: str, hits: int) -> int:
    """How many of `hits` hits on one limit of 10 were admitted."""
    limit = Limit("eight", 10, per="1d", algorithm=algorithm)
    with Client(path, timeout=PATIENT) as client:
        wait_for_go()
        return sum(client.hit(limit, "shared").allowed for _ in range(hits))


def count_down(client: Client, key: str, times: int, start: int = 1_000_000) -> None:
    """Hit a key that is ours alone; every answer must be the next in its sequence."""
    for number in range(times):
        remaining = client.hit(WIDE, key).remaining
        assert remaining == start - number - 1, f"{key}: {remaining} instead of {start - number - 1}"


def fork_and_ask(path: str) -> list[int]:
    """A used client on both sides of a fork, at the same time: connections accepted before and after, open at last."""
    wait_for_go()
    with Client(path, timeout=PATIENT) as client:
        count_down(client, "parent", 10)
        before = client.info()["connections"]["accepted"]
        children = []
        for number in range(3):
            child = os.fork()
            if not child:
                try:
                    count_down(client, f"child {number}", 500)
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        count_down(client, "parent", 500, 1_000_000 - 10)
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        count_down(client, "parent", 10, 1_000_000 - 510)
        after = client.info()["connections"]["accepted"]
        wait_until(lambda: client.info()["connections"]["open"] == 1, "the children's connections are closed")
        return [before, after]


def fork_in_mid_call(path: str) -> bool:
    """Fork while other threads are in mid-call on the same client; both sides go on."""
    wait_for_go()
    client = Client(path, timeout=PATIENT, max_connections=4)
    over = threading.Event()
    failures: list[BaseException] = []

    def ask(key: str) -> None:
        try:
            number = 0
            while not over.is_set():
                count_down(client, key, 1, 1_000_000 - number)
                number += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(f"thread {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for number in range(20):
        time.sleep(0.01)
        child = os.fork()
        if not child:
            try:
                count_down(client, f"child {number}", 20)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    over.set()
    for thread in threads:
        thread.join()
    return not failures


pool_client: Client | None = None


def pool_task(number: int) -> bool:
    """One task of a pool of forked workers, on the client that the parent made and used."""
    assert pool_client
    return pool_client.hit(Limit("pool", 100, per="1d"), "shared").allowed


def fork_pool(path: str) -> int:
    """How many of 400 hits a pool of 4 forked workers had admitted."""
    global pool_client
    wait_for_go()
    pool_client = Client(path, timeout=PATIENT)
    pool_client.ping()
    with multiprocessing.get_context("fork").Pool(4) as pool:
        admitted = sum(pool.map(pool_task, range(400), chunksize=5))
    pool_client.ping()
    return admitted


class Interrupted(Exception):
    """Raised from a signal handler, as Celery's soft time limit is."""


def prove(client: Client, number: int) -> None:
    """A question whose answer can be mistaken for no other one."""
    decision = client.hit(Limit("proof", 1_000 + number, per="1d"), f"{os.getpid()}:{number}")
    assert (decision.limit, decision.remaining) == (1_000 + number, 999 + number)


def interrupt_at_random(path: str, seed: int) -> int:
    """Interrupt calls by a timer's signal at random moments; how many were hit in mid-call."""
    wait_for_go()
    armed = False
    interrupted = 0

    def strike(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    signal.signal(signal.SIGALRM, strike)
    chance = random.Random(seed)
    client = Client(path, timeout=10, max_connections=1)
    for number in range(1500):
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(20e-6, 600e-6))
            for _ in range(20):
                client.check([RateLimit("interrupted", "key", 1, 50, 1000)] * 3)
            armed = False
        except Interrupted:
            interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        prove(client, number)
    return interrupted


class Strike:
    """A profiler that raises Interrupted at the `point`th place where Python would run a signal handler.

    Python runs them when a function written in Python is entered and when one written in C returns, which
    is where a profiler is called too.  where: the place, once struck.
    """

    def __init__(self, point: int) -> None:
        self.point = point
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_return"):
            return
        self.point -= 1
        if not self.point:
            self.where = f"{event} in {frame.f_code.co_qualname}, line {frame.f_lineno}"
            raise Interrupted


def interrupt_everywhere(path: str, connected: bool) -> list[str]:
    """Interrupt a call at each point where a signal can, in turn; what went wrong afterwards."""
    wait_for_go()
    troubles: list[str] = []
    for point in range(1, 10_000):
        client = Client(path, timeout=2, max_connections=1)
        if connected:
            client.ping()
        strike = Strike(point)
        came = False
        try:
            sys.setprofile(strike)
            client.hit(WIDE, "interrupted")
        except Interrupted:
            came = True
        except SidegateError:
            pass
        finally:
            sys.setprofile(None)
        if not strike.where:
            return troubles
        trouble = [] if came else ["the signal handler's exception was swallowed"]
        thread = threading.Thread(target=prove_safely, args=(client, point, trouble), daemon=True)
        thread.start()
        thread.join(5)
        if thread.is_alive():
            trouble.append("the next call never ended")
        else:
            client.close()
        troubles += [f"{strike.where}: {what}" for what in trouble]
    return troubles


def prove_safely(client: Client, number: int, trouble: list[str]) -> None:
    """`prove` in a thread: what went wrong is added to `trouble`."""
    try:
        prove(client, number)
    except BaseException as error:
        trouble.append(repr(error))


def hit_until_told(path: str) -> dict[str, Any]:
    """Hit without a pause until stdin ends; the answers, the errors' names, and the answers since the last error."""
    answers = since = 0
    errors: dict[str, int] = {}
    client = Client(path, timeout=5.0)
    client.ping()
    wait_for_go()
    number = 0
    while not told_to_stop():
        number += 1
        try:
            prove(client, number)
            answers += 1
            since += 1
        except SidegateError as error:
            name = type(error).__name__
            errors[name] = errors.get(name, 0) + 1
            since = 0
    return {"answers": answers, "errors": errors, "since": since}


# The tests


@pytest.mark.parametrize("algorithm", ["token", "leaky"])
def test_eight_processes_share_a_limit(daemon: DaemonProcess, algorithm: str) -> None:
    """Eight processes with 50 hits each on one limit of 10 are admitted exactly 10 times between them."""
    with fresh(8, hit_many, daemon.socket, algorithm, 50) as processes:
        for process in processes:
            process.go()
        assert sum(process.result() for process in processes) == 10


def test_sixteen_threads_share_a_client(daemon: DaemonProcess) -> None:
    """Sixteen threads on one client of four connections get their own answers, over no more than four."""
    failures: list[BaseException] = []
    with daemon.client(timeout=PATIENT, max_connections=4) as client:
        begin = threading.Barrier(16)

        def ask(key: str) -> None:
            try:
                begin.wait()
                count_down(client, key, 200)
            except BaseException as error:
                failures.append(error)

        before = daemon.connections()["accepted"]
        threads = [threading.Thread(target=ask, args=(f"thread {number}",)) for number in range(16)]
        # A thread may lose the processor between any two steps of its call.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert not failures
        assert daemon.connections()["accepted"] - before - 1 <= 4


def test_a_limit_shared_by_threads(daemon: DaemonProcess) -> None:
    """Threads that share a client and a limit are admitted exactly the limit between them."""
    limit = Limit("threads", 100, per="1d")
    admitted: list[bool] = []
    with daemon.client(timeout=PATIENT, max_connections=3) as client:
        threads = [
            threading.Thread(target=lambda: admitted.extend(client.hit(limit, "shared").allowed for _ in range(50)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(admitted) == 400
    assert sum(admitted) == 100


def test_a_fork(daemon: DaemonProcess) -> None:
    """After a fork parent and children get only their own answers, and the parent's connection lives on."""
    with fresh(1, fork_and_ask, daemon.socket) as (process,):
        process.go()
        before, after = process.result()
    # One new connection for each child, none for the parent.
    assert after == before + 3


def test_a_fork_in_mid_call(daemon: DaemonProcess) -> None:
    """A fork while other threads are in mid-call harms neither side."""
    with fresh(1, fork_in_mid_call, daemon.socket) as (process,):
        process.go()
        assert process.result()


def test_a_pool_of_forked_workers(daemon: DaemonProcess) -> None:
    """A multiprocessing pool forked from a process with a used client is admitted exactly the limit."""
    with fresh(1, fork_pool, daemon.socket) as (process,):
        process.go()
        assert process.result() == 100


def test_a_signal_at_random_moments(daemon: DaemonProcess) -> None:
    """An exception from a signal handler in mid-call never lets the next call read the old answer."""
    with fresh(1, interrupt_at_random, daemon.socket, 7) as (process,):
        process.go()
        assert process.result() > 100


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "connecting"])
def test_a_signal_at_every_moment(daemon: DaemonProcess, connected: bool) -> None:
    """Wherever in a call an exception from a signal handler strikes, the client serves the next call."""
    with fresh(1, interrupt_everywhere, daemon.socket, connected) as (process,):
        process.go()
        assert process.result() == []


def test_a_daemon_killed_under_load(daemon: DaemonProcess) -> None:
    """While the daemon is killed and restarted callers see SidegateErrors only, and answers again afterwards."""
    with fresh(4, hit_until_told, daemon.socket) as processes:
        for process in processes:
            process.go()
        for _ in range(3):
            time.sleep(0.3)
            daemon.stop(signal.SIGKILL)
            time.sleep(0.1)
            daemon.start()
        # Keys are hit once each, so the number of buckets tells that every process is served again.
        with daemon.client() as client:
            wait_until(lambda: client.info()["connections"]["open"] >= 5, "all of them are back")
        time.sleep(1.5)
        results = [process.result() for process in processes]
    for result in results:
        assert set(result["errors"]) <= {"DaemonUnreachable", "DaemonTimeout"}
        assert result["errors"]
        assert result["since"] > 10


# What an application gets by importing the client


def in_fresh_python(code: str) -> Any:
    """What `code` prints as JSON in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def test_importing_loads_nothing_heavy(short_path: Path) -> None:
    """Importing sidecar, and making a client and a limit, loads no server machinery and opens nothing."""
    code = """
import json, os, sys
before = sorted(os.listdir("/proc/self/fd"))
from sidecar import Client, Decision, Limit, RateLimit
client = Client(PATH)
limit = Limit("requests_per_sec", 100, per="1s")
after = sorted(os.listdir("/proc/self/fd"))
import threading
print(json.dumps([before == after, threading.active_count(), sorted(sys.modules)]))
""".replace("PATH", repr(str(short_path / "none.sock")))
    same, threads, modules = in_fresh_python(code)
    assert same
    assert threads == 1
    loaded = {name.partition(".")[0] for name in modules}
    heavy = {"grpc", "kubernetes", "uvloop", "structlog", "asyncio", "aiohttp", "socket", "dataclasses", "cluster_link"}
    assert not loaded & heavy


def test_using_the_client_loads_nothing_heavy(daemon: DaemonProcess) -> None:
    """A call loads socket and threading, and still no server machinery."""
    code = """
import json, sys
from sidecar import Client, Limit
with Client(PATH, timeout=10) as client:
    client.hit(Limit("light", 5, per="1s"), "a")
print(json.dumps(sorted(sys.modules)))
""".replace("PATH", repr(daemon.socket))
    loaded = {name.partition(".")[0] for name in in_fresh_python(code)}
    assert "socket" in loaded
    assert not loaded & {"grpc", "kubernetes", "uvloop", "structlog", "asyncio", "aiohttp", "cluster_link"}
