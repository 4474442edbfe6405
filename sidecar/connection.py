"""How bytes reach the daemon from an application: a bounded pool of connections, and a circuit before it.

Decides when a connection is opened, reused or thrown away, and when the daemon is not even asked.  Knows
no limit and no decision; loaded at a client's first call, so that importing the client stays cheap.

A connection belongs to one thread at a time and to one process for ever: whatever interrupts a call
(a time-out, an exception from a signal handler) closes it, so no one can read another's answer.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from errno import EAGAIN
from os import write
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any
from weakref import WeakSet

from msgpack import packb

from sidecar.errors import DaemonTimeout, DaemonUnreachable, ProtocolError, RequestRefused
from sidecar.wire import BadFrame, Frames, Outcome, Packer, open_answer

_READ = 16_384
_MAX_ANSWER = 64 << 20
"""Bytes of an answer's body a client takes: far more than 1,000 decisions need."""
_SLACK = 0.05
"""How far (as a part of the time-out) a socket's armed time-out may differ from what is left of a call:
re-arming costs a system call, which the usual call need not pay."""
_LOOK_AGAIN = 0.05
"""Seconds after which a waiting thread looks by itself whether a place is free."""
_MOST_IDS = 0xFFFFFFFF
"""Ids are of 4 bytes at most, the form in which a daemon reads them fastest."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 1.0
_TIMEOUTS_TO_OPEN = 3


class Connection:
    """One stream to the daemon."""

    def __init__(self, path: str, timeout: float) -> None:
        self._path = path
        self._slack = timeout * _SLACK
        self._frames = Frames(_MAX_ANSWER)
        self._pack = Packer().request
        self._request_id = 0
        self.used = False
        self._socket: socket.socket | None = None
        self._armed = -1.0
        # The last call's time, for which the socket is armed, and what the daemon is told of it: mostly the same again.
        self._left = 0.0
        self._budget = 0
        self._packed_budget = b""

    def close(self) -> None:
        """Close this process's end; a forked parent's end lives on."""
        if self._socket is not None:
            self._socket.close()

    def ask(
        self, op: int, payload: object, left: float, deadline: float, context: str | None = None
    ) -> tuple[Any, str]:
        """One operation's (answer, node that gave it), connecting first if this is the first one.

        payload: msgpack's bytes of it, or what msgpack packs.  left: seconds until the deadline.  context: the
        caller's traceparent.

        The caller closes this connection on any exception but RequestRefused.  Raises StaleConnection when
        nothing could be sent because the daemon had closed the stream; DaemonTimeout, DaemonUnreachable,
        ProtocolError, RequestRefused.
        """
        stream = self._socket
        if stream is None:
            stream = self._socket = _connect(self._path, deadline)
            left = deadline - monotonic()
        if left != self._left:
            self._arm(stream, left)
            self._left = left
            self._budget = int(left * 1000) or 1
            self._packed_budget = packb(self._budget)
        # One is under way at a time, so that the ids may start anew.
        request_id = self._request_id = self._request_id % _MOST_IDS + 1
        if type(payload) is bytes:
            data = Packer.packed_request(request_id, op, payload, self._packed_budget)
        else:
            data = self._pack(request_id, op, payload, self._budget, context)
        if not self._send(stream, data):
            self._arm(stream, deadline - monotonic())
        self.used = True
        while True:
            try:
                data = stream.recv(_READ)
            except TimeoutError:
                raise DaemonTimeout(f"no answer from {self._path} in time") from None
            except OSError as error:
                raise DaemonUnreachable(f"connection to {self._path} was lost: {error}") from error
            if not data:
                raise DaemonUnreachable(f"the daemon at {self._path} closed the connection")
            found = self._read(data)
            if found is not None:
                return found
            self._arm(stream, deadline - monotonic())

    def _read(self, data: bytes) -> tuple[Any, str] | None:
        """The answer, if it is complete with these bytes; all of them are taken in either way."""
        found = None
        try:
            for body in self._frames.feed(data):
                request_id, outcome, payload, node = open_answer(body)
                if outcome or request_id != self._request_id:
                    self._refuse(request_id, outcome, payload)
                else:
                    found = payload, node
        except BadFrame as error:
            raise ProtocolError(f"the daemon at {self._path} sent a bad frame: {error.why}") from error
        return found

    def _refuse(self, request_id: int, outcome: int, payload: Any) -> None:
        """Raise what a frame says that is not the answer to the request; no more of one that came unasked."""
        if outcome == Outcome.FATAL:
            raise _fatal(request_id, payload)
        if request_id == 0:
            return  # this release knows of none
        if request_id != self._request_id:
            raise ProtocolError(f"an answer to {request_id!r} came instead of {self._request_id}")
        raise RequestRefused(payload)

    def _arm(self, stream: socket.socket, left: float) -> None:
        """Have the socket wait for as long as the call may; raises DaemonTimeout when that is over."""
        if left <= 0:
            raise DaemonTimeout(f"no answer from {self._path} in time")
        if abs(left - self._armed) > self._slack:
            stream.settimeout(left)
            self._armed = left
            self._left = 0.0

    def _send(self, stream: socket.socket, data: bytes) -> bool:
        """Send all of it; whether that took one step, and so no time."""
        sent = 0
        try:
            try:
                # A socket with a time-out does not block, so that its own `send` first asks whether there is room: a
                # system call that a request, for which there nearly always is, need not pay.
                sent = write(stream.fileno(), data)
            except BlockingIOError:
                pass
            if sent == len(data):
                return True
            stream.sendall(memoryview(data)[sent:])
        except TimeoutError:
            raise DaemonTimeout(f"the daemon at {self._path} took no more bytes in time") from None
        except (BrokenPipeError, ConnectionResetError) as error:
            # A Unix socket whose peer has gone refuses the first byte, so it may be asked anew elsewhere.
            if self.used and not sent:
                raise StaleConnection from error
            # Otherwise the daemon hung up on these bytes; its reason, if it gave one, is there to be read.
        except OSError as error:
            raise DaemonUnreachable(f"connection to {self._path} was lost: {error}") from error
        return False


class StaleConnection(Exception):
    """A pooled connection that the daemon had closed; nothing was sent on it."""


class _Declined(DaemonUnreachable):
    """The daemon is there and says why it takes no more of this connection; the others go on."""


def _fatal(request_id: int, why: object) -> Exception:
    if request_id:
        return ProtocolError(f"the daemon could not read the request: {why}")
    return _Declined(f"the daemon closed the connection: {why}")


def _connect(path: str, deadline: float) -> socket.socket:
    pause = 0.001
    while True:
        left = deadline - monotonic()
        if left <= 0:
            raise DaemonTimeout(f"the daemon at {path} accepted no connection in time")
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.settimeout(left)
            stream.connect(path)
            return stream
        except BaseException as error:
            stream.close()
            if isinstance(error, TimeoutError):
                continue
            if not isinstance(error, OSError):
                raise
            if error.errno != EAGAIN:
                raise DaemonUnreachable(f"no daemon at {path}: {error.strerror or error}") from error
        # A full backlog: Linux refuses at once instead of waiting.
        sleep(min(pause, max(0.0, deadline - monotonic())))
        pause = min(pause * 2, 0.02)


class Circuit:
    """Whether to ask at all: after a daemon was found away, most calls fail at once, one a pause probes.

    open_until: when the next call may probe, in seconds of `monotonic`; 0 while every call may ask, so that `admit`
    has nothing to say.  failures: calls in a row that found no daemon; 0 if `succeeded` has nothing to do.
    """

    def __init__(self) -> None:
        self._close()

    def _close(self) -> None:
        self.open_until = 0.0
        self._pause = _FIRST_PAUSE
        self.failures = 0
        self._cause = ""

    def admit(self) -> None:
        """Raises DaemonUnreachable while open; lets one call through when the pause is over."""
        if self.open_until:
            now = monotonic()
            if now < self.open_until:
                raise DaemonUnreachable(f"not asked, since the daemon is away: {self._cause}")
            self.open_until = now + self._pause

    def succeeded(self) -> None:
        """The daemon answered."""
        if self.failures:
            self._close()

    def failed(self, error: Exception) -> None:
        """A daemon that is not there opens the circuit at once; a slow one after three calls in a row."""
        self.failures += 1
        if self.open_until:
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        elif isinstance(error, DaemonTimeout) and self.failures < _TIMEOUTS_TO_OPEN:
            return
        self._cause = str(error)
        self.open_until = monotonic() + self._pause


class Pool:
    """The connections of one process, at most `size`, the last used first.

    No lock is held anywhere, since an exception from a signal handler can strike between any two steps and
    would leave one locked.  A connection counts while it lives: one that an interrupted call drops closes,
    and its place is free again.
    """

    def __init__(self, path: str, timeout: float, size: int) -> None:
        self._path = path
        self._timeout = timeout
        self._size = size
        self._idle: list[Connection] = []
        self._all: WeakSet[Connection] = WeakSet()
        self._waiting = 0
        self._freed: SimpleQueue[None] = SimpleQueue()
        self._circuit = Circuit()

    def ask(
        self, op: int, payload: object, context: str | None = None, deadline: float | None = None
    ) -> tuple[Any, str]:
        """One operation's (answer, node) within the time-out, connecting included; raises as Connection.ask does.

        deadline: a moment of `monotonic`, in place of the time-out.
        """
        if deadline is None:
            left = self._timeout
            deadline = monotonic() + left
        else:
            left = deadline - monotonic()
        circuit = self._circuit
        if circuit.open_until:
            circuit.admit()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._take(deadline)
                left = deadline - monotonic()
            try:
                answer = connection.ask(op, payload, left, deadline, context)
            except RequestRefused:
                self._give(connection)
                circuit.succeeded()
                raise
            except StaleConnection:
                self._discard(connection)
                left = deadline - monotonic()
                continue
            except BaseException as error:
                self._discard(connection)
                if isinstance(error, DaemonUnreachable | DaemonTimeout) and not isinstance(error, _Declined):
                    circuit.failed(error)
                raise
            self._idle.append(connection)
            if self._waiting:
                self._wake()
            if circuit.failures:
                circuit.succeeded()
            return answer

    def ask_all(self, op: int, payloads: Iterable[object], context: str | None = None) -> list[tuple[Any, str]]:
        """The same for several frames, one after another, within one time-out."""
        deadline = monotonic() + self._timeout
        return [self.ask(op, payload, context, deadline) for payload in payloads]

    def close(self) -> None:
        """Close every connection; those in use close when their call ends."""
        while self._idle:
            self._discard(self._idle.pop())

    def abandon(self) -> None:
        """In a forked child: close the child's copies of the parent's connections, and use none of them."""
        for connection in list(self._all):
            connection.close()

    def _take(self, deadline: float) -> Connection:
        try:
            return self._idle.pop()
        except IndexError:
            pass
        self._waiting += 1
        try:
            while True:
                if len(self._all) < self._size:
                    connection = Connection(self._path, self._timeout)
                    self._all.add(connection)
                    if len(self._all) <= self._size:
                        return connection
                    self._all.discard(connection)  # another thread was quicker
                try:
                    return self._idle.pop()
                except IndexError:
                    pass
                left = deadline - monotonic()
                if left <= 0:
                    raise DaemonTimeout(f"all {self._size} connections to {self._path} stayed busy")
                try:
                    self._freed.get(timeout=min(left, _LOOK_AGAIN))
                except Empty:
                    pass
        finally:
            self._waiting -= 1

    def _give(self, connection: Connection) -> None:
        self._idle.append(connection)
        self._wake()

    def _discard(self, connection: Connection) -> None:
        connection.close()
        self._all.discard(connection)
        self._wake()

    def _wake(self) -> None:
        if self._waiting and self._freed.empty():
            self._freed.put(None)
