"""Gregorian windows: which minute, hour, day, ISO week, month or year an instant lies in.

Decides where an interval starts and ends in one time zone, daylight-saving changes included (a day may
last 23 or 25 hours).  Knows no bucket and reads no clock.  An hour that a clock change repeats is two intervals, and
one that it cuts short ends there; a day begins when its midnight first strikes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import NamedTuple

MINUTE, HOUR, DAY, WEEK, MONTH, YEAR = range(6)
"""The numbers that a request's `duration` holds under DURATION_IS_GREGORIAN."""

LAST_INSTANT = 253_000_000_000_000
"""Epoch ms in the year 9987: past it, an interval's end may leave what datetime can express."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_FIXED = {MINUTE: 60_000, HOUR: 3_600_000}


class Interval(NamedTuple):
    """Epoch ms [start, end); `end` is the next interval's first millisecond."""

    start: int
    end: int


_NEVER = Interval(0, 0)


class Calendar:
    """The intervals of one time zone; remembers the last one of each kind, since most hits lie in it.

    The memory also lets all buckets of an interval share two int objects.
    """

    def __init__(self, zone: tzinfo = UTC) -> None:
        self._zone = zone
        self._last = [_NEVER] * 6

    def interval(self, kind: int, now: int) -> Interval:
        """The interval of `kind` (0 to 5) that holds `now` (epoch ms, 0 to LAST_INSTANT)."""
        last = self._last[kind]
        if last.start <= now < last.end:
            return last
        found = self._clocked(kind, now) if kind in _FIXED else self._dated(kind, now)
        self._last[kind] = found
        return found

    def _local(self, now: int) -> datetime:
        return (_EPOCH + timedelta(milliseconds=now)).astimezone(self._zone)

    def _clocked(self, kind: int, now: int) -> Interval:
        offset = self._offset(now)
        length = _FIXED[kind]
        start = (now + offset) // length * length - offset
        end = start + length
        # A clock change that is no whole interval (Lord Howe's half hour) ends one and starts another.
        if self._offset(start) != offset:
            start = _first(start, now, lambda at: self._offset(at) == offset)
        if self._offset(end - 1) != offset:
            end = _first(now, end, lambda at: self._offset(at) != offset)
        return Interval(start, end)

    def _dated(self, kind: int, now: int) -> Interval:
        first = _first_day(kind, self._local(now).date())
        end = self._begin(_next_first_day(kind, first))
        if now >= end:
            # A clock set back over midnight brings the old date back for a while; the new interval goes on.
            first = _next_first_day(kind, first)
            end = self._begin(_next_first_day(kind, first))
        return Interval(self._begin(first), end)

    def _offset(self, now: int) -> int:
        return (self._local(now).utcoffset() or timedelta(0)) // _MILLISECOND

    def _begin(self, day: date) -> int:
        """The first instant of `day`; of the day after, if the zone skipped it."""
        midnight = datetime(day.year, day.month, day.day, tzinfo=self._zone)
        first, second = ((midnight.replace(fold=fold) - _EPOCH) // _MILLISECOND for fold in (0, 1))
        if first <= second:
            return first
        # A clock set forward over midnight: the day begins at the change, which lies between the two.
        return _first(second - 1, first, lambda at: self._local(at).date() >= day)


def _first(before: int, after: int, true: Callable[[int], bool]) -> int:
    """The first instant after `before` of which `true` holds: it does of `after`, and of all from the first on."""
    while after - before > 1:
        middle = (before + after) // 2
        if true(middle):
            after = middle
        else:
            before = middle
    return after


def _first_day(kind: int, day: date) -> date:
    if kind == WEEK:
        return day - timedelta(days=day.weekday())
    if kind == MONTH:
        return day.replace(day=1)
    return day.replace(month=1, day=1) if kind == YEAR else day


def _next_first_day(kind: int, first: date) -> date:
    if kind == MONTH:
        return (first + timedelta(days=31)).replace(day=1)
    if kind == YEAR:
        return first.replace(year=first.year + 1)
    return first + timedelta(days=7 if kind == WEEK else 1)
