"""Bytes <-> messages on the socket: msgpack arrays in length-prefixed frames (docs/protocol.md).

Decides what a well-formed frame is and how large it may be.  Knows no socket, and not what an operation
does (service.py).  The length prefix, rather than msgpack's own ends, is what bounds memory: nothing is
decoded before the whole frame is there, and a frame that would be too long is known by its first four
bytes.  "Not enough bytes yet" is an outcome here, not an error.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from struct import error as StructError

import msgpack
from msgpack import unpackb

from sidecar.errors import InvalidRequest
from sidecar.messages import INT64_MAX, MAX_FALLBACK, Verdict, int_fault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

VERSION = 1
VERSIONS = (VERSION,)
"""What this release speaks to peers, newest first.  A release that brings a new version also keeps the one before and
answers each peer in the version that it asks in, so that a cluster can be renewed node by node."""
DEFAULT_MAX_FRAME = 1 << 20
"""Bytes of a frame's body, both ways."""

_LENGTH = Struct(">I")
_PREFIX = _LENGTH.size
_prefix = _LENGTH.pack
_length_of = _LENGTH.unpack_from
_ASKED = Struct(">I3sIB")
_asked = _ASKED.pack
_REQUEST_HEAD = bytes((0x95, VERSION, 0xCE))  # array of 5, the version, an id of 4 bytes
_DECIDED = Struct(">I3sQ3sBBQBQBQBQ")
_decided = _DECIDED.pack
_ANSWER_HEAD = b"\x95\x01\xcf"  # array of 5, version 1, an id of 8 bytes
_ONE_DECISION = b"\x00\x91\x95"  # answered, array of 1, array of 5
_ONE_OF_ANOTHER = b"\x00\x91\x96"  # the same, array of 6: with its owner
_MOST_OWNERS = 10_000
"""Names of owners that are kept packed; more than any cluster has."""
_WIDE = 0xCF  # an integer of 8 bytes
_SHORT_ID, _MIDDLE_ID = Struct(">H").unpack_from, Struct(">I").unpack_from
_ID_AT = _PREFIX + 2  # behind the length, the array's head and the version
_REQUIRED = 5
_DEFAULTS = (0, 0, 0, None, 0)
_REQUEST = _REQUIRED + len(_DEFAULTS)
_USUAL_SIZE = 256
"""Bytes up to which a frame is usual."""
_MAX_ELEMENTS = 4096
"""The longest array or map in a frame: more than a check may hold, so that one too long is still answered by its id."""


DoesNotFit = StructError
"""What `Packer.decided` raises of values that are no decision."""


class Op(IntEnum):
    """What a frame asks for; REPORT and ASK only between peers."""

    CHECK = 1
    RESET = 2
    PING = 3
    INFO = 4
    CLOCK = 5
    PEERS = 6
    REPORT = 7
    ASK = 8
    TOP = 9


class Outcome(IntEnum):
    """How a frame was taken: answered; understood but refused; or fatal, and the connection closes."""

    ANSWERED = 0
    REFUSED = 1
    FATAL = 2


_OUTCOMES = frozenset(Outcome)
# What msgpack refuses with; nothing wider, since a signal handler's exception may come out of it too.
_REFUSALS = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)


class BadFrame(ValueError):
    """Bytes that can never become a valid frame.  `request_id` is the frame's own where it could be read, else 0."""

    def __init__(self, why: str, request_id: int = 0) -> None:
        super().__init__(why)
        self.why = why
        self.request_id = request_id


class Frames:
    """Cuts one connection's bytes into frame bodies.

    partial: whether part of a frame has come and the rest has not.
    """

    __slots__ = ("_max", "_need", "_rest", "partial")

    def __init__(self, max_frame: int = DEFAULT_MAX_FRAME) -> None:
        self._max = max_frame
        self._rest = bytearray()
        self._need = 0
        self.partial = False

    def feed(self, data: bytes) -> Iterable[bytes]:
        """The bodies that `data` completes, in order; iterating raises BadFrame at an impossible length."""
        if not self.partial and 0 <= (size := len(data) - _PREFIX) <= self._max and _length_of(data)[0] == size:
            return (data[_PREFIX:],)  # most reads are one whole frame
        return self._cut(data)

    def _cut(self, data: bytes) -> Iterator[bytes]:
        if self.partial:
            # Appended, and looked at only when enough has come: a frame sent byte by byte costs no more.
            self._rest += data
            if len(self._rest) < self._need:
                return
            data = bytes(self._rest)
            self._rest = bytearray()
            self.partial = False
        at = 0
        size = len(data)
        while size - at >= _PREFIX:
            start = at + _PREFIX
            (length,) = _length_of(data, at)
            if length > self._max:
                raise BadFrame(f"a frame of {length} bytes is longer than {self._max}")
            end = start + length
            if end > size:
                self._keep(data[at:], length + _PREFIX)
                return
            yield data[start:end]
            at = end
        if at < size:
            self._keep(data[at:], _PREFIX)

    def _keep(self, rest: bytes, need: int) -> None:
        self._rest += rest
        self._need = need
        self.partial = True


def frame(body: bytes) -> bytes:
    """The body with its length before it."""
    return _prefix(len(body)) + body


class Packer:
    """Messages -> whole frames, ready to send.  Belongs to one thread: it keeps one buffer for all.

    node: the name that goes with every answer; a client needs none.
    version: written into every message; a peer of the release before is spoken to in its own.
    """

    __slots__ = ("_ends", "_mine", "_node", "_pack", "_version")

    def __init__(self, node: str = "", version: int = VERSION) -> None:
        self._node = node
        self._version = version
        # What came as odd bytes in a name goes back as the same bytes in an error's text.
        self._pack = msgpack.Packer(unicode_errors="surrogateescape").pack
        end = self._pack(node)
        self._mine = (_DECIDED.size - _PREFIX + len(end), _ONE_DECISION, end)
        self._ends: dict[str, tuple[int, bytes, bytes]] = {}

    def request(
        self, request_id: int, op: int, payload: object, budget: int | None = None, context: str | None = None
    ) -> bytes:
        """A request frame; budget in ms; context: a W3C traceparent."""
        body = self.request_body(request_id, op, payload, budget, context)
        return _prefix(len(body)) + body

    def request_body(
        self, request_id: int, op: int, payload: object, budget: int | None = None, context: str | None = None
    ) -> bytes:
        """The same without its length: between peers, gRPC tells it."""
        # Without a context a frame is as it was before there were any, so that every release reads it.
        whole: tuple[object, ...] = (self._version, request_id, op, payload, budget)
        body: bytes = self._pack(whole if context is None else (*whole, context))
        return body

    @staticmethod
    def packed_request(request_id: int, op: int, payload: bytes, budget: bytes) -> bytes:
        """The same of a payload and a budget that are msgpack already, in this release's version; an id below 2^32."""
        size = _ASKED.size - _PREFIX + len(payload) + len(budget)
        return _asked(size, _REQUEST_HEAD, request_id, op) + payload + budget

    def decided(self, request_id: int, verdict: Verdict, owner: str | None = None) -> bytes:
        """The answer frame to a check of one request: each integer at its widest, which needs no search for the
        shortest form of each and takes half as long as `answer`.

        owner: the other node whose decision it is.  Raises DoesNotFit for one that is not five integers from 0, each of
        a size that fits, as what comes from another node may be; `answer` takes it.
        """
        size, head, end = self._mine if owner is None else self._ends.get(owner) or self._end_of(owner)
        status, limit, remaining, reset_time, retry_after = verdict
        return (
            _decided(
                size,
                _ANSWER_HEAD,
                request_id,
                head,
                status,
                _WIDE,
                limit,
                _WIDE,
                remaining,
                _WIDE,
                reset_time,
                _WIDE,
                retry_after,
            )
            + end
        )

    def _end_of(self, owner: str) -> tuple[int, bytes, bytes]:
        if len(self._ends) >= _MOST_OWNERS:
            self._ends.clear()
        end = self._pack(owner) + self._pack(self._node)
        found = self._ends[owner] = (_DECIDED.size - _PREFIX + len(end), _ONE_OF_ANOTHER, end)
        return found

    def answer(self, request_id: int, outcome: int, payload: object) -> bytes:
        """An answer frame."""
        return frame(self.answer_body(request_id, outcome, payload))

    def answer_body(self, request_id: int, outcome: int, payload: object) -> bytes:
        """The same without its length."""
        body: bytes = self._pack((self._version, request_id, outcome, payload, self._node))
        return body


def unpack(body: bytes) -> Any:
    """One msgpack value; raises BadFrame.  Text that is not UTF-8 comes with lone surrogates in it, so that
    the fault is the request's own and not the whole frame's."""
    try:
        return unpackb(
            body,
            use_list=False,
            unicode_errors="surrogateescape",
            max_array_len=_MAX_ELEMENTS,
            max_map_len=_MAX_ELEMENTS,
            strict_map_key=False,
        )
    except msgpack.ExtraData:
        raise BadFrame("bytes are left after the frame's array") from None
    except _REFUSALS as error:
        raise BadFrame(f"not a msgpack value within bounds: {str(error) or type(error).__name__}") from None


def open_request(body: bytes) -> tuple[int, int, Any, int | None, str | None]:
    """A request frame's (id, op, payload, budget in ms, context as it came); raises BadFrame."""
    value = context = None
    try:
        value = unpackb(
            body, use_list=False, unicode_errors="surrogateescape", max_array_len=_MAX_ELEMENTS, max_map_len=0
        )
        version, request_id, op, payload, budget = value
    except _REFUSALS:
        version, request_id, op, payload, budget, context = _six(unpack(body) if value is None else value)
    if type(version) is type(request_id) is type(op) is int and version == VERSION and 0 < request_id <= INT64_MAX:
        if budget is None or (type(budget) is int and 0 < budget <= INT64_MAX):
            if context is None or type(context) is str:
                return request_id, op, payload, budget, context
            raise BadFrame("a frame's context is a W3C traceparent as text, or nil", request_id)
        raise BadFrame("a frame's budget is a positive integer of ms, or nil", request_id)
    if type(request_id) is not int or not 0 < request_id <= INT64_MAX:
        raise BadFrame("a request's id is an integer from 1 to 2^63 - 1")
    if type(version) is not int or version != VERSION:
        said = "of odd type" if isinstance(version, tuple | dict) else repr(version)[:20]
        raise BadFrame(f"unknown protocol version {said}; this daemon speaks {VERSION}", request_id)
    raise BadFrame("a frame's op is an integer", request_id)


def split_id(data: bytes) -> tuple[int, bytes]:
    """Of bytes that may be one whole request frame: its id, and the frame without it; (0, b"") if it is no usual one.

    The frame without its id still has its length, so equal remains are equal frames but for the id.
    """
    if not _ID_AT + 5 <= len(data) <= _USUAL_SIZE:
        return 0, b""
    form = data[_ID_AT]
    if form == 0xCE:
        return _MIDDLE_ID(data, _ID_AT + 1)[0], data[:_ID_AT] + data[_ID_AT + 5 :]
    if form == 0xCD:
        return _SHORT_ID(data, _ID_AT + 1)[0], data[:_ID_AT] + data[_ID_AT + 3 :]
    if form < 0x80:
        return form, data[:_ID_AT] + data[_ID_AT + 1 :]
    return 0, b""


def _six(value: Any) -> tuple[Any, ...]:
    """The elements of a request frame that was not simply five of them."""
    if type(value) is not tuple or not 4 <= len(value) <= 6:
        known = type(value) is tuple and len(value) > 1 and type(value[1]) is int and 0 < value[1] <= INT64_MAX
        raise BadFrame(
            "a frame is an array of 4 to 6 elements: version, id, op, payload, budget, context",
            value[1] if known else 0,
        )
    return (*value, None, None)[:6]


def open_answer(body: bytes) -> tuple[int, int, Any, str]:
    """An answer frame's (id, outcome, payload, node); raises BadFrame."""
    try:
        version, request_id, outcome, payload, node = unpackb(
            body,
            use_list=False,
            unicode_errors="surrogateescape",
            max_array_len=_MAX_ELEMENTS,
            max_map_len=_MAX_ELEMENTS,
            strict_map_key=False,
        )
        if version == VERSION and type(request_id) is int and outcome in _OUTCOMES and type(node) is str:
            return request_id, outcome, payload, node
    except _REFUSALS:
        unpack(body)  # which says why, if it is no value at all
    raise BadFrame(f"not an answer of protocol version {VERSION}")


def filled(request: Any) -> tuple[tuple[Any, ...], int]:
    """A request's nine values with its defaults written out, and its fallback (0: the daemon's).

    Raises InvalidRequest if it is no array of 5 to 10 elements, or its fallback is none.
    """
    if type(request) is not tuple or not _REQUIRED <= len(request) <= _REQUEST:
        raise InvalidRequest(f"a request is an array of {_REQUIRED} to {_REQUEST} elements")
    whole = request + _DEFAULTS[len(request) - _REQUIRED :]
    fallback = whole[-1]
    why = int_fault("fallback", fallback, 0, MAX_FALLBACK)
    if why:
        raise InvalidRequest(why)
    return whole[:-1], fallback
