"""What one read of the daemon may cost the others, and who counts as a client that does not read."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from sidecar.server import Connection, Server
from sidecar.wire import Outcome, Packer
from tests.daemons import DaemonProcess
from tests.sockets import Raw, packed

INFO, PING = 4, 3


class FakeTransport:
    """Counts writes; pauses and resumes reading like a real one."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.reading = True
        self.closed = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()

    abort = close


def test_who_came_just_before_the_end_may_still_ask() -> None:
    """A stopping server closes a client that has long been silent at once; one that has just come, after it asked."""
    pack = Packer("node").answer

    async def scene(age: float) -> tuple[bool, int]:
        server = Server(
            lambda body, now, asker: pack(1, Outcome.ANSWERED, None),
            lambda data, now, asker: None,
            lambda: 0,
            pack,
            lambda event, **fields: None,
            max_connections=1,
            max_frame=1 << 20,
            stall_timeout=1,
        )
        connection, transport = Connection(server), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.since -= age
        end = asyncio.create_task(server.drain(20))
        # As long as closing takes, and a good deal more, but short of the time in which a client may ask.
        while not transport.is_closing() and asyncio.get_running_loop().time() < connection.since + age + 0.1:
            await asyncio.sleep(0.005)
        before = transport.is_closing()
        if not before:
            connection.data_received(packed(1, 1, PING, None))
        await transport.closed.wait()
        connection.connection_lost(None)
        await end
        return before, len(transport.written)

    assert asyncio.run(scene(60)) == (True, 0)
    assert asyncio.run(scene(0)) == (False, 1)


def test_a_read_is_answered_in_bounded_turns() -> None:
    """However much one read asks for, a turn of the loop answers a share of it, and nothing more is read meanwhile."""
    size = 30_000
    pack = Packer("node").answer

    async def scene() -> None:
        server = Server(
            lambda body, now, asker: pack(1, Outcome.ANSWERED, "x" * size),
            lambda data, now, asker: None,
            lambda: 0,
            pack,
            lambda event, **fields: None,
            max_connections=1,
            max_frame=1 << 20,
            stall_timeout=1,
        )
        connection, transport = Connection(server), FakeTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(packed(1, 1, PING, None) * 10)
        turns = [len(b"".join(transport.written))]
        while not transport.reading:
            assert connection.busy
            await asyncio.sleep(0)
            turns.append(len(b"".join(transport.written)))
        assert turns[-1] > 10 * size, "all of it is answered in the end"
        assert len(turns) >= 4
        assert max(after - before for before, after in zip([0, *turns], turns, strict=False)) < 4 * size

    asyncio.run(scene())


def test_a_slow_reader_is_no_stalled_one(start_daemon: Callable[..., DaemonProcess]) -> None:
    """A client that takes its answers slowly but steadily is not dropped, though it takes longer than the bound."""
    daemon = start_daemon("--stall-timeout", "1000")
    with Raw(daemon.socket) as raw:
        sender = threading.Thread(target=raw.send, args=(packed(1, 1, INFO, None) * 6000,), daemon=True)
        sender.start()
        answers = 0
        end = time.monotonic() + 4
        while time.monotonic() < end:
            for _ in range(60):
                assert raw.answer() is not None, f"dropped after {answers} answers"
                answers += 1
            time.sleep(0.1)
        while answers < 6000:
            assert raw.answer() is not None, f"dropped after {answers} answers"
            answers += 1
        sender.join()
    assert not daemon.events("client_dropped")
