"""Peers by a file: read when it changes.

Decides what a list of peers in a file looks like, and when it is looked at.  A file that cannot be used
changes nothing.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable

from cluster_link.discovery.source import Standing
from cluster_link.membership import Peer, parse_peers

_INTERVAL = 0.5
"""Seconds between two looks.  No watch of the kernel's: it would miss files on other hosts' disks, and where a symlink
on the way is exchanged, as it is for a Kubernetes ConfigMap."""
_MOST_BYTES = 1 << 20


def read_peers(path: str) -> frozenset[Peer]:
    """The peers that a file lists, as `parse_peers` takes them: separated by commas or ends of lines, with comments
    from a # to the end of its line.

    Raises ValueError, with one line that names the file, for one that cannot be read, lists nobody or is wrong.
    """
    try:
        # Opened so that a pipe without a writer does not hold up whoever reads.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("is no file")
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"is longer than {_MOST_BYTES} bytes")
        lines = [line.partition("#")[0].strip().removesuffix(",") for line in raw.decode().splitlines()]
        peers = parse_peers(",".join(line for line in lines if line))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{path}: {why}") from None
    if not peers:
        raise ValueError(f"{path}: lists no peer")
    return peers


class StaticFile:
    """The source; see source.Source, but that this daemon is in a set only if the file lists it.

    mine: a set -> whether this daemon is in it.
    """

    def __init__(
        self,
        path: str,
        mine: Callable[[frozenset[Peer]], bool],
        standing: Standing,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path = path
        self._mine = mine
        self._standing = standing
        self._sleep = sleep

    async def members(self) -> AsyncIterator[frozenset[Peer]]:
        """What the file lists."""
        while True:
            try:
                # Off the loop: a file may lie on a disk that does not answer.
                peers = await asyncio.to_thread(read_peers, self._path)
            except ValueError as error:
                self._standing.lost(str(error))
            else:
                self._standing.heard(self._mine(peers))
                yield peers
            await self._sleep(_INTERVAL)

    async def leave(self) -> None:
        """Nothing: whoever writes the file takes this daemon out of it."""
