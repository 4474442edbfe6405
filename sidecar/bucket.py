"""One limit's arithmetic: a bucket, a request's hits and terms, an instant -> a verdict.

Decides what is admitted and what is left, by docs/semantics.md, in integers only.  Knows no key, no
other bucket, no clock and no peer: time is an argument, and a refusal is a value.

Both kinds keep what was *consumed*, not what remains, so that a changed limit moves what is left by the
difference and raising it back gives the first answer again.
"""

from __future__ import annotations

from sidecar.calendar import Calendar
from sidecar.messages import INT64_MAX, Algorithm, Behavior, Status, Verdict

UNDER = int(Status.UNDER_LIMIT)
OVER = int(Status.OVER_LIMIT)


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
        old = self.terms
        if terms.duration != old.duration or terms.gregorian != old.gregorian:
            start = (
                old.calendar.interval(old.duration, self.end - 1).start if old.gregorian else self.end - old.duration
            )
            end = terms.window_end(start)
            if now >= end:
                self._open(terms, now)
                return
            self.end = end
        self.terms = terms

    def ended(self, now: int) -> bool:
        """Whether forgetting this bucket can change no answer to a request of `now` or later."""
        return self.end <= now


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
