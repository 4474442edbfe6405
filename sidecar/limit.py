"""A limit as an application names it: "100 per second", said once and used for every key.

Decides how a window may be written (`per="1s"`, a timedelta, ms, "calendar month").  Knows no connection
and no key.
"""

from __future__ import annotations

from sidecar.errors import InvalidRequest
from sidecar.messages import (
    INT64_MAX,
    INT64_MIN,
    MAX_KEY_BYTES,
    Algorithm,
    Behavior,
    Fallback,
    RateLimit,
    _Value,
    int_fault,
    text_fault,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_INTERVALS = ("minute", "hour", "day", "week", "month", "year")
_ALGORITHMS = {"token": Algorithm.TOKEN_BUCKET, "leaky": Algorithm.LEAKY_BUCKET}
_MOST_DIGITS = 20
"""More than int64 needs, and far from the length at which int() refuses in words of its own."""
_TEXT_HEADS = tuple(bytes((0xA0 | size,)) if size < 32 else bytes((0xD9, size)) for size in range(256))
"""What msgpack writes before a text of so many bytes."""
_HOW = 'a window is an int of ms, a timedelta, "<number><ms|s|m|h|d|w>" or "calendar <minute|hour|day|week|month|year>"'


class Limit(_Value):
    """A named limit.

    name: 1 to 1,024 bytes of UTF-8, such as "requests_per_sec".
    limit: tokens per window, >= 0.
    per: the window: int ms, a timedelta (whole ms), "250ms", "1s", "5m", "12h", "1d", "2w", or
        "calendar minute" to "calendar year", which follow the daemon's time zone.
    algorithm: "token" (default), "leaky" or an Algorithm.
    burst: a leaky bucket's capacity; 0 means `limit`.
    fallback: "error", "local", "allow", "deny": what to answer if the key's owner, another node, gives no answer in
        time; by default as the daemon is set.
    behavior: Behavior bits; DURATION_IS_GREGORIAN is set by a calendar window.

    Raises InvalidRequest (a ValueError) at once for anything else.
    """

    _names = ("name", "limit", "duration", "algorithm", "behavior", "burst", "fallback")
    __slots__ = (*_names, "_after", "_before", "_terms")

    def __init__(
        self,
        name: str,
        limit: int,
        per: str | int | timedelta,
        *,
        algorithm: str | int = Algorithm.TOKEN_BUCKET,
        burst: int = 0,
        behavior: int = 0,
        fallback: str | int = Fallback.DAEMONS,
    ) -> None:
        duration, calendar = parse_window(per)
        if isinstance(algorithm, str):
            if algorithm not in _ALGORITHMS:
                raise InvalidRequest(f'unknown algorithm {algorithm!r}; use "token" or "leaky"')
            algorithm = _ALGORITHMS[algorithm]
        if isinstance(fallback, str):
            if fallback.upper() not in Fallback.__members__ or fallback != fallback.lower():
                raise InvalidRequest(f'unknown fallback {fallback!r}; use "error", "local", "allow" or "deny"')
            fallback = Fallback[fallback.upper()]
        if calendar:
            why = int_fault("behavior", behavior if not isinstance(behavior, Behavior) else int(behavior))
            if why:
                raise InvalidRequest(why)
            behavior |= Behavior.DURATION_IS_GREGORIAN
        # RateLimit holds the one check of these values; any key will do for it.
        checked = RateLimit(name, "any", 0, limit, duration, algorithm, behavior, burst, None, fallback)
        self.name = name
        self.limit = limit
        self.duration = duration
        self.algorithm = checked.algorithm
        self.behavior = checked.behavior
        self.burst = burst
        self.fallback = checked.fallback
        self._terms = checked.wire()[3:]
        self._before, self._after = _around_the_key(name, self._terms)

    def request(self, unique_key: str, hits: int = 1) -> RateLimit:
        """A request of this limit for one key; raises InvalidRequest."""
        return RateLimit.found_valid(self.wire(unique_key, hits))

    def wire(self, unique_key: str, hits: int) -> tuple[Any, ...]:
        """The same as it stands in a frame: of a limit that was checked when it was made, only these two are new."""
        # Most are such; what else they may be is looked at below.
        plain = type(unique_key) is str and unique_key.isascii() and 0 < len(unique_key) <= MAX_KEY_BYTES
        if plain and type(hits) is int and INT64_MIN <= hits <= INT64_MAX:
            return (self.name, unique_key, hits, *self._terms)
        if isinstance(unique_key, str):
            unique_key = unique_key[:]  # of a subclass, such as a template's safe string, the plain text
        why = int_fault("hits", hits, INT64_MIN) or text_fault("unique_key", unique_key)
        if why:
            raise InvalidRequest(why)
        return (self.name, unique_key, hits, *self._terms)

    def packed_hit(self, unique_key: str) -> bytes | None:
        """`[request]` of one hit as msgpack has it, of which only the key is new; None if it is no usual key, which
        `wire` takes or refuses."""
        if type(unique_key) is str and unique_key.isascii() and 0 < (size := len(unique_key)) < len(_TEXT_HEADS):
            return self._before + _TEXT_HEADS[size] + unique_key.encode() + self._after
        return None


def _around_the_key(name: str, terms: tuple[Any, ...]) -> tuple[bytes, bytes]:
    """What stands before and behind the key in `[request]` of one hit."""
    from msgpack import packb  # only here, so that importing the client costs less

    whole = packb([(name, "", 1, *terms)])
    size = len(packb([()])) + len(packb(name))
    return whole[:size], whole[size + len(packb("")) :]


def parse_window(per: str | int | timedelta) -> tuple[int, bool]:
    """A window's (duration, whether it is the number of a calendar interval); raises InvalidRequest."""
    if isinstance(per, str):
        return _parse_text(per)
    if isinstance(per, int) and not isinstance(per, bool):
        return per, False
    from datetime import timedelta  # only here, since it would be a fifth of what importing the client costs

    if not isinstance(per, timedelta):
        raise InvalidRequest(f"{_HOW}, not {per!r}")
    whole, rest = divmod(per, timedelta(milliseconds=1))
    if rest:
        raise InvalidRequest(f"a window is whole milliseconds, not {per!r}")
    return whole, False


def _parse_text(per: str) -> tuple[int, bool]:
    text = per.strip()
    if text.startswith("calendar "):
        interval = text.removeprefix("calendar ").strip()
        if interval in _INTERVALS:
            return _INTERVALS.index(interval), True
    number = text.rstrip("mshdw")
    unit = text[len(number) :]
    number = number.strip()
    if unit in _UNITS and number.isascii() and number.isdigit() and len(number) < _MOST_DIGITS:
        return int(number) * _UNITS[unit], False
    raise InvalidRequest(f"{_HOW}, not {per!r}")
