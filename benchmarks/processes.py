"""Servers and load generators as processes, started together and stopped by the one who started them.

Knows nothing of what is measured.
"""

from __future__ import annotations

import ast
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FORK = multiprocessing.get_context("fork")


@contextmanager
def server(path: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process (`-m ...`) that listens on `path`, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + 20
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(str(path))
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{command} did not start") from None
                time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait(20)


def daemon(path: Path, *options: str, module: str = "sidecar") -> Any:
    """A Sidegate daemon at `path`; its other doors are off unless the options open them."""
    words = ["-m", module] + (["serve"] if module == "sidecar" else [])
    off = ("--listen", "off", "--http", "off")
    return server(path, *words, "--socket", str(path), "--log-level", "error", *off, *options)


def echo(path: Path) -> Any:
    """The bare uvloop echo at `path`."""
    return server(path, "-m", "benchmarks.echo", str(path))


def together(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run `work(start, *arguments)` in a process for each; `start()` lets all begin at once.  Their results."""
    barrier = _FORK.Barrier(len(arguments))
    results = _FORK.SimpleQueue()

    def run(index: int, words: tuple[Any, ...]) -> None:
        results.put((index, work(barrier.wait, *words)))

    processes = [_FORK.Process(target=run, args=item) for item in enumerate(arguments)]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    return [found[index] for index in range(len(processes))]


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
