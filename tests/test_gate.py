"""Who is hung up on at the HTTP door, and when; transports are fakes, and the time is handed in.

test_http_v1.py and test_tls.py have real connections.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from sidecar.gateway.gate import Connection, Gate

PATIENCE = 10.0


class Transport:
    """Keeps whether it was ended; `unwritten` is what its client has not read."""

    def __init__(self) -> None:
        self.unwritten = 0
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unwritten

    def abort(self) -> None:
        self.aborted = True


class Door:
    """A gate with room for `most`, and what it reports."""

    def __init__(self, most: int = 10) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.gate = Gate(asyncio.Protocol, lambda event, **fields: self.told.append((event, fields)), most, PATIENCE)
        self.now = asyncio.get_running_loop().time()

    def connect(self) -> tuple[Connection, Transport]:
        """A new connection."""
        connection, transport = cast("Connection", self.gate.plain()), Transport()
        connection.connection_made(cast("asyncio.Transport", transport))
        return connection, transport

    def later(self, seconds: float) -> list[str]:
        """Go on by so much; why connections were hung up on then."""
        self.now += seconds
        self.told.clear()
        self.gate.drop_stalled(self.now)
        return [fields["reason"] for _, fields in self.told]

    def serving(self) -> asyncio.BaseProtocol:
        """What speaks HTTP for the one connection."""
        (serving,) = self.gate.open
        return serving


async def _heads() -> None:
    door = Door()
    connection, transport = door.connect()
    assert door.later(1_000) == []
    door.now = asyncio.get_running_loop().time()
    connection.data_received(b"GET ")
    assert door.later(PATIENCE - 1) == []
    connection.data_received(b"/livez ")  # a byte now and then buys no time
    assert door.later(2) == ["head left unfinished"]
    assert transport.aborted


async def _requests() -> None:
    door = Door()
    connection, transport = door.connect()
    connection.data_received(b"POST ")
    door.gate.begun(door.serving())
    connection.data_received(b"a part of its body")
    assert door.later(1_000) == []  # the body has a time of its own
    door.gate.ended(door.serving(), whole=False)
    connection.data_received(b"what is left of it")
    assert door.later(1_000) == []  # aiohttp reads that away, and hangs up
    door.gate.ended(door.serving(), whole=True)
    assert door.later(1_000) == []  # quiet
    door.now = asyncio.get_running_loop().time()
    connection.data_received(b"POST ")
    assert door.later(PATIENCE + 1) == ["head left unfinished"]
    assert transport.aborted


async def _readers() -> None:
    door = Door()
    slow, slowly = door.connect()
    dead, never = door.connect()
    quick, _ = door.connect()
    for connection, transport in ((slow, slowly), (dead, never)):
        transport.unwritten = 1_000
        connection.pause_writing()
    quick.pause_writing()
    quick.resume_writing()
    slowly.unwritten = 900
    assert door.later(PATIENCE + 1) == ["answers left unread"]
    assert (slowly.aborted, never.aborted) == (False, True)
    slowly.unwritten = 800
    dead.connection_lost(None)
    assert door.later(PATIENCE + 1) == []
    assert door.later(PATIENCE + 1) == ["answers left unread"]
    assert slowly.aborted


async def _places() -> None:
    door = Door(most=1)
    first, _ = door.connect()
    refused, transport = door.connect()
    assert transport.aborted
    assert door.told == [("connection_refused", {"door": "http", "max_connections": 1})]
    refused.data_received(b"GET ")
    refused.connection_lost(None)
    assert len(door.gate.open) == 1
    first.connection_lost(None)
    assert not door.connect()[1].aborted


@pytest.mark.parametrize("course", [_heads, _requests, _readers, _places])
def test_who_is_hung_up_on(course: Any) -> None:
    """A head that is not whole in time, however it trickles; answers that nobody reads, though not who reads slowly;
    one too many.  Never who is quiet, nor whose request is under way."""
    asyncio.run(course())
