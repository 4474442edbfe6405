"""What is asked and answered: one request about one bucket, and the decision on it.

The names and numbers are those of Gubernator's public API, so that both speak of the same things.  This
file decides which values a request may hold (`validate`); it does not know how a bucket counts (bucket.py)
nor how a message travels (wire.py).  An application imports it, so it stays clear of `typing` and
`dataclasses`, which would double the time that importing the client takes.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

from sidecar.errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeAlias

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
MAX_KEY_BYTES = 1024
"""The longest `name` and `unique_key`, in bytes of UTF-8."""
MAX_REQUESTS = 1000
"""The most requests in one frame; also Gubernator's bound for one call."""


class Algorithm(IntEnum):
    """How a bucket counts."""

    TOKEN_BUCKET = 0
    LEAKY_BUCKET = 1


class Behavior(IntFlag):
    """A bit set that changes how one request is treated; 0 is BATCHING, the default."""

    BATCHING = 0
    NO_BATCHING = 1
    GLOBAL = 2
    DURATION_IS_GREGORIAN = 4
    RESET_REMAINING = 8
    MULTI_REGION = 16
    DRAIN_OVER_LIMIT = 32


class Status(IntEnum):
    """ERROR is our own third value: a request that failed must never read as an admission."""

    UNDER_LIMIT = 0
    OVER_LIMIT = 1
    ERROR = 2


class Fallback(IntEnum):
    """What a request is answered when its owner gives no answer in time.

    DAEMONS: as the daemon is set.  ERROR: status ERROR.  LOCAL: decided by the node that was asked, with an equal
    share of the limit.  ALLOW, DENY: admitted, refused.  All but ERROR set `degraded`.
    """

    DAEMONS = 0
    ERROR = 1
    LOCAL = 2
    ALLOW = 3
    DENY = 4


MAX_FALLBACK = int(Fallback.DENY)
_ALL_BEHAVIORS = 63
_GREGORIAN = int(Behavior.DURATION_IS_GREGORIAN)
_INTERVALS = 6

Verdict: TypeAlias = tuple[int, int, int, int, int]
"""What a bucket answers: status, limit, remaining, reset_time (epoch ms), retry_after (ms)."""


class _Value:
    """Compared and printed by its fields; plain slots, since these are made once a request."""

    __slots__: tuple[str, ...] = ()
    _names: tuple[str, ...] = ()

    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self._names)

    def __eq__(self, other: object) -> bool:
        return self._fields() == other._fields() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._names)
        return f"{type(self).__name__}({inner})"


def _field(place: int) -> Any:
    return property(lambda request: request._wire[place])


class RateLimit(_Value):
    """One request about one bucket.

    name, unique_key: which limit, and who is limited; 1 to 1,024 bytes of UTF-8 each.
    hits: tokens asked for; 0 peeks, negative gives back.
    limit: tokens per window, >= 0.
    duration: the window in ms, >= 0; with DURATION_IS_GREGORIAN 0 minute, 1 hour, 2 day, 3 ISO week,
        4 month, 5 year.
    burst: a leaky bucket's capacity, >= 0; 0 means `limit`.
    created_at: epoch ms at which the caller saw the request, or None.
    fallback: what to answer if the key's owner, another node, gives no answer; by default as the daemon is set.

    Raises InvalidRequest for any value outside these.
    """

    __slots__ = ("_wire",)
    _names = (
        "name",
        "unique_key",
        "hits",
        "limit",
        "duration",
        "algorithm",
        "behavior",
        "burst",
        "created_at",
        "fallback",
    )
    name: str = _field(0)
    unique_key: str = _field(1)
    hits: int = _field(2)
    limit: int = _field(3)
    duration: int = _field(4)
    algorithm: int = _field(5)
    behavior: int = _field(6)
    burst: int = _field(7)
    created_at: int | None = _field(8)

    def __init__(
        self,
        name: str,
        unique_key: str,
        hits: int,
        limit: int,
        duration: int,
        algorithm: int = 0,
        behavior: int = 0,
        burst: int = 0,
        created_at: int | None = None,
        fallback: int = 0,
    ) -> None:
        # An enum's member becomes its number, which is what travels and is compared.
        algorithm = int(algorithm) if isinstance(algorithm, Algorithm) else algorithm
        behavior = int(behavior) if isinstance(behavior, Behavior) else behavior
        fallback = int(fallback) if isinstance(fallback, Fallback) else fallback
        plain = (name, unique_key, hits, limit, duration, algorithm, behavior, burst, created_at)
        validate(plain)
        why = int_fault("fallback", fallback, 0, MAX_FALLBACK)
        if why:
            raise InvalidRequest(why)
        self._wire: tuple[Any, ...] = (*plain, fallback) if fallback else plain

    @property
    def fallback(self) -> int:
        return self._wire[9] if len(self._wire) > 9 else 0

    def wire(self) -> tuple[Any, ...]:
        """The request as it stands in a frame (docs/protocol.md, "A request")."""
        return self._wire

    @classmethod
    def found_valid(cls, wire: tuple[Any, ...]) -> RateLimit:
        """The request that stands so in a frame; of values that were checked already."""
        request = cls.__new__(cls)
        request._wire = wire
        return request


class Decision(_Value):
    """The answer to one request.  True in a boolean context exactly when it was admitted.

    status: UNDER_LIMIT, OVER_LIMIT or ERROR.
    limit, remaining: the limit applied, and the whole tokens left (never negative).
    reset_time: epoch ms at which the window ends (token bucket) or the bucket is full again (leaky).
    retry_after: ms until the same request could be admitted, 0 if it was.
    owner: the node that decided, "" if none did.
    degraded: True when a fallback decided instead of the owner; then limit is the caller's own,
        remaining and reset_time are 0, since they are not known.
    error: what went wrong, "" if nothing did.
    """

    __slots__ = (
        "status",
        "limit",
        "remaining",
        "reset_time",
        "retry_after",
        "owner",
        "degraded",
        "error",
    )
    _names = __slots__

    def __init__(
        self,
        status: Status,
        limit: int = 0,
        remaining: int = 0,
        reset_time: int = 0,
        retry_after: int = 0,
        owner: str = "",
        degraded: bool = False,
        error: str = "",
    ) -> None:
        self.status = status
        self.limit = limit
        self.remaining = remaining
        self.reset_time = reset_time
        self.retry_after = retry_after
        self.owner = owner
        self.degraded = degraded
        self.error = error

    @property
    def allowed(self) -> bool:
        """Whether the caller may go on; False for an error, so that no failure reads as a yes."""
        return self.status == 0

    def __bool__(self) -> bool:
        return self.status == 0


def error_answer(why: str) -> tuple[int, int, int, int, int, None, bool, str]:
    """The answer, as it stands in a frame, to a request that was not decided."""
    return int(Status.ERROR), 0, 0, 0, 0, None, False, why


def validate(request: Sequence[object]) -> None:
    """Raise InvalidRequest unless these nine values, in the order of RateLimit's fields, are a valid request.

    The one rule for both ends: the client asks before it sends, the daemon before it opens a bucket.
    """
    name, unique_key, hits, limit, duration, algorithm, behavior, burst, created_at = request
    why = (
        text_fault("name", name)
        or text_fault("unique_key", unique_key)
        or int_fault("hits", hits, INT64_MIN)
        or int_fault("limit", limit)
        or int_fault("duration", duration)
        or int_fault("algorithm", algorithm)
        or int_fault("behavior", behavior)
        or int_fault("burst", burst)
        or (int_fault("created_at", created_at, INT64_MIN) if created_at is not None else "")
        or _choice_fault(duration, algorithm, behavior)
    )
    if why:
        raise InvalidRequest(why)


def text_fault(field: str, value: object) -> str:
    """Why `value` cannot be a name or a key, or ""."""
    if type(value) is not str:
        return f"field '{field}' must be a string, not {type(value).__name__}"
    if not value:
        return f"field '{field}' cannot be empty"
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return f"field '{field}' is not valid UTF-8"
    if size > MAX_KEY_BYTES:
        return f"field '{field}' has {size} bytes, more than {MAX_KEY_BYTES}"
    return ""


def int_fault(field: str, value: object, low: int = 0, high: int = INT64_MAX) -> str:
    """Why `value` is no integer in low..high, or "".  A bool is not an integer here."""
    if type(value) is not int:
        return f"field '{field}' must be an integer, not {type(value).__name__}"
    if not low <= value <= high:
        return f"field '{field}' must lie in {low}..{high}"
    return ""


def _choice_fault(duration: object, algorithm: object, behavior: object) -> str:
    assert isinstance(duration, int)
    assert isinstance(algorithm, int)
    assert isinstance(behavior, int)
    if algorithm > 1:
        return f"unknown algorithm {algorithm}; 0 is TOKEN_BUCKET, 1 LEAKY_BUCKET"
    if behavior > _ALL_BEHAVIORS:
        return f"unknown behavior {behavior}; known bits are 1, 2, 4, 8, 16 and 32"
    if behavior & _GREGORIAN and duration >= _INTERVALS:
        return f"duration {duration} is no Gregorian interval; 0 minute to 5 year"
    return ""


def count_fault(count: int) -> str:
    """Why one check may not hold this many requests, or ""."""
    if not count:
        return "a check needs at least one request"
    if count > MAX_REQUESTS:
        return f"a check holds {count} requests, more than {MAX_REQUESTS}"
    return ""
