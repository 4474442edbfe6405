"""One limit's arithmetic: a bucket, a request's hits and terms, an instant -> a verdict.

Decides what is admitted and what is left, by docs/semantics.md, in integers only.  Knows no key, no
other bucket, no clock and no peer: time is an argument, and a refusal is a value.

Both kinds keep what was *consumed*, not what remains, so that a changed limit moves what is left by the
difference and raising it back gives the first answer again.

A bucket travels as a `State`, plain values that msgpack carries; `make` is the way back.  What another
node admitted is charged without being judged (`charge`), by docs/semantics.md, "GLOBAL".
"""

from __future__ import annotations

from typing import Self, TypeAlias

from sidecar.calendar import LAST_INSTANT, Calendar
from sidecar.errors import InvalidRequest
from sidecar.messages import INT64_MAX, INT64_MIN, Algorithm, Behavior, Status, Verdict, int_fault, validate

UNDER = int(Status.UNDER_LIMIT)
OVER = int(Status.OVER_LIMIT)

State: TypeAlias = tuple[int | bytes, ...]
"""A bucket in plain values, all that its later answers depend on.

Token: 0, limit, duration, behavior, burst, refused, end, used.  Leaky: 1, limit, duration, behavior, burst,
refused, at, level, unit.  `behavior` is DURATION_IS_GREGORIAN or 0, `refused` a bool.  `used` and `level` may
leave int64; then they are bytes, signed and big-endian.
"""

UINT64_MAX = 2**64 - 1
_GREGORIAN = int(Behavior.DURATION_IS_GREGORIAN)
_EARLIEST = -10_000_000_000_000
_LATEST = LAST_INSTANT + 100_000_000_000
"""Epoch ms that every calendar can express, some years after the last instant a clock may show."""
_LONGEST = 400 * 86_400_000
"""More ms than any Gregorian interval lasts."""
_MAX_WIDE = 32
"""Bytes of the widest number in a state: more charges than could ever be made stay below it."""
_STATE_SIZES = (8, 9)


class Terms:
    """What a request says of its limit, all but the hits; shared by the buckets that live by it."""

    __slots__ = ("algorithm", "calendar", "capacity", "drain", "duration", "fresh", "gregorian", "limit", "reset")

    def __init__(
        self, limit: int, duration: int, algorithm: int, behavior: int, burst: int, calendar: Calendar
    ) -> None:
        self.limit = limit
        self.duration = duration
        self.algorithm = algorithm
        # `limit` 0 refuses every positive hit, whatever burst says: a bucket that never leaks holds none.
        self.capacity = (burst or limit) if limit and algorithm == Algorithm.LEAKY_BUCKET else limit
        self.gregorian = bool(behavior & Behavior.DURATION_IS_GREGORIAN)
        self.reset = bool(behavior & Behavior.RESET_REMAINING)
        self.drain = bool(behavior & Behavior.DRAIN_OVER_LIMIT)
        # A window of 0 ms is over at once, also for a request from before it: each is judged by itself.
        self.fresh = self.reset or not (duration or self.gregorian)
        self.calendar = calendar

    def window_end(self, now: int) -> int:
        """The end (exclusive, epoch ms) of a window that holds or opens at `now`."""
        return self.calendar.interval(self.duration, now).end if self.gregorian else now + self.duration

    def length(self, now: int) -> int:
        """How many ms the window at `now` lasts: a Gregorian one follows the calendar."""
        if not self.gregorian:
            return self.duration
        start, end = self.calendar.interval(self.duration, now)
        return end - start

    def window_start(self, end: int) -> int:
        """The start (epoch ms) of the window that ends at `end`."""
        return self.calendar.interval(self.duration, end - 1).start if self.gregorian else end - self.duration

    def stated(self) -> tuple[int, int, int, int, int]:
        """limit, duration, algorithm, behavior and burst as a request says them: what outlives one request."""
        behavior = _GREGORIAN if self.gregorian else 0
        return self.limit, self.duration, self.algorithm, behavior, self.capacity if self.capacity != self.limit else 0


class TokenBucket:
    """A counter over a window.

    used: hits consumed in the window; negative where refunds gave credit.
    end: the window's end, exclusive, epoch ms.
    refused: a hit was refused while nothing was left, and nothing has been left since.
    """

    __slots__ = ("end", "refused", "terms", "used")
    algorithm = int(Algorithm.TOKEN_BUCKET)

    def __init__(self, terms: Terms, now: int) -> None:
        self._open(terms, now)

    def _open(self, terms: Terms, now: int) -> None:
        self.terms = terms
        self.used = 0
        self.end = terms.window_end(now)
        self.refused = False

    def hit(self, hits: int, terms: Terms, now: int) -> Verdict:
        """Judge `hits` (0 peeks, negative gives back) under `terms` at `now` (epoch ms)."""
        if now >= self.end or terms.fresh:
            self._open(terms, now)
        elif terms is not self.terms:
            self._adopt(terms, now)
        end = self.end
        limit = terms.limit
        left = limit - self.used
        if left > 0:
            self.refused = False
        status = OVER if self.refused else UNDER
        if hits and not terms.reset:
            if hits <= left or hits < 0:
                self.used += hits
                left -= hits
                status = UNDER
                if left > 0:
                    self.refused = False
            else:
                status = OVER
                if left > 0 and terms.drain:
                    self.used = limit
                    left = 0
                self.refused = left <= 0
        if left < 0:
            left = 0
        elif left > INT64_MAX:
            left = INT64_MAX
        retry = min(end - now, INT64_MAX) if status else 0
        reset = end - 1 if terms.gregorian else end
        if reset > INT64_MAX:
            reset = INT64_MAX
        return status, limit, left, reset, retry

    def _adopt(self, terms: Terms, now: int) -> None:
        """Live on under new terms; a new duration moves the end, counted from the same start."""
        end = self.end_under(terms)
        if now >= end:
            self._open(terms, now)
            return
        self.end = end
        self.terms = terms

    def end_under(self, terms: Terms) -> int:
        """The end that this window has under `terms`: the start stays, a new duration moves the end."""
        old = self.terms
        if terms.duration == old.duration and terms.gregorian == old.gregorian:
            return self.end
        return terms.window_end(old.window_start(self.end))

    def ended(self, now: int) -> bool:
        """Whether forgetting this bucket can change no answer to a request of `now` or later."""
        return self.end <= now

    def spare(self) -> bool:
        """Whether there is a token left."""
        return self.used < self.terms.limit

    def over(self, at: int, grace: int) -> bool:
        """Whether a charge at `at`, its window's end, comes too late to count: that window was over before this began.

        grace: of no use here, since all nodes know a window by the same end, whatever their clocks say.
        """
        return at <= self.terms.window_start(self.end)

    def charge(self, hits: int, terms: Terms, at: int, refused: bool) -> None:
        """Take over what another node admitted, also beyond the limit.

        at: the end of the window it was admitted in; a window later than this one takes its place.
        refused: the node refused; nothing is charged but what DRAIN_OVER_LIMIT takes.
        """
        start = terms.window_start(at)
        end = self.end if terms is self.terms else self.end_under(terms)
        # A window of 0 ms ends where it starts, and is not later than itself.
        if terms.fresh or (start >= min(self.end, end) and start > self.terms.window_start(self.end)):
            self._open(terms, start)
        else:
            self.end = end
            self.terms = terms
        if self.used < terms.limit:
            self.refused = False
        if refused:
            if terms.drain:
                self.used = max(self.used, terms.limit)
            self.refused = self.used >= terms.limit
        elif not terms.reset:
            self.used += hits
            if self.used < terms.limit:
                self.refused = False

    def export(self) -> State:
        """This bucket in plain values."""
        limit, duration, algorithm, behavior, burst = self.terms.stated()
        return algorithm, limit, duration, behavior, burst, self.refused, self.end, _carried(self.used)

    @classmethod
    def restored(cls, terms: Terms, refused: bool, end: int, used: int) -> Self:
        """The bucket that was exported; its numbers are those that `opened` checked."""
        bucket = cls.__new__(cls)
        bucket.terms = terms
        bucket.refused = refused
        bucket.end = end
        bucket.used = used
        return bucket


class LeakyBucket:
    """A level that leaks `limit` tokens a window, continuously, and holds at most `capacity` tokens.

    level: what was consumed and has not leaked, in units: a token is worth `unit` of them and `limit`
        units leak each ms, so that no fraction of a token is ever rounded.
    unit: the window's length in ms when the bucket was last asked.
    at: epoch ms at which `level` was true.
    refused: as in TokenBucket.
    """

    __slots__ = ("at", "level", "refused", "terms", "unit")
    algorithm = int(Algorithm.LEAKY_BUCKET)

    def __init__(self, terms: Terms, now: int) -> None:
        self._fill(terms, now)

    def _fill(self, terms: Terms, now: int) -> None:
        self.terms = terms
        self.level = 0
        self.at = now
        self.unit = terms.length(now)
        self.refused = False

    def hit(self, hits: int, terms: Terms, now: int) -> Verdict:
        """Judge `hits` (0 peeks, negative gives back) under `terms` at `now` (epoch ms).

        A request from before `at` (a caller's clock that lags) is judged as of `at`: what has leaked
        by then has been given already and is not given twice.
        """
        if terms.reset:
            self._fill(terms, now)
        else:
            self._leak(now)
            if terms is not self.terms or terms.gregorian:
                self._adopt(terms)
        unit = self.unit
        capacity = terms.capacity
        room = capacity * unit - self.level
        status = UNDER
        wanted = 0
        if room < unit or not capacity:
            status = OVER if self.refused else UNDER
            wanted = 1
        else:
            self.refused = False
        if hits and not terms.reset:
            if hits < 0:
                status = UNDER
                self.level = max(0, self.level + hits * unit)
                room = capacity * unit - self.level
                if room >= unit and capacity:
                    self.refused = False
            elif hits <= capacity and hits * unit <= room:
                status = UNDER
                self.level += hits * unit
                room -= hits * unit
            else:
                status = OVER
                wanted = hits
                if terms.drain and room > 0:
                    self.level += room
                    room = 0
                self.refused = room < unit or not capacity
        if unit:
            left = max(0, room // unit)
        else:
            # A window of 0 ms is over at once: this request alone counts, and nothing is remembered of it.
            left = 0 if status and terms.drain else capacity
            if 0 < hits <= capacity and not terms.reset:
                left -= hits
            self.refused = False
        return self._verdict(status, left, wanted, now)

    def _leak(self, now: int) -> None:
        """Let through what has leaked since `at`, at the rate of the request before this one."""
        passed = now - self.at
        if passed < 0:
            return
        rate = self.terms.limit
        if not rate and passed >= self.unit:
            # A bucket that never leaks would remember its refusal for ever: its reset_time ends it.
            self.refused = False
        self.level = max(0, self.level - passed * rate)
        self.at = now
        if self.refused and rate and self.terms.capacity * self.unit - self.level >= self.unit:
            self.refused = False

    def _adopt(self, terms: Terms) -> None:
        """Live on under new terms: the level in tokens stays, rounded up to a unit."""
        unit = terms.length(self.at)
        if unit != self.unit:
            self.level = -(-self.level * unit // self.unit) if self.unit else 0
            self.unit = unit
            if not unit:
                self.refused = False
        self.terms = terms

    def _verdict(self, status: int, left: int, wanted: int, now: int) -> Verdict:
        terms, level, unit, limit = self.terms, self.level, self.unit, self.terms.limit
        if not limit:
            reset = self.at + unit
            retry = reset - now if status else 0
        else:
            reset = self.at - (-(terms.capacity - left) * unit // limit)
            retry = 0
            if status:
                # Of what can never be admitted: the time to a full bucket.
                excess = level - (terms.capacity - wanted) * unit if wanted <= terms.capacity else level
                retry = self.at - now - (-excess // limit)
        return status, limit, left, min(reset, INT64_MAX), min(retry, INT64_MAX)

    def ended(self, now: int) -> bool:
        """Whether forgetting this bucket can change no answer to a request of `now` or later."""
        limit = self.terms.limit
        if limit:
            return self.at - (-self.level // limit) <= now
        return not self.level and self.at + (self.unit if self.refused else 0) <= now

    def spare(self) -> bool:
        """Whether there is a whole token left."""
        capacity, unit = self.terms.capacity, self.unit
        return bool(capacity) and capacity * unit - self.level >= unit

    def over(self, at: int, grace: int) -> bool:
        """Whether a charge at `at` comes too late to count: what was taken then has leaked since.

        That is so after a window, or after the time in which a full bucket leaks if that is longer, and `grace` ms
        (what nodes' clocks may differ by).  What comes sooner is charged in full, as of the bucket's own time.
        """
        late = self.at - grace - at
        if late <= 0:
            return False
        terms = self.terms
        drained = -(-terms.capacity * self.unit // terms.limit) if terms.limit else 0
        return late >= max(self.unit, drained)

    def charge(self, hits: int, terms: Terms, at: int, refused: bool) -> None:
        """Take over what another node admitted at `at` (epoch ms), also beyond the capacity.

        refused: the node refused; nothing is charged but what DRAIN_OVER_LIMIT takes.
        """
        if terms.reset:
            self._fill(terms, at)
            return
        self._leak(at)
        if terms is not self.terms or terms.gregorian:
            self._adopt(terms)
        if self.spare():
            self.refused = False
        full = terms.capacity * self.unit
        if refused:
            if terms.drain:
                self.level = max(self.level, full)
            self.refused = not self.spare()
        else:
            self.level = max(0, self.level + hits * self.unit)
        if self.spare() or not self.unit:
            self.refused = False

    def export(self) -> State:
        """This bucket in plain values."""
        limit, duration, algorithm, behavior, burst = self.terms.stated()
        return algorithm, limit, duration, behavior, burst, self.refused, self.at, _carried(self.level), self.unit

    @classmethod
    def restored(cls, terms: Terms, refused: bool, at: int, level: int, unit: int) -> Self:
        """The bucket that was exported; its numbers are those that `opened` checked."""
        bucket = cls.__new__(cls)
        bucket.terms = terms
        bucket.refused = refused
        bucket.at = at
        bucket.level = level
        bucket.unit = unit
        return bucket


Bucket: TypeAlias = TokenBucket | LeakyBucket


def make(state: object, calendar: Calendar) -> Bucket:
    """The bucket of an exported state, which answers from then on as the one it came from does.

    Raises InvalidRequest for what no bucket exports.
    """
    stated, refused, numbers = opened(state)
    terms = Terms(*stated, calendar)
    kind = LeakyBucket if terms.algorithm == Algorithm.LEAKY_BUCKET else TokenBucket
    return kind.restored(terms, refused, *numbers)


def opened(state: object) -> tuple[tuple[int, int, int, int, int], bool, tuple[int, ...]]:
    """A state taken apart: its terms as `Terms.stated`, `refused`, and the numbers `restored` asks for.

    Raises InvalidRequest for what no bucket exports.
    """
    if not isinstance(state, tuple | list) or len(state) not in _STATE_SIZES:
        raise InvalidRequest("a bucket's state is an array of 8 or 9 values")
    algorithm, limit, duration, behavior, burst, refused, instant, amount, *more = state
    validate(("-", "-", 0, limit, duration, algorithm, behavior, burst, None))
    if len(state) != _STATE_SIZES[algorithm]:
        raise InvalidRequest(f"a state of algorithm {algorithm} has {_STATE_SIZES[algorithm]} values")
    if type(refused) is not bool:
        raise InvalidRequest(f"a state's 'refused' must be a boolean, not {type(refused).__name__}")
    if behavior not in (0, _GREGORIAN):
        raise InvalidRequest(f"a state's behavior is 0 or {_GREGORIAN}")
    check_instant(algorithm, duration, behavior, instant)
    amount = _uncarried(amount)
    if not more:
        return (limit, duration, algorithm, behavior, burst), refused, (instant, amount)
    (unit,) = more
    why = int_fault("unit", unit, 1, _LONGEST) if behavior else int_fault("unit", unit, duration, duration)
    if why or amount < 0 or (amount and not unit):
        raise InvalidRequest(why or f"a level of {amount} in units of {unit} is none")
    return (limit, duration, algorithm, behavior, burst), refused, (instant, amount, unit)


def check_instant(algorithm: int, duration: int, behavior: int, at: object) -> None:
    """Raise InvalidRequest unless `at` is an instant that calendars know: a window's end, or a leaky bucket's time."""
    why = int_fault("at", at, INT64_MIN, UINT64_MAX)
    if why:
        raise InvalidRequest(why)
    assert isinstance(at, int)
    windowed = algorithm == Algorithm.TOKEN_BUCKET and not behavior & _GREGORIAN
    why = int_fault("at", at - duration if windowed else at, _EARLIEST, _LATEST)
    if why:
        raise InvalidRequest(f"{why}, less the duration" if windowed else why)


def _carried(number: int) -> int | bytes:
    """As msgpack can carry it."""
    if INT64_MIN <= number <= INT64_MAX:
        return number
    return number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)


def _uncarried(number: object) -> int:
    if type(number) is bytes and 0 < len(number) <= _MAX_WIDE:
        return int.from_bytes(number, "big", signed=True)
    why = int_fault("amount", number, INT64_MIN)
    if why:
        raise InvalidRequest(why)
    assert isinstance(number, int)
    return number
