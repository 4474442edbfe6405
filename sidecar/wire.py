"""Bytes <-> messages on the socket: msgpack arrays in length-prefixed frames (docs/protocol.md).

Decides what a well-formed frame is and how large it may be.  Knows no socket, and not what an operation
does (service.py).  The length prefix, rather than msgpack's own ends, is what bounds memory: nothing is
decoded before the whole frame is there, and a frame that would be too long is known by its first four
bytes.  "Not enough bytes yet" is an outcome here, not an error.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

import msgpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

VERSION = 1
DEFAULT_MAX_FRAME = 1 << 20
"""Bytes of a frame's body, both ways."""
MAX_DEPTH = 1024
"""msgpack's own bound on nesting; a valid frame nests arrays three deep."""

_LENGTH = Struct(">I")
_PREFIX = _LENGTH.size
_MAX_ELEMENTS = 1000
"""The longest array or map in a frame."""


class Op(IntEnum):
    """What a frame asks for."""

    CHECK = 1
    RESET = 2
    PING = 3
    INFO = 4
    CLOCK = 5


class Outcome(IntEnum):
    """How a frame was taken: answered; understood but refused; or fatal, and the connection closes."""

    ANSWERED = 0
    REFUSED = 1
    FATAL = 2


class BadFrame(Exception):
    """Bytes that can never become a valid frame.  `request_id` is the frame's own where it could be read, else 0."""

    def __init__(self, why: str, request_id: int = 0) -> None:
        super().__init__(why)
        self.why = why
        self.request_id = request_id


class Frames:
    """Cuts one connection's bytes into frame bodies."""

    __slots__ = ("_max", "_need", "_rest")

    def __init__(self, max_frame: int = DEFAULT_MAX_FRAME) -> None:
        self._max = max_frame
        self._rest = bytearray()
        self._need = 0

    @property
    def partial(self) -> bool:
        """Whether part of a frame has come and the rest has not."""
        return bool(self._rest)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that `data` completes, in order; raises BadFrame when it reaches an impossible length."""
        if self._rest:
            # Appended, and looked at only when enough has come: a frame sent byte by byte costs no more.
            self._rest += data
            if len(self._rest) < self._need:
                return
            data = bytes(self._rest)
            self._rest = bytearray()
        at = 0
        size = len(data)
        while size - at >= _PREFIX:
            start = at + _PREFIX
            (length,) = _LENGTH.unpack_from(data, at)
            if length > self._max:
                raise BadFrame(f"a frame of {length} bytes is longer than {self._max}")
            end = start + length
            if end > size:
                self._need = length + _PREFIX
                self._rest += data[at:]
                return
            yield data[start:end]
            at = end
        if at < size:
            self._need = _PREFIX
            self._rest += data[at:]


def frame(body: bytes) -> bytes:
    """The body with its length before it."""
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """One msgpack value; raises BadFrame.  Text that is not UTF-8 comes with lone surrogates in it, so that
    the fault is the request's own and not the whole frame's."""
    try:
        return msgpack.unpackb(
            body,
            use_list=False,
            unicode_errors="surrogateescape",
            max_array_len=_MAX_ELEMENTS,
            max_map_len=_MAX_ELEMENTS,
        )
    except msgpack.ExtraData:
        raise BadFrame("bytes are left after the frame's array") from None
    except Exception as error:  # msgpack's refusals share no base class: ValueError, TypeError, its own
        raise BadFrame(f"not a msgpack value within bounds: {str(error) or type(error).__name__}") from None


def open_request(body: bytes) -> tuple[int, int, Any, int | None]:
    """A request frame's (id, op, payload, budget in ms); raises BadFrame."""
    value = unpack(body)
    if type(value) is not tuple or not 4 <= len(value) <= 5:
        raise BadFrame("a frame is an array of 4 or 5 elements: version, id, op, payload, budget")
    request_id = value[1]
    if type(request_id) is not int or not 0 < request_id < 1 << 63:
        raise BadFrame("a request's id is an integer from 1 to 2^63 - 1")
    if value[0] != VERSION or type(value[0]) is not int:
        raise BadFrame(f"unknown protocol version {value[0]!r:.20}; this daemon speaks {VERSION}", request_id)
    op = value[2]
    if type(op) is not int:
        raise BadFrame("a frame's op is an integer", request_id)
    budget = value[4] if len(value) == 5 else None
    if budget is not None and (type(budget) is not int or not 0 < budget < 1 << 63):
        raise BadFrame("a frame's budget is a positive integer of ms, or nil", request_id)
    return request_id, op, value[3], budget


def pack_request(request_id: int, op: int, payload: object, budget: int | None = None) -> bytes:
    """A whole request frame, ready to send."""
    return frame(msgpack.packb((VERSION, request_id, op, payload, budget)))


def pack_answer(request_id: int, outcome: int, payload: object) -> bytes:
    """A whole answer frame, ready to send."""
    return frame(msgpack.packb((VERSION, request_id, outcome, payload), unicode_errors="surrogateescape"))


def open_answer(body: bytes) -> tuple[int, int, Any]:
    """An answer frame's (id, outcome, payload); raises BadFrame."""
    value = unpack(body)
    if type(value) is not tuple or len(value) < 4 or value[0] != VERSION:
        raise BadFrame(f"not an answer of protocol version {VERSION}")
    return value[1], value[2], value[3]
