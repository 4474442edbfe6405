"""Peers by a file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_link.discovery.source import Standing
from cluster_link.discovery.static_file import StaticFile, read_peers
from cluster_link.membership import Peer

A, B = Peer("10.0.0.1:1051", "10.0.0.1:1051"), Peer("b", "10.0.0.2:1051")


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.1:1051,b=10.0.0.2:1051",
        "10.0.0.1:1051\nb=10.0.0.2:1051\n",
        "# all of them\n\n  10.0.0.1:1051 ,  # the first\r\nb = 10.0.0.2:1051,\n",
    ],
)
def test_a_list_in_any_layout(tmp_path: Path, text: str) -> None:
    """Lines, commas, comments and spaces."""
    file = tmp_path / "peers"
    file.write_text(text)
    assert read_peers(str(file)) == {A, B}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"),
        (b"", "lists no peer"),
        (b"# nobody\n", "lists no peer"),
        (b"10.0.0.1", "is not host:port"),
        (b"a=10.0.0.1:1,b=10.0.0.1:1", "two names"),
        (b"10.0.0.1:1051,,b=10.0.0.2:1051", "empty"),
        (b"\xff:1", "utf-8"),
        (b"#" * (1 << 20) + b"#", "longer than"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path, content: bytes | None, why: str) -> None:
    """In one line."""
    file = tmp_path / "peers"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{file}: [^\n]*{why}[^\n]*$"):
        read_peers(str(file))


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A directory, as a mount that is not there yet leaves one; a pipe, which would hold up its reader."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=r"Is a directory|is no file"):
            read_peers(str(path))


def test_a_file_is_followed_and_trouble_changes_nothing(tmp_path: Path) -> None:
    """Its list is told at each look; while it cannot be used nothing is, and that is told once; a symlink on the way
    may be exchanged, as a Kubernetes ConfigMap's is."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "peers").write_text("10.0.0.1:1051")
    (tmp_path / "two" / "peers").write_text("b=10.0.0.2:1051")
    data = tmp_path / "data"
    data.symlink_to("one")

    def exchange() -> None:
        (tmp_path / "new").symlink_to("two")
        (tmp_path / "new").rename(data)

    steps: list[Callable[[], object]] = [exchange, data.unlink, lambda: None, lambda: data.symlink_to("one")]
    events: list[str] = []
    told: list[frozenset[Peer]] = []
    standing = Standing("static", lambda: 0.0, lambda event, **_: events.append(event))

    async def sleep(_: float) -> None:
        if not steps:
            raise asyncio.CancelledError
        steps.pop(0)()

    async def listen() -> None:
        async for members in StaticFile(str(data / "peers"), lambda members: B in members, standing, sleep).members():
            told.append(members)
            assert standing.listed == (B in members)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(listen())
    assert told == [{A}, {B}, {A}]
    assert events == ["discovery_away", "discovery_back"]
