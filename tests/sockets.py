"""Plain sockets for tests: a stream that speaks raw bytes to a daemon, and fake daemons that misbehave."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

import msgpack

_INFO = 4
"""The operation with the longest answer."""
PATIENCE = 30.0
"""Seconds after which a test gives up; nothing is expected to take so long."""


def frame(body: bytes) -> bytes:
    """The body with its length before it, 4 bytes, big-endian."""
    return struct.pack(">I", len(body)) + body


def packed(*elements: object) -> bytes:
    """A whole frame that holds these elements as a msgpack array."""
    return frame(msgpack.packb(elements))


class Raw:
    """A connection to a Unix socket that sends what it is told and cuts what comes into frames."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(path)
        self._rest = b""

    def send(self, data: bytes) -> None:
        """Write all of `data`."""
        self.socket.sendall(data)

    def take(self, count: int) -> bytes:
        """The next `count` bytes, fewer only where the stream ends."""
        while len(self._rest) < count:
            data = self._receive()
            if not data:
                break
            self._rest += data
        data, self._rest = self._rest[:count], self._rest[count:]
        return data

    def answer(self) -> Any:
        """The next frame as a list, or None at the end of the stream."""
        prefix = self.take(4)
        if not prefix:
            return None
        (length,) = struct.unpack(">I", prefix)
        body = self.take(length)
        assert len(body) == length, "the stream ended inside a frame"
        return msgpack.unpackb(body)

    def answers(self) -> list[Any]:
        """Every frame up to the end of the stream."""
        return list(iter(self.answer, None))

    def finish(self) -> list[Any]:
        """Say that no more will be sent, and read every frame up to the end."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the daemon was first
        return self.answers()

    def ended(self) -> bool:
        """Wait for the end of the stream; False if more frames came before it."""
        return not self.take(1)

    def close(self) -> None:
        """Close this end."""
        self.socket.close()

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(65_536)
        except ConnectionResetError:
            return b""  # closed with our bytes unread: an end as well

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def leave_unread(raw: Raw) -> None:
    """Ask until the daemon takes no more, since none of its answers are read."""
    raw.socket.settimeout(0.5)
    frames = b"".join(packed(1, number, _INFO, None) for number in range(1, 1_000))
    try:
        while True:
            raw.send(frames)
    except TimeoutError:
        return


Serve: TypeAlias = "Callable[[FakeServer, socket.socket], None]"
"""What a fake daemon does with a connection."""


class FakeServer:
    """Accepts at `path` and lets `serve` do with each connection as it likes, then closes it.

    accepted: connections so far.  requests: every request frame that `read_request` saw, decoded.
    """

    def __init__(self, path: str, serve: Serve) -> None:
        self.accepted = 0
        self.requests: list[Any] = []
        self.over = threading.Event()
        self._serve = serve
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def read_request(self, stream: socket.socket) -> Any:
        """The next request frame of a connection, or None at its end."""
        prefix = _exactly(stream, 4)
        if len(prefix) < 4:
            return None
        body = _exactly(stream, struct.unpack(">I", prefix)[0])
        request = msgpack.unpackb(body)
        self.requests.append(request)
        return request

    def _accept(self) -> None:
        while not self.over.is_set():
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            thread = threading.Thread(target=self._run, args=(stream,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, stream: socket.socket) -> None:
        with stream:
            try:
                self._serve(self, stream)
            except OSError:
                pass  # the client hung up first

    def close(self) -> None:
        """Stop accepting and let go of every connection."""
        self.over.set()
        # A close alone would not wake the thread that waits in accept().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def silent(server: FakeServer, stream: socket.socket) -> None:
    """Take a connection and say nothing."""
    server.over.wait()


def answering(reply: Callable[[Any], bytes]) -> Serve:
    """Answer every request frame with the bytes that `reply` makes of it."""

    def serve(server: FakeServer, stream: socket.socket) -> None:
        while (request := server.read_request(stream)) is not None:
            stream.sendall(reply(request))

    return serve


def ping_answer(request: Any) -> bytes:
    """A daemon's proper answer to a PING."""
    return packed(1, request[1], 0, None, "fake")


def accept_and_answer(listener: socket.socket, count: int) -> None:
    """Take `count` connections and answer whoever asks."""
    for _ in range(count):
        stream, _ = listener.accept()
        with stream:
            stream.settimeout(0.2)
            try:
                prefix = stream.recv(4)
                if len(prefix) == 4:
                    stream.recv(struct.unpack(">I", prefix)[0])
                    stream.sendall(packed(1, 1, 0, None, "fake"))
            except TimeoutError:
                pass


def _exactly(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = stream.recv(count - len(data))
        if not more:
            break
        data += more
    return data
