"""Servers and load generators as processes, started together and stopped by the one who started them.

Knows nothing of what is measured.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

_FORK = multiprocessing.get_context("fork")


@contextmanager
def running(
    command: Sequence[str], listens: Path | tuple[str, int], end_by: int = signal.SIGTERM, **how: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process that listens on a Unix socket or a TCP address, until the block ends.  `how`: as Popen takes it.

    Raises RuntimeError where it does not within 20 s.
    """
    # Ctrl-C goes to all processes of a terminal's group; this one is ended from here, once.
    process: subprocess.Popen[str] = subprocess.Popen(command, text=True, start_new_session=True, **how)
    try:
        end = time.monotonic() + 20
        while not _listens(listens):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{' '.join(command)} did not start") from None
            time.sleep(0.02)
        yield process
    finally:
        process.send_signal(end_by)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def server(path: Path, *command: str) -> Any:
    """A Python process (`-m ...`) that listens on `path`, until the block ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return running([sys.executable, *command], path, **pipes)


def _listens(where: Path | tuple[str, int]) -> bool:
    with socket.socket(socket.AF_UNIX if isinstance(where, Path) else socket.AF_INET) as probe:
        return probe.connect_ex(str(where) if isinstance(where, Path) else where) == 0


def daemon(path: Path, *options: str, module: str = "sidecar") -> Any:
    """A Sidegate daemon at `path`; its other doors are off unless the options open them."""
    words = ["-m", module] + (["serve"] if module == "sidecar" else [])
    off = ("--listen", "off", "--http", "off")
    return server(path, *words, "--socket", str(path), "--log-level", "error", *off, *options)


def echo(path: Path) -> Any:
    """The bare uvloop echo at `path`."""
    return server(path, "-m", "benchmarks.echo", str(path))


def together(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], within: float = 600.0) -> list[Any]:
    """Run `work(start, *arguments)` in a process for each; `start()` lets all begin at once.  Their results.

    Raises RuntimeError with the first failure, or where one has no result within so many seconds; then all are ended.
    """
    barrier = _FORK.Barrier(len(arguments), timeout=within)

    def run(index: int, words: tuple[Any, ...]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to act upon
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        told: tuple[str | None, Any]
        try:
            told = (None, work(barrier.wait, *words))
        except Exception:
            barrier.abort()
            told = (traceback.format_exc(), None)
        ends[index][1].send(told)

    ends = [_FORK.Pipe(duplex=False) for _ in arguments]
    processes = [_FORK.Process(target=run, args=item) for item in enumerate(arguments)]
    found: dict[int, Any] = {}
    failures = []
    try:
        for process, (_, tell) in zip(processes, ends, strict=True):
            process.start()
            tell.close()  # so that a process that dies without a word is heard as the end of its pipe
        due = {hear: index for index, (hear, _) in enumerate(ends)}
        end = time.monotonic() + within
        while due:
            heard = wait(list(due), max(0.0, end - time.monotonic()))
            if not heard:
                raise RuntimeError(f"a load process has no result after {within:g} s")
            for one in heard:
                index = due.pop(cast("Any", one))
                try:
                    failure, found[index] = cast("Any", one).recv()
                except EOFError:
                    failure = f"load process {index} ended without a result"
                if failure:
                    # Others fail because the first did: their barrier is broken.
                    failures += [] if "BrokenBarrierError" in failure else [failure]
                    end = min(end, time.monotonic() + 5)
    finally:
        for process in processes:
            if process.is_alive() and len(found) < len(processes):
                process.kill()
            if process.pid is not None:
                process.join()
    if failures:
        raise RuntimeError(failures[0])
    return [found[index] for index in range(len(processes))]


def processor_seconds(pid: int) -> float:
    """CPU time of all of a process's threads, user and system, to a hundredth of a second."""
    # The name, in brackets, may hold spaces; utime and stime are the 12th and 13th words after it (proc(5)).
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no VmRSS for {pid}")


def run_apart(module: str, function: str, *arguments: object) -> Any:
    """What `function(start, *arguments)` of a module answers in a fresh interpreter: gRPC and fork do not mix."""
    code = f"import {module} as m; print(repr(m.{function}(lambda: None, *{arguments!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout)
