"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.clusters import Cluster
from tests.daemons import DaemonProcess

settings.register_profile("sidegate", deadline=None, derandomize=False)
settings.load_profile("sidegate")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short path: a Unix socket's may have 107 bytes, and pytest's own folders are long."""
    folder = Path(tempfile.mkdtemp(prefix="sg-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start_daemon(short_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons, each in its own folder, and ends them after the test."""
    started: list[DaemonProcess] = []

    def start(*options: str, **more: str) -> DaemonProcess:
        folder = short_path / str(len(started))
        folder.mkdir()
        started.append(DaemonProcess(folder, *options, **more))
        return started[-1]

    yield start
    for daemon in started:
        daemon.kill()


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """One daemon with a manual clock."""
    return start_daemon()


@pytest.fixture
def start_cluster(short_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts clusters (see Cluster.start), each in its own folder, and ends them after the test."""
    started: list[Cluster] = []

    def start(nodes: int, *options: str, **more: Any) -> Cluster:
        folder = short_path / f"cluster-{len(started)}"
        folder.mkdir()
        started.append(Cluster(folder))
        started[-1].start(nodes, *options, **more)
        return started[-1]

    yield start
    for cluster in started:
        cluster.close()
