"""A slow, exact model of what a decision means, written from docs/semantics.md and sharing no code with the product.

Levels are fractions of tokens, buckets lie in one dict, and nothing is ever forgotten.  Where the text leaves a choice,
the comment says which reading this is.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from math import ceil, floor

INT64_MAX = 2**63 - 1
UNDER, OVER = 0, 1
Answer = tuple[int, int, int, int, int]

_LENGTHS = {0: 60_000, 1: 3_600_000, 2: 86_400_000}
_WEEK = 604_800_000
_MONDAY = 4 * 86_400_000  # 1970-01-05


def interval(kind: int, now: int) -> tuple[int, int]:
    """The calendar interval [start, end) of `kind` around `now`, in UTC."""
    if kind in _LENGTHS:
        start = now - now % _LENGTHS[kind]
        return start, start + _LENGTHS[kind]
    if kind == 3:
        start = now - (now - _MONDAY) % _WEEK
        return start, start + _WEEK
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    day = epoch + timedelta(milliseconds=now)
    first = datetime(day.year, day.month if kind == 4 else 1, 1, tzinfo=UTC)
    later = first + timedelta(days=31 if kind == 4 else 366)
    last = datetime(later.year, later.month if kind == 4 else 1, 1, tzinfo=UTC)
    return round((first - epoch).total_seconds() * 1000), round((last - epoch).total_seconds() * 1000)


@dataclass(frozen=True)
class Ask:
    """One request's terms and hits."""

    hits: int
    limit: int
    duration: int
    leaky: bool
    gregorian: bool
    reset: bool
    drain: bool
    burst: int

    @property
    def capacity(self) -> int:
        """A limit of 0 refuses every hit, so nothing is left of it whatever `burst` says."""
        return (self.burst or self.limit) if self.leaky and self.limit else self.limit


@dataclass
class Token:
    """A window [start, end) and what was consumed in it."""

    start: int
    end: int
    consumed: int = 0
    refused: bool = False


@dataclass
class Leaky:
    """A level in tokens as it was at `at`, and the rate it leaks at from there: `limit` tokens in `length` ms."""

    at: int
    limit: int
    length: int
    capacity: int
    level: Fraction = Fraction(0)
    refused: bool = False


class Model:
    """Answers as the contract asks."""

    def __init__(self, max_clock_skew: int) -> None:
        self.skew = max_clock_skew
        self.buckets: dict[tuple[str, str], Token | Leaky] = {}

    def decide(
        self,
        now: int,
        name: str,
        unique_key: str,
        hits: int,
        limit: int,
        duration: int,
        algorithm: int,
        behavior: int,
        burst: int,
        created_at: int | None,
    ) -> Answer:
        """One valid request's answer: status, limit, remaining, reset_time, retry_after."""
        at = now if created_at is None else max(now - self.skew, min(now + self.skew, created_at))
        asked = Ask(
            hits, limit, duration, algorithm == 1, bool(behavior & 4), bool(behavior & 8), bool(behavior & 32), burst
        )
        key = name, unique_key
        bucket = None if asked.reset else self.buckets.get(key)
        if asked.leaky:
            leaky = bucket if isinstance(bucket, Leaky) else _leaky_opened(asked, at)
            self.buckets[key] = leaky
            answer = _leaky(leaky, asked, at)
        else:
            token = bucket if isinstance(bucket, Token) else _token_opened(asked, at)
            token = self.buckets[key] = _token_window(token, asked, at)
            answer = _token(token, asked, at)
        status, limit, remaining, reset_time, retry_after = answer
        return status, limit, min(remaining, INT64_MAX), min(reset_time, INT64_MAX), min(retry_after, INT64_MAX)


def _token_opened(asked: Ask, at: int) -> Token:
    return Token(*interval(asked.duration, at)) if asked.gregorian else Token(at, at + asked.duration)


def _token_window(bucket: Token, asked: Ask, at: int) -> Token:
    """The bucket in the window that `at` is judged in: its own, moved to the new duration, or a new one."""
    if at >= bucket.end:
        return _token_opened(asked, at)
    if asked.gregorian:
        bucket.start, bucket.end = interval(asked.duration, bucket.start)
    else:
        bucket.end = bucket.start + asked.duration
    # A window of 0 ms is over at once, for a request that comes late as well.
    if at >= bucket.end or bucket.start == bucket.end:
        return _token_opened(asked, at)
    return bucket


def _token(bucket: Token, asked: Ask, at: int) -> Answer:
    left = asked.limit - bucket.consumed
    if left > 0:
        bucket.refused = False
    status = UNDER
    if asked.reset:
        pass
    elif asked.hits == 0:
        status = OVER if bucket.refused else UNDER
    elif asked.hits < 0 or asked.hits <= left:
        bucket.consumed += asked.hits
    else:
        status = OVER
        if asked.drain:
            bucket.consumed = max(bucket.consumed, asked.limit)
        bucket.refused = asked.limit <= bucket.consumed
    left = asked.limit - bucket.consumed
    if left > 0:
        bucket.refused = False
    reset_time = bucket.end - 1 if asked.gregorian else bucket.end
    return status, asked.limit, max(0, left), reset_time, bucket.end - at if status else 0


def _length(asked: Ask, at: int) -> int:
    if not asked.gregorian:
        return asked.duration
    start, end = interval(asked.duration, at)
    return end - start


def _leaky_opened(asked: Ask, at: int) -> Leaky:
    return Leaky(at, asked.limit, _length(asked, at), asked.capacity)


def _leaky(bucket: Leaky, asked: Ask, at: int) -> Answer:
    # A request from before the bucket's own time is judged as of that time: no time has passed.
    now = max(at, bucket.at)
    _leak(bucket, now)
    length = _length(asked, now)
    if length == 0:
        # A window of 0 ms is over at once: this request is judged alone.
        bucket.level, bucket.refused = Fraction(0), False
    elif length != bucket.length:
        bucket.level = Fraction(ceil(bucket.level * length), length)
    bucket.limit, bucket.length, bucket.capacity = asked.limit, length, asked.capacity
    status, wanted = _leaky_status(bucket, asked)
    remaining = _left(bucket)
    if asked.limit == 0:
        reset_time = now + length
        retry_after = reset_time - at
    else:
        reset_time = now + ceil(Fraction((asked.capacity - remaining) * length, asked.limit))
        room_made = bucket.level - (asked.capacity - wanted if wanted <= asked.capacity else 0)
        retry_after = now - at + ceil(room_made * length / asked.limit)
    if length == 0:
        bucket.level, bucket.refused = Fraction(0), False
    return status, asked.limit, remaining, reset_time, retry_after if status else 0


def _leaky_status(bucket: Leaky, asked: Ask) -> tuple[int, int]:
    """Whether the hits are refused, and how many tokens the same request waits for; charges what is admitted."""
    if _left(bucket) > 0:
        bucket.refused = False
    status, wanted = UNDER, max(1, asked.hits)
    if asked.reset:
        pass
    elif asked.hits == 0:
        status = OVER if bucket.refused else UNDER
    elif asked.hits < 0:
        bucket.level = max(Fraction(0), bucket.level + asked.hits)
    elif bucket.level + asked.hits <= bucket.capacity:
        bucket.level += asked.hits
    else:
        status = OVER
        if asked.drain:
            bucket.level = max(bucket.level, Fraction(bucket.capacity))
        bucket.refused = True
    if _left(bucket) > 0:
        bucket.refused = False
    return status, wanted


def _left(bucket: Leaky) -> int:
    return max(0, floor(bucket.capacity - bucket.level))


def _leak(bucket: Leaky, now: int) -> None:
    """Let the time until `now` pass, at the rate that the request before stored."""
    passed = now - bucket.at
    bucket.at = now
    if bucket.length == 0:
        bucket.level = Fraction(0)
    else:
        bucket.level = max(Fraction(0), bucket.level - Fraction(passed * bucket.limit, bucket.length))
    # Tokens that came by leaking clear the memory of a refusal, though nobody asked meanwhile.  A limit of 0
    # never leaks; its memory is taken to end when the reset_time last told has come.
    if _left(bucket) > 0 or (bucket.limit == 0 and passed >= bucket.length):
        bucket.refused = False
