"""What the figures were measured on: the machine, how busy it was, and the version of everything that took part."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks.peers.systems import gubernator

_PACKAGES = ("uvloop", "msgpack", "grpcio", "protobuf", "aiohttp", "limits", "redis")


def machine() -> str:
    """Processor, cores, memory, kernel."""
    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = cpu[1] if cpu else platform.machine()
    return f"{os.cpu_count()} cores of {name}, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def versions(systems: Iterable[str]) -> dict[str, str]:
    """Of Python, the packages, and the servers that take part; Sidegate's is its commit where this is a checkout."""
    found = {"Sidegate": _first_line("git", "describe", "--always", "--dirty", cwd=Path(__file__).parent)}
    found["Python"] = platform.python_version()
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    if "redis" in systems:
        text = _first_line("redis-server", "--version")
        version = re.search(r"v=(\S+)", text)
        found["redis-server"] = version[1] if version else text
    if "gubernator" in systems:
        found["Gubernator"] = _built_from(gubernator() or "")
    return found


def _built_from(program: str) -> str:
    """The module's version that Go wrote into the program, as `go version -m` reads it."""
    if shutil.which("go") is None:
        return "unknown (no go to read it with)"
    told = subprocess.run(["go", "version", "-m", program], capture_output=True, text=True, check=False).stdout
    version = re.search(r"^\s*mod\s+\S+\s+(\S+)", told, re.MULTILINE)
    built = re.search(r": (go\S+)", told)
    return f"{version[1] if version else 'unknown'} ({built[1] if built else 'go unknown'})"


def _first_line(*command: str, cwd: Path | None = None) -> str:
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd).stdout
    except FileNotFoundError:
        told = ""
    return told.splitlines()[0] if told else "unknown"
