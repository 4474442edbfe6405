"""The Unix socket: connections, and how much of each other's time and memory they may take.

Decides who is let in, when a client that does not read is paused and then dropped, and that all frames of
one read share one clock reading and one write.  Knows no operation (service.py) and binds nothing
(socketfile.py): the listener is handed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, cast

from sidecar.wire import BadFrame, Frames, Outcome

if TYPE_CHECKING:
    import socket

BACKLOG = 1024
_TURN = 65_536
"""Bytes of answers after which a client waits for the loop's next turn: 2 to 5 ms of work, whatever it asked."""
_TO_ASK = 0.2
"""Seconds in which a client that has just come is expected to ask: at once, but it may have to wait for its turn."""
_FORWARDED = 4_096
"""What a forwarded frame counts for."""


class Reporter(Protocol):
    """Where trouble is told; logs.Repeats holds back what repeats."""

    def __call__(self, event: str, **fields: object) -> None: ...


class Server:
    """The connections of one listening socket.

    answer: (a request frame's body, epoch ms, its connection) -> the answer frame, or None if that is sent to the
        connection later; raises BadFrame.
    answer_again: the same for bytes just read, if they are a frame that needs no decoding; empty if its answer is
        sent to the connection later, None if they are no such frame.
    now: epoch ms.
    pack: (id, outcome, payload) -> an answer frame.
    stall_timeout: seconds that a client may leave answers unread or a frame unfinished.
    """

    def __init__(
        self,
        answer: Callable[[bytes, int, Connection], bytes | None],
        answer_again: Callable[[bytes, int, Connection], bytes | None],
        now: Callable[[], int],
        pack: Callable[[int, int, object], bytes],
        report: Reporter,
        *,
        max_connections: int,
        max_frame: int,
        stall_timeout: float,
    ) -> None:
        self.answer = answer
        self.answer_again = answer_again
        self.now = now
        self.pack = pack
        self.report = report
        self.max_connections = max_connections
        self.max_frame = max_frame
        self.stall_timeout = stall_timeout
        self.connections: set[Connection] = set()
        self.stalled: dict[Connection, float] = {}
        self.accepted = self.refused = self.dropped = self.bad_frames = 0
        self.pending = 0
        self._listener: asyncio.AbstractServer | None = None

    async def start(self, sock: socket.socket) -> None:
        """Accept on a bound Unix socket."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(lambda: Connection(self), sock=sock, backlog=BACKLOG)

    def drop_stalled(self, now: float) -> None:
        """Close what has stalled for longer than the bound; called about once a second with the loop's time."""
        for connection, since in list(self.stalled.items()):
            if connection.reads():
                self.stalled[connection] = now
            elif now - since >= self.stall_timeout:
                self.dropped += 1
                self.report("client_dropped", reason=connection.stalled_by)
                connection.abort()

    async def drain(self, grace: float) -> None:
        """Accept no more, answer what was read, close; what has not closed after `grace` seconds is cut.

        Who came just before may still ask, since a client does not ask twice: the daemon may have counted the hit.
        """
        if self._listener is not None:
            self._listener.close()
        loop = asyncio.get_running_loop()
        # Two turns of the loop, so that what the kernel already holds is read and answered too.
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        end = loop.time() + grace
        while (self.pending or any(self._expected(connection) for connection in self.connections)) and (
            loop.time() < end
        ):
            await asyncio.sleep(0.005)
        for connection in list(self.connections):
            connection.close()
        while self.connections and loop.time() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)

    def _expected(self, connection: Connection) -> bool:
        """Whether there will be something to answer yet."""
        return connection.busy or connection.since > asyncio.get_running_loop().time() - _TO_ASK


class Connection(asyncio.Protocol):
    """One client's stream."""

    __slots__ = (
        "_frames",
        "_paused",
        "_server",
        "_todo",
        "_transport",
        "_unwritten",
        "busy",
        "gone",
        "since",
        "stalled_by",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._frames = Frames(server.max_frame)
        self._paused = False
        self.busy = False
        self._todo: Iterator[bytes] = iter(())
        self._unwritten = 0
        self.stalled_by = ""
        self.gone = False
        self.since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        server = self._server
        if len(server.connections) >= server.max_connections:
            server.refused += 1
            server.report("connection_refused", max_connections=server.max_connections)
            why = f"too many connections; this daemon takes {server.max_connections} (max_connections)"
            self._transport.write(self._server.pack(0, Outcome.FATAL, why))
            self._transport.close()
            return
        server.accepted += 1
        server.connections.add(self)
        self.since = asyncio.get_running_loop().time()

    def data_received(self, data: bytes) -> None:
        server = self._server
        frames = self._frames
        now = server.now()
        if not frames.partial:
            again = server.answer_again(data, now, self)
            if again:
                self._transport.write(again)
                return
            if again is not None:
                server.pending += 1
                return
        self._todo = iter(frames.feed(data))
        self._work(now)

    def _go_on(self) -> None:
        """Another turn for what is left of the last read, with a clock reading of its own."""
        if not self._paused and not self._transport.is_closing():
            self._work(self._server.now())

    def _work(self, now: int) -> None:
        """Answer frames of the last read, up to a turn's share; the rest waits for the loop's next turn."""
        server = self._server
        answers: list[bytes] = []
        share = _TURN
        try:
            for body in self._todo:
                answer = server.answer(body, now, self)
                if answer is None:
                    server.pending += 1
                    share -= _FORWARDED
                else:
                    answers.append(answer)
                    share -= len(answer)
                if share <= 0:
                    break
        except BadFrame as error:
            server.bad_frames += 1
            server.report("bad_frame", why=error.why)
            self._end(answers, server.pack(error.request_id, Outcome.FATAL, error.why))
            return
        except Exception as error:  # a fault of ours costs this client its connection, and nobody else anything
            server.report("internal_error", error=repr(error), exc_info=True)
            self._end(answers, server.pack(0, Outcome.FATAL, "internal error; the daemon's log tells more"))
            return
        if share <= 0:
            # Read no more before this is done; it may be done already, which the next turn finds out.
            self.busy = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)
        elif self.busy:
            self.busy = False
            self._transport.resume_reading()
        if answers:
            self._transport.write(answers[0] if len(answers) == 1 else b"".join(answers))
        if self._frames.partial:
            if answers or not self.stalled_by:
                self._stall("frame left unfinished")
        elif self.stalled_by and not self._paused:
            self._unstall()

    def pause_writing(self) -> None:
        """The client does not read: take no more from it until it does."""
        self._paused = True
        self._transport.pause_reading()
        self._stall("answers left unread")

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport.is_closing():
            return  # what is left to write still has to be read in time
        if self._frames.partial:
            self._stall("frame left unfinished")
        else:
            self._unstall()
        if self.busy:
            self._go_on()
        else:
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._server.connections.discard(self)
        self._server.stalled.pop(self, None)

    def send(self, data: bytes) -> None:
        """Write an answer that was not there when its frame was read."""
        self._server.pending -= 1
        if not self._transport.is_closing():
            self._transport.write(data)

    def reads(self) -> bool:
        """Whether answers have left since this was last asked, however slowly."""
        before, self._unwritten = self._unwritten, self._transport.get_write_buffer_size()
        return 0 < self._unwritten < before

    def close(self) -> None:
        """Close when what was answered has been written; if the client never reads it, drop_stalled ends it."""
        if not self._transport.is_closing():
            self._stall("answers left unread")
            self._transport.close()

    def abort(self) -> None:
        """Close now, losing what was not written."""
        self._transport.abort()

    def _end(self, answers: list[bytes], last: bytes) -> None:
        self._transport.write(b"".join([*answers, last]))
        self.close()

    def _stall(self, why: str) -> None:
        self.stalled_by = why
        self._server.stalled[self] = asyncio.get_running_loop().time()

    def _unstall(self) -> None:
        self.stalled_by = ""
        self._server.stalled.pop(self, None)
