"""Gregorian windows: where an interval starts and ends in a time zone."""

from __future__ import annotations

from datetime import UTC, tzinfo
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.calendar import LAST_INSTANT, Calendar
from tests import model
from tests.helpers import epoch_ms

MINUTE, HOUR, DAY, WEEK, MONTH, YEAR = range(6)
H = 3_600_000
ZONES = sorted(available_timezones() - {"localtime", "Factory"})
INSTANTS = st.integers(0, epoch_ms("2100-01-01T00:00Z"))
DATED = st.sampled_from([DAY, WEEK, MONTH, YEAR])


def interval(zone: str, kind: int, now: int) -> tuple[int, int]:
    """The interval, from a calendar that was asked nothing before."""
    start, end = Calendar(_zone(zone)).interval(kind, now)
    return start, end


def _zone(name: str) -> tzinfo:
    return UTC if name == "UTC" else ZoneInfo(name)


IN_UTC = [
    (MINUTE, "2023-11-14T22:13:20.000Z", "2023-11-14T22:13Z", "2023-11-14T22:14Z"),
    (MINUTE, "2023-11-14T22:13:00.000Z", "2023-11-14T22:13Z", "2023-11-14T22:14Z"),
    (MINUTE, "2023-11-14T22:13:59.999Z", "2023-11-14T22:13Z", "2023-11-14T22:14Z"),
    (MINUTE, "2023-12-31T23:59:59.999Z", "2023-12-31T23:59Z", "2024-01-01T00:00Z"),
    (HOUR, "2023-11-14T22:13:20Z", "2023-11-14T22:00Z", "2023-11-14T23:00Z"),
    (HOUR, "2023-11-14T23:00:00Z", "2023-11-14T23:00Z", "2023-11-15T00:00Z"),
    (DAY, "2023-11-14T22:13:20Z", "2023-11-14T00:00Z", "2023-11-15T00:00Z"),
    (DAY, "2024-02-28T23:59:59.999Z", "2024-02-28T00:00Z", "2024-02-29T00:00Z"),
    (DAY, "2023-02-28T23:59:59.999Z", "2023-02-28T00:00Z", "2023-03-01T00:00Z"),
    (WEEK, "2023-11-13T00:00:00Z", "2023-11-13T00:00Z", "2023-11-20T00:00Z"),  # a Monday
    (WEEK, "2023-11-19T23:59:59.999Z", "2023-11-13T00:00Z", "2023-11-20T00:00Z"),  # a Sunday
    (WEEK, "2021-01-01T12:00:00Z", "2020-12-28T00:00Z", "2021-01-04T00:00Z"),  # week 53 of 2020
    (WEEK, "2024-12-31T12:00:00Z", "2024-12-30T00:00Z", "2025-01-06T00:00Z"),  # week 1 of 2025
    (WEEK, "2024-03-01T12:00:00Z", "2024-02-26T00:00Z", "2024-03-04T00:00Z"),
    (WEEK, "1970-01-06T00:00:00Z", "1970-01-05T00:00Z", "1970-01-12T00:00Z"),
    (WEEK, "1970-01-01T00:00:00Z", "1969-12-29T00:00Z", "1970-01-05T00:00Z"),  # starts before the epoch
    (MONTH, "2024-02-29T12:00:00Z", "2024-02-01T00:00Z", "2024-03-01T00:00Z"),
    (MONTH, "2023-02-28T12:00:00Z", "2023-02-01T00:00Z", "2023-03-01T00:00Z"),
    (MONTH, "2023-01-31T12:00:00Z", "2023-01-01T00:00Z", "2023-02-01T00:00Z"),
    (MONTH, "2023-12-31T23:59:59.999Z", "2023-12-01T00:00Z", "2024-01-01T00:00Z"),
    (MONTH, "2023-04-30T12:00:00Z", "2023-04-01T00:00Z", "2023-05-01T00:00Z"),
    (YEAR, "2023-06-01T00:00:00Z", "2023-01-01T00:00Z", "2024-01-01T00:00Z"),
    (YEAR, "2024-12-31T23:59:59.999Z", "2024-01-01T00:00Z", "2025-01-01T00:00Z"),
    (YEAR, "2000-02-29T00:00:00Z", "2000-01-01T00:00Z", "2001-01-01T00:00Z"),
    (YEAR, "2100-02-28T00:00:00Z", "2100-01-01T00:00Z", "2101-01-01T00:00Z"),
    (YEAR, "1970-01-01T00:00:00Z", "1970-01-01T00:00Z", "1971-01-01T00:00Z"),
]

ELSEWHERE = [
    # Clocks go forward: the day has 23 hours; back: 25.
    ("Europe/Rome", DAY, "2023-03-26T12:00+02:00", "2023-03-26T00:00+01:00", "2023-03-27T00:00+02:00", 23 * H),
    ("Europe/Rome", DAY, "2023-10-29T00:30+02:00", "2023-10-29T00:00+02:00", "2023-10-30T00:00+01:00", 25 * H),
    ("Europe/Rome", WEEK, "2023-10-29T12:00+01:00", "2023-10-23T00:00+02:00", "2023-10-30T00:00+01:00", 169 * H),
    ("Europe/Rome", MONTH, "2023-03-01T00:00+01:00", "2023-03-01T00:00+01:00", "2023-04-01T00:00+02:00", 743 * H),
    ("Europe/Rome", YEAR, "2023-07-01T00:00+02:00", "2023-01-01T00:00+01:00", "2024-01-01T00:00+01:00", 8760 * H),
    ("America/New_York", DAY, "2023-03-12T12:00-04:00", "2023-03-12T00:00-05:00", "2023-03-13T00:00-04:00", 23 * H),
    ("America/New_York", DAY, "2023-11-05T12:00-05:00", "2023-11-05T00:00-04:00", "2023-11-06T00:00-05:00", 25 * H),
    ("America/New_York", DAY, "2023-11-05T03:59Z", "2023-11-04T00:00-04:00", "2023-11-05T00:00-04:00", 24 * H),
    # An hour that comes twice is two intervals, one that is skipped is none.
    ("Europe/Rome", HOUR, "2023-10-29T02:30+02:00", "2023-10-29T02:00+02:00", "2023-10-29T03:00+02:00", H),
    ("Europe/Rome", HOUR, "2023-10-29T02:30+01:00", "2023-10-29T02:00+01:00", "2023-10-29T03:00+01:00", H),
    ("Europe/Rome", HOUR, "2023-03-26T01:59+01:00", "2023-03-26T01:00+01:00", "2023-03-26T03:00+02:00", H),
    # Offsets that are no whole hours.
    ("Asia/Kolkata", HOUR, "2023-11-14T22:13Z", "2023-11-14T21:30Z", "2023-11-14T22:30Z", H),
    ("Asia/Kathmandu", HOUR, "2023-11-14T22:13Z", "2023-11-14T21:15Z", "2023-11-14T22:15Z", H),
    ("Asia/Kolkata", DAY, "2023-11-14T22:13Z", "2023-11-15T00:00+05:30", "2023-11-16T00:00+05:30", 24 * H),
    ("Asia/Kolkata", MINUTE, "2023-11-14T22:13:20Z", "2023-11-14T22:13Z", "2023-11-14T22:14Z", 60_000),
    (
        "Australia/Lord_Howe",
        DAY,
        "2023-10-01T12:00+11:00",
        "2023-10-01T00:00+10:30",
        "2023-10-02T00:00+11:00",
        47 * H // 2,
    ),
    # Clocks that were set back at 00:01, to 23:01 of the day before: that day ends when its midnight first comes.
    ("America/St_Johns", DAY, "2010-11-06T12:00-02:30", "2010-11-06T00:00-02:30", "2010-11-07T00:00-02:30", 24 * H),
    ("America/St_Johns", DAY, "2010-11-07T12:00-03:30", None, "2010-11-08T00:00-03:30", None),
    ("America/St_Johns", DAY, "2010-03-14T12:00-02:30", "2010-03-14T00:00-03:30", "2010-03-15T00:00-02:30", 23 * H),
    ("America/St_Johns", YEAR, "2010-11-07T12:00-03:30", "2010-01-01T00:00-03:30", "2011-01-01T00:00-03:30", 8760 * H),
    # Samoa had no 30 December 2011.
    ("Pacific/Apia", DAY, "2011-12-29T12:00-10:00", "2011-12-29T00:00-10:00", "2011-12-31T00:00+14:00", 24 * H),
    ("Pacific/Apia", DAY, "2011-12-31T12:00+14:00", "2011-12-31T00:00+14:00", "2012-01-01T00:00+14:00", 24 * H),
    ("Pacific/Apia", WEEK, "2011-12-31T12:00+14:00", "2011-12-26T00:00-10:00", "2012-01-02T00:00+14:00", 6 * 24 * H),
    ("Pacific/Apia", MONTH, "2011-12-31T12:00+14:00", "2011-12-01T00:00-10:00", "2012-01-01T00:00+14:00", 30 * 24 * H),
    # Days whose midnight is skipped begin at 01:00.
    ("America/Sao_Paulo", DAY, "2018-11-04T12:00-02:00", "2018-11-04T01:00-02:00", "2018-11-05T00:00-02:00", 23 * H),
    ("America/Sao_Paulo", DAY, "2018-11-03T23:59-03:00", "2018-11-03T00:00-03:00", "2018-11-04T01:00-02:00", 24 * H),
    ("Africa/Cairo", DAY, "2023-04-28T01:00+03:00", "2023-04-28T01:00+03:00", "2023-04-29T00:00+03:00", 23 * H),
    ("Africa/Cairo", DAY, "2023-10-26T12:00+03:00", "2023-10-26T00:00+03:00", "2023-10-27T00:00+02:00", 25 * H),
]


@pytest.mark.parametrize(("kind", "now", "start", "end"), IN_UTC)
def test_intervals_in_utc(kind: int, now: str, start: str, end: str) -> None:
    """An interval of each kind starts and ends where the calendar says."""
    assert interval("UTC", kind, epoch_ms(now)) == (epoch_ms(start), epoch_ms(end))


@pytest.mark.parametrize(("zone", "kind", "now", "start", "end", "length"), ELSEWHERE)
def test_intervals_where_clocks_change(
    zone: str, kind: int, now: str, start: str | None, end: str, length: int | None
) -> None:
    """Intervals follow the zone's own clock through every change of it."""
    found = interval(zone, kind, epoch_ms(now))
    assert found[1] == epoch_ms(end)
    if start is not None:
        assert found == (epoch_ms(start), epoch_ms(end))
        assert found[1] - found[0] == length


@given(st.sampled_from(ZONES), st.integers(0, 5), INSTANTS)
@example("America/St_Johns", DAY, epoch_ms("2010-11-07T00:00:30-02:30"))
@example("America/St_Johns", DAY, epoch_ms("2010-11-06T23:30-03:30"))
@example("America/St_Johns", DAY, epoch_ms("2010-11-07T00:00:30-03:30"))
@example("Africa/Cairo", DAY, epoch_ms("2023-10-26T23:30+02:00"))
@example("Pacific/Apia", WEEK, epoch_ms("2011-12-30T23:59-10:00"))
def test_an_interval_holds_its_instant(zone: str, kind: int, now: int) -> None:
    """No window is over before it begins, nor begins after the request that opens it."""
    start, end = interval(zone, kind, now)
    assert start <= now < end


@given(st.sampled_from(ZONES), DATED, INSTANTS)
@example("America/St_Johns", DAY, epoch_ms("2010-11-06T12:00-02:30"))
@example("America/St_Johns", DAY, epoch_ms("2010-11-07T00:00:30-02:30"))
@example("America/St_Johns", DAY, epoch_ms("2010-11-06T23:30-03:30"))
@example("Pacific/Apia", DAY, epoch_ms("2011-12-29T12:00-10:00"))
@example("America/Sao_Paulo", DAY, epoch_ms("2018-11-03T12:00-03:00"))
@example("Africa/Cairo", MONTH, epoch_ms("2023-04-28T01:00+03:00"))
def test_an_interval_begins_where_the_one_before_ends(zone: str, kind: int, now: int) -> None:
    """Days, weeks, months and years follow one another without a gap and without overlap."""
    end = interval(zone, kind, now)[1]
    assert interval(zone, kind, end)[0] == end


@given(st.integers(0, 5), st.integers(0, LAST_INSTANT))
def test_utc_is_as_reckoned_another_way(kind: int, now: int) -> None:
    """In UTC every interval, to the last instant a clock may show, is the one that plain arithmetic gives."""
    assert interval("UTC", kind, now) == model.interval(kind, now)


@pytest.mark.parametrize("zone", ["America/St_Johns", "Pacific/Kiritimati", "Etc/GMT+12"])
@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize("now", [0, LAST_INSTANT])
def test_the_ends_of_time(zone: str, kind: int, now: int) -> None:
    """The first and the last instant a clock may show lie in an interval like any other."""
    start, end = interval(zone, kind, now)
    assert start <= now < end


HISTORIES = [
    ("UTC", HOUR, "2023-11-14T22:59:59.999Z", "2023-11-14T23:00:00Z"),
    ("UTC", DAY, "2023-11-15T00:00:00Z", "2023-11-14T23:59:59.999Z"),  # back, as a late request does
    ("Europe/Rome", HOUR, "2023-10-29T02:59+02:00", "2023-10-29T02:00+01:00"),
    ("Europe/Rome", DAY, "2023-10-29T23:59+01:00", "2023-10-30T00:00+01:00"),
    ("America/St_Johns", DAY, "2010-11-07T00:00:30-02:30", "2010-11-06T23:30-03:30"),  # 23:01 comes again
    ("America/St_Johns", DAY, "2010-11-06T23:30-03:30", "2010-11-07T00:00:30-02:30"),
]


@pytest.mark.parametrize(("zone", "kind", "before", "now"), HISTORIES)
def test_an_interval_is_the_same_whatever_was_asked_before(zone: str, kind: int, before: str, now: str) -> None:
    """A calendar remembers, but what other requests asked changes no interval."""
    calendar = Calendar(_zone(zone))
    calendar.interval(kind, epoch_ms(before))
    assert tuple(calendar.interval(kind, epoch_ms(now))) == interval(zone, kind, epoch_ms(now))


def test_a_remembered_interval_is_shared() -> None:
    """All instants of an interval get the same object, so that its buckets share two numbers."""
    calendar = Calendar()
    assert calendar.interval(DAY, H) is calendar.interval(DAY, 2 * H)
    assert calendar.interval(HOUR, 0) is not calendar.interval(DAY, 0)
