"""What one bucket answers, row by row: (at, hits -> status, remaining, reset, retry_after), one table a rule.

`at` and `reset` are ms after the table's start; a row may name terms of its own, and a remark says why it is odd.
"""

from __future__ import annotations

import pytest

from sidecar.table import Table
from tests.helpers import (
    DRAIN,
    GREGORIAN,
    INT64_MAX,
    INT64_MIN,
    LEAKY,
    NOON,
    RESET,
    TOKEN,
    O,
    R,
    Rows,
    T,
    U,
    ask,
    cases,
    epoch_ms,
    follow,
)

MINUTE, HOUR, DAY, WEEK, MONTH, YEAR = range(6)
DAY_MS = 86_400_000


# --- TOKEN_BUCKET: 10 tokens in 1000 ms, unless a row says otherwise


@cases(
    window=[
        R(0, 1, U, 9, 1000, 0),
        R(500, 9, U, 0, 1000, 0),
        R(999, 1, O, 0, 1000, 1),  # the window's last ms
        R(1000, 1, U, 9, 2000, 0),  # [start, start + duration): 1000 lies in the next
        R(5300, 0, U, 10, 6300, 0),  # a window opens with the first request, if only a peek
        R(6299, 3, U, 7, 6300, 0),
    ],
    all_or_nothing=[
        R(0, 11, O, 10, 1000, 1000),  # more than ever fits: the time to a full bucket
        R(1, 8, U, 2, 1000, 0),
        R(2, 3, O, 2, 1000, 998),
        R(3, 2, U, 0, 1000, 0),  # the refused 3 took nothing
    ],
    peeks_take_nothing=[R(0, 0, U, 10, 1000, 0), R(10, 0, U, 10, 1000, 0), R(20, 10, U, 0, 1000, 0)],
)
def test_a_token_bucket_counts_over_its_window(rows: Rows) -> None:
    """Hits are taken whole or not at all until the window ends; its reset_time stays the same throughout."""
    follow(rows)


DRAINING = {"behavior": DRAIN}


@cases(
    first_request=[R(0, 11, O, 0, 1000, 1000, DRAINING), R(1, 1, O, 0, 1000, 999)],
    later_request=[R(0, 4, U, 6, 1000, 0, DRAINING), R(1, 7, O, 0, 1000, 999, DRAINING), R(2, 1, O, 0, 1000, 998)],
    fitting_request=[R(0, 10, U, 0, 1000, 0, DRAINING), R(1, 0, U, 0, 1000, 0, DRAINING)],  # nothing was refused
    already_empty=[R(0, 10, U, 0, 1000, 0), R(1, 1, O, 0, 1000, 999, DRAINING), R(1000, 1, U, 9, 2000, 0)],
    refund_after=[R(0, 11, O, 0, 1000, 1000, DRAINING), R(1, -2, U, 2, 1000, 0), R(2, 2, U, 0, 1000, 0)],
    keeps_debt=[
        R(0, 9, U, 1, 1000, 0),
        R(1, 1, O, 0, 1000, 999, {"limit": 5, "behavior": DRAIN}),  # already 4 below nothing
        R(2, 0, U, 1, 1000, 0),  # draining gave nothing back
    ],
    keeps_credit_down=[R(0, -5, U, 15, 1000, 0), R(1, 16, O, 0, 1000, 999, DRAINING), R(2, 1, O, 0, 1000, 998)],
)
def test_draining_a_token_bucket(rows: Rows) -> None:
    """With DRAIN_OVER_LIMIT a refused request empties the bucket, be it the first, and takes no more than that."""
    follow(rows)


EMPTY_AND_REFUSED = [R(0, 10, U, 0, 1000, 0), R(1, 0, U, 0, 1000, 0), R(2, 1, O, 0, 1000, 998)]


@cases(
    stays=[*EMPTY_AND_REFUSED, R(3, 0, O, 0, 1000, 997), R(999, 0, O, 0, 1000, 1)],
    not_for_too_much=[
        R(0, 11, O, 10, 1000, 1000),
        R(1, 0, U, 10, 1000, 0),
        R(2, 10, U, 0, 1000, 0),
        R(3, 0, U, 0, 1000, 0),
    ],
    after_draining=[R(0, 11, O, 0, 1000, 1000, DRAINING), R(1, 0, O, 0, 1000, 999)],
    refused_before_it_ran_out=[R(0, 8, U, 2, 1000, 0), R(1, 3, O, 2, 1000, 999), R(2, 0, U, 0, 1000, 0, {"limit": 5})],
    refund=[*EMPTY_AND_REFUSED, R(3, -1, U, 1, 1000, 0), R(4, 1, U, 0, 1000, 0), R(5, 0, U, 0, 1000, 0)],
    refund_that_does_not_reach=[
        *EMPTY_AND_REFUSED,
        R(3, -1, U, 0, 1000, 0, {"limit": 5}),  # a refund is under the limit, though 4 are owed still
        R(4, 0, O, 0, 1000, 996, {"limit": 5}),
    ],
    raised_limit=[*EMPTY_AND_REFUSED, R(3, 0, U, 1, 1000, 0, {"limit": 11}), R(4, 0, U, 0, 1000, 0)],
    raised_not_enough=[
        R(0, 10, U, 0, 1000, 0),
        R(1, 1, O, 0, 1000, 999, {"limit": 8}),
        R(2, 0, O, 0, 1000, 998, {"limit": 10}),  # raised, but nothing is left of it
    ],
    new_window=[*EMPTY_AND_REFUSED, R(1000, 0, U, 10, 2000, 0), R(1001, 10, U, 0, 2000, 0), R(1002, 0, U, 0, 2000, 0)],
    shorter_duration=[*EMPTY_AND_REFUSED, R(500, 0, U, 10, 600, 0, {"duration": 100})],
    reset=[
        *EMPTY_AND_REFUSED,
        R(3, 0, U, 10, 1003, 0, {"behavior": RESET}),
        R(4, 10, U, 0, 1003, 0),
        R(5, 0, U, 0, 1003, 0),
    ],
    another_algorithm=[*EMPTY_AND_REFUSED, R(3, 0, U, 10, 3, 0, {"algorithm": LEAKY})],
)
def test_what_a_peek_at_a_token_bucket_remembers(rows: Rows) -> None:
    """A peek is over the limit only when nothing is left and a hit was refused since it ran out."""
    follow(rows)


@cases(
    lowered_and_raised=[
        R(0, 6, U, 4, 1000, 0),
        R(1, 0, U, 0, 1000, 0, {"limit": 5}),  # 6 consumed of 5: nothing left, never below
        R(2, 1, O, 0, 1000, 998, {"limit": 5}),
        R(3, 0, U, 4, 1000, 0),
        R(4, 0, U, 14, 1000, 0, {"limit": 20}),
        R(5, 0, U, 4, 1000, 0),
    ],
    two_callers=[
        R(0, 5, U, 5, 1000, 0),
        R(1, 5, U, 0, 1000, 0, {"limit": 10}),
        R(2, 1, O, 0, 1000, 998, {"limit": 4}),
        R(3, 1, O, 0, 1000, 997, {"limit": 10}),
        R(4, 1, O, 0, 1000, 996, {"limit": 4}),
        R(5, 1, O, 0, 1000, 995, {"limit": 10}),
    ],
    two_callers_first_one_small=[
        R(0, 4, U, 0, 1000, 0, {"limit": 4}),
        R(1, 6, U, 0, 1000, 0),
        R(2, 1, O, 0, 1000, 998, {"limit": 4}),
        R(3, 1, O, 0, 1000, 997),
    ],
)
def test_a_token_buckets_limit_may_change(rows: Rows) -> None:
    """What was consumed stays through any change of limit, so that nobody gains tokens by alternating."""
    follow(rows)


@cases(
    longer=[
        R(0, 4, U, 6, 1000, 0),
        R(900, 1, U, 5, 3000, 0, {"duration": 3000}),
        R(2999, 1, U, 4, 3000, 0, {"duration": 3000}),
    ],
    shorter=[
        R(0, 4, U, 6, 1000, 0),
        R(100, 1, U, 5, 500, 0, {"duration": 500}),
        R(500, 1, U, 9, 1000, 0, {"duration": 500}),
    ],
    back=[R(0, 4, U, 6, 1000, 0), R(100, 0, U, 6, 500, 0, {"duration": 500}), R(200, 0, U, 6, 1000, 0)],
    passed=[R(0, 4, U, 6, 1000, 0), R(500, 3, U, 7, 1000, 0, {"duration": 500})],  # judged in a window from now
    over_before_it_grew=[R(0, 4, U, 6, 1000, 0), R(1000, 1, U, 9, 4000, 0, {"duration": 3000})],
    to_nothing=[R(0, 4, U, 6, 1000, 0), R(0, 7, U, 3, 0, 0, {"duration": 0}), R(0, 0, U, 10, 1000, 0)],
)
def test_a_token_buckets_duration_may_change(rows: Rows) -> None:
    """The window ends at its start plus the new duration; if that has passed, a new one opens now."""
    follow(rows)


@cases(
    new=[R(0, 3, U, 10, 1000, 0, {"behavior": RESET}), R(1, 1, U, 9, 1000, 0)],
    old=[R(0, 10, U, 0, 1000, 0), R(400, 1, U, 10, 1400, 0, {"behavior": RESET}), R(401, 10, U, 0, 1400, 0)],
    refused=[
        R(0, 1, U, 9, 1000, 0),
        R(400, 99, U, 10, 1400, 0, {"behavior": RESET | DRAIN}),
        R(401, 0, U, 10, 1400, 0),
    ],
    refund=[R(0, -5, U, 15, 1000, 0), R(400, -5, U, 10, 1400, 0, {"behavior": RESET})],  # its hits are ignored too
    nothing_to_fill=[R(0, 1, U, 0, 1000, 0, {"limit": 0, "behavior": RESET})],
    gregorian=[R(0, 1, U, 10, 39_999, 0, {"duration": MINUTE, "behavior": RESET | GREGORIAN})],  # T is at second 20
)
def test_resetting_a_token_bucket(rows: Rows) -> None:
    """RESET_REMAINING answers a full bucket in a window from now, whatever was and whatever hits it carries."""
    follow(rows)


@cases(
    above_the_limit=[
        R(0, -1, U, 11, 1000, 0),
        R(1, 11, U, 0, 1000, 0),
        R(2, 1, O, 0, 1000, 998),
        R(1000, 0, U, 10, 2000, 0),
    ],
    more_than_taken=[
        R(0, 2, U, 8, 1000, 0),
        R(1, -4, U, 12, 1000, 0),
        R(2, 13, O, 12, 1000, 998),
        R(3, 12, U, 0, 1000, 0),
    ],
    of_a_limit_of_nothing=[R(0, -2, U, 2, 1000, 0, {"limit": 0}), R(1, 2, U, 0, 1000, 0, {"limit": 0})],
)
def test_refunds_to_a_token_bucket(rows: Rows) -> None:
    """A refund is always under the limit, and may raise what is left above it until the window ends."""
    follow(rows)


@cases(
    limit_0=[R(0, 0, U, 0, 1000, 0), R(1, 1, O, 0, 1000, 999), R(2, 0, O, 0, 1000, 998), R(1000, 0, U, 0, 2000, 0)],
    burst_is_not_for_token_buckets=[R(0, 1, O, 0, 1000, 1000, {"burst": 5})],
)
def test_a_token_bucket_of_limit_0(rows: Rows) -> None:
    """A limit of 0 refuses every positive hit."""
    follow(rows, limit=0)


@cases(
    over_at_once=[R(0, 10, U, 0, 0, 0), R(0, 10, U, 0, 0, 0), R(0, 0, U, 10, 0, 0), R(1, 1, U, 9, 1, 0)],
    too_much=[R(0, 11, O, 10, 0, 0), R(0, 0, U, 10, 0, 0)],
    too_much_draining=[R(0, 11, O, 0, 0, 0, DRAINING), R(0, 1, U, 9, 0, 0)],
    from_before=[R(100, 10, U, 0, 100, 0), R(100, 1, U, 9, 50, 0, seen=50)],  # that window was over at once as well
)
def test_a_token_bucket_of_duration_0(rows: Rows) -> None:
    """A window of 0 ms is over at once, so that every request is judged alone."""
    follow(rows, duration=0)


@cases(
    within_the_skew=[R(0, 1, U, 9, -9_000, 0, seen=-10_000), R(0, 1, U, 9, 11_000, 0, seen=10_000)],
    ahead_by_an_hour=[R(0, 10, U, 0, 11_000, 0, seen=3_600_000), R(11_000, 1, U, 9, 12_000, 0)],  # freezes nothing
    an_hour_late=[R(0, 1, U, 9, -9_000, 0, seen=-3_600_000)],
    before_the_window=[
        R(5000, 10, U, 0, 6000, 0),
        R(5001, 1, O, 0, 6000, 5000, seen=1000),  # judged in the window that there is
        R(5002, 0, O, 0, 6000, 998),
    ],
    reset_from_before=[R(5000, 10, U, 0, 6000, 0), R(5001, 0, U, 10, 5900, 0, {"behavior": RESET}, seen=4900)],
    ends_of_int64=[R(0, 1, U, 9, -9_000, 0, seen=INT64_MIN - T), R(0, 1, U, 9, 11_000, 0, seen=INT64_MAX - T)],
)
def test_created_at_of_a_request_to_a_token_bucket(rows: Rows) -> None:
    """created_at stands for the clock within the allowed skew and is drawn to its edge beyond."""
    follow(rows)


@cases(
    minute=[
        R(10_000, 10, U, 0, 59_999, 0, {"duration": MINUTE}),
        R(59_999, 1, O, 0, 59_999, 1, {"duration": MINUTE}),  # retry_after is reset_time + 1 - now
        R(60_000, 1, U, 9, 119_999, 0, {"duration": MINUTE}),
    ],
    hour=[R(1, 11, O, 10, 3_599_999, 3_599_999, {"duration": HOUR})],
    day=[R(0, 1, U, 9, DAY_MS // 2 - 1, 0, {"duration": DAY})],
    week=[R(0, 1, U, 9, DAY_MS * 9 // 2 - 1, 0, {"duration": WEEK})],  # a Wednesday; ISO weeks begin on Monday
    month=[R(0, 1, U, 9, DAY_MS * 31 // 2 - 1, 0, {"duration": MONTH})],
    year=[R(0, 1, U, 9, DAY_MS * 93 // 2 - 1, 0, {"duration": YEAR})],
    other_interval=[
        R(10_000, 4, U, 6, 59_999, 0, {"duration": MINUTE}),
        R(20_000, 1, U, 5, 3_599_999, 0, {"duration": HOUR}),
        R(90_000, 1, U, 9, 119_999, 0, {"duration": MINUTE}),  # that hour's first minute has passed
    ],
    plain_to_gregorian=[
        R(10_000, 4, U, 6, 80_000, 0, {"duration": 70_000, "behavior": 0}),
        R(30_000, 1, U, 5, 59_999, 0, {"duration": MINUTE}),
        R(60_000, 1, U, 9, 119_999, 0, {"duration": MINUTE}),
    ],
    plain_to_gregorian_passed=[
        R(10_000, 4, U, 6, 80_000, 0, {"duration": 70_000, "behavior": 0}),
        R(70_000, 1, U, 9, 119_999, 0, {"duration": MINUTE}),  # what was consumed lies in the minute before
    ],
    gregorian_to_plain=[
        R(10_000, 4, U, 6, 59_999, 0, {"duration": MINUTE}),
        R(20_000, 1, U, 5, 30_000, 0, {"duration": 30_000, "behavior": 0}),  # from the minute's start
        R(30_000, 1, U, 9, 60_000, 0, {"duration": 30_000, "behavior": 0}),
    ],
    late_for_the_minute=[
        R(60_000, 10, U, 0, 119_999, 0, {"duration": MINUTE}),
        R(60_001, 1, O, 0, 119_999, 60_010, {"duration": MINUTE}, seen=59_990),  # no second bucket for the old minute
    ],
)
def test_gregorian_windows_of_a_token_bucket(rows: Rows) -> None:
    """The window is the calendar's: reset_time is its last millisecond, and waiting one more opens the next."""
    follow(rows, NOON, behavior=GREGORIAN)


def test_a_gregorian_day_follows_the_zones_clock() -> None:
    """A day on which clocks go forward ends after 23 hours, and reset_time says so."""
    rows = [R(0, 11, O, 10, 23 * 3_600_000 - 1, 23 * 3_600_000), R(23 * 3_600_000, 1, U, 9, 47 * 3_600_000 - 1, 0)]
    follow(rows, epoch_ms("2023-03-26T00:00+01:00"), "Europe/Rome", duration=DAY, behavior=GREGORIAN)


# --- LEAKY_BUCKET: 10 tokens in 1000 ms, one each 100 ms, unless a row says otherwise

L = {"algorithm": LEAKY}


@cases(
    leaks=[
        R(0, 10, U, 0, 1000, 0),
        R(50, 1, O, 0, 1050, 50),  # remaining is whole tokens, so reset_time counts from there
        R(100, 1, U, 0, 1100, 0),
        R(250, 0, U, 1, 1150, 0),
        R(1100, 0, U, 10, 1100, 0),
        R(9000, 0, U, 10, 9000, 0),  # never fuller than full
    ],
    all_or_nothing=[
        R(0, 11, O, 10, 0, 0),  # never fits; the bucket is full now
        R(0, 8, U, 2, 800, 0),
        R(0, 11, O, 2, 800, 800),  # never fits: the time to a full bucket
        R(0, 4, O, 2, 800, 200),
        R(0, 2, U, 0, 1000, 0),
    ],
    drained=[R(0, 11, O, 0, 1000, 1000, DRAINING), R(0, 1, O, 0, 1000, 100), R(100, 1, U, 0, 1100, 0)],
    drained_of_a_fraction=[R(0, 10, U, 0, 1000, 0), R(50, 1, O, 0, 1050, 100, DRAINING), R(149, 1, O, 0, 1149, 1)],
    drained_later=[R(0, 4, U, 6, 400, 0), R(0, 7, O, 0, 1000, 700, DRAINING), R(700, 7, U, 0, 1700, 0)],
    drained_of_debt=[R(0, 8, U, 2, 800, 0), R(0, 1, O, 0, 1000, 800, {"limit": 5, **DRAINING}), R(0, 0, U, 2, 800, 0)],
    fits_while_draining=[R(0, 10, U, 0, 1000, 0, DRAINING), R(0, 0, U, 0, 1000, 0, DRAINING)],
)
def test_a_leaky_bucket_leaks(rows: Rows) -> None:
    """Tokens come back one by one at the limit's rate; a refusal takes none of them, or all when draining."""
    follow(rows, algorithm=LEAKY)


def test_no_fraction_of_a_token_is_lost_by_polling() -> None:
    """Asked every millisecond, a bucket that leaks a third of a token a ms gives exactly one in three."""
    table = Table()
    answers = [ask(table, T + at, limit=333, duration=999, burst=1, **L)[0] for at in range(3000)]
    assert answers == [U, O, O] * 1000


@cases(
    more_than_limit=[R(0, 20, U, 0, 2000, 0), R(1999, 20, O, 19, 2099, 1), R(2000, 20, U, 0, 4000, 0)],
    less_than_limit=[
        R(0, 21, O, 4, 0, 0, {"burst": 4}),
        R(0, 4, U, 0, 400, 0, {"burst": 4}),
        R(399, 4, O, 3, 499, 1, {"burst": 4}),
    ],
    shrinking=[
        R(0, 20, U, 0, 2000, 0),
        R(0, 1, O, 0, 400, 1700, {"burst": 4}),
        R(1700, 1, U, 0, 2100, 0, {"burst": 4}),
    ],
    shrinking_and_back=[R(0, 15, U, 5, 1500, 0), R(0, 0, U, 0, 400, 0, {"burst": 4}), R(0, 0, U, 5, 1500, 0)],
)
def test_a_leaky_buckets_burst_is_its_capacity(rows: Rows) -> None:
    """`burst` tokens fit at once, leaking at the limit's rate."""
    follow(rows, algorithm=LEAKY, burst=20)


LEAKY_REFUSED = [R(0, 10, U, 0, 1000, 0), R(0, 0, U, 0, 1000, 0), R(10, 1, O, 0, 1010, 90), R(20, 0, O, 0, 1020, 80)]


@cases(
    leak=[*LEAKY_REFUSED, R(100, 0, U, 1, 1000, 0), R(100, 1, U, 0, 1100, 0), R(110, 0, U, 0, 1110, 0)],
    leak_that_nobody_saw=[*LEAKY_REFUSED, R(100, 1, U, 0, 1100, 0), R(110, 0, U, 0, 1110, 0)],
    leak_before_the_limit_was_lowered=[
        *LEAKY_REFUSED,
        R(300, 0, U, 0, 1300, 0, {"limit": 5}),  # 3 had come back of 10: what ran out since is the lower limit
    ],
    full_before_the_limit_was_lowered=[*LEAKY_REFUSED, R(1000, 0, U, 0, 2000, 0, {"limit": 0})],
    refund=[*LEAKY_REFUSED, R(20, -1, U, 1, 920, 0), R(20, 1, U, 0, 1020, 0), R(20, 0, U, 0, 1020, 0)],
    refund_that_does_not_reach=[
        *LEAKY_REFUSED,
        R(20, -1, U, 0, 1020, 0, {"limit": 5}),
        R(20, 0, O, 0, 1020, 960, {"limit": 5}),
    ],
    raised=[*LEAKY_REFUSED, R(20, 0, U, 1, 1020, 0, {"burst": 11}), R(20, 0, U, 0, 1020, 0)],
    reset=[
        *LEAKY_REFUSED,
        R(20, 0, U, 10, 20, 0, {"behavior": RESET}),
        R(20, 10, U, 0, 1020, 0),
        R(20, 0, U, 0, 1020, 0),
    ],
    another_algorithm=[*LEAKY_REFUSED, R(20, 0, U, 10, 1020, 0, {"algorithm": TOKEN})],
    too_much_at_once=[R(0, 11, O, 10, 0, 0), R(0, 10, U, 0, 1000, 0), R(0, 0, U, 0, 1000, 0)],
    drained=[R(0, 11, O, 0, 1000, 1000, DRAINING), R(0, 0, O, 0, 1000, 100)],
    refused_before_it_ran_out=[R(0, 8, U, 2, 800, 0), R(0, 3, O, 2, 800, 100), R(0, 0, U, 0, 1000, 0, {"limit": 5})],
)
def test_what_a_peek_at_a_leaky_bucket_remembers(rows: Rows) -> None:
    """A peek is over the limit only when no token is left and a hit was refused since it ran out."""
    follow(rows, algorithm=LEAKY)


@cases(
    lowered_and_raised=[
        R(0, 6, U, 4, 600, 0),
        R(0, 0, U, 0, 1000, 0, {"limit": 5}),
        R(0, 1, O, 0, 1000, 400, {"limit": 5}),  # 2 must leak, each 200 ms
        R(0, 0, U, 4, 600, 0),
    ],
    two_callers=[
        R(0, 5, U, 5, 500, 0),
        R(0, 1, O, 0, 1000, 500, {"limit": 4}),
        R(0, 5, U, 0, 1000, 0),
        R(0, 1, O, 0, 1000, 1750, {"limit": 4}),
        R(0, 1, O, 0, 1000, 100),
    ],
    old_rate_until_now=[
        R(0, 10, U, 0, 1000, 0),
        R(0, 0, U, 10, 500, 0, {"limit": 20}),
        R(100, 0, U, 2, 900, 0),  # 2 leaked in 100 ms at the limit of 20 that stood
        R(200, 0, U, 3, 900, 0),
    ],
    longer=[R(0, 5, U, 5, 500, 0), R(0, 0, U, 5, 1000, 0, {"duration": 2000}), R(100, 0, U, 5, 600, 0)],
    shorter=[R(0, 5, U, 5, 500, 0), R(0, 0, U, 5, 50, 0, {"duration": 100}), R(50, 0, U, 10, 50, 0)],
    rounded_up=[
        R(0, 10, U, 0, 1000, 0),
        R(1, 0, U, 0, 4, 0, {"duration": 3}),  # 9.99 tokens are 30 thirds, not 29
        R(1, 0, U, 0, 1001, 0),
        R(100, 1, O, 0, 1100, 1),  # that hundredth of a token is spent, and none was made
        R(101, 1, U, 0, 1101, 0),
    ],
    to_nothing=[R(0, 10, U, 0, 1000, 0), R(0, 1, U, 9, 0, 0, {"duration": 0}), R(0, 10, U, 0, 1000, 0)],
)
def test_a_leaky_buckets_terms_may_change(rows: Rows) -> None:
    """The level stays in tokens, rounded up to a unit; what has passed leaked at the rate that stood."""
    follow(rows, algorithm=LEAKY)


@cases(
    new=[R(0, 3, U, 10, 0, 0, {"behavior": RESET}), R(0, 1, U, 9, 100, 0)],
    old=[R(0, 10, U, 0, 1000, 0), R(50, 1, U, 10, 50, 0, {"behavior": RESET}), R(50, 10, U, 0, 1050, 0)],
    refused=[R(0, 1, U, 9, 100, 0), R(0, 99, U, 10, 0, 0, {"behavior": RESET | DRAIN}), R(0, 0, U, 10, 0, 0)],
    burst=[R(0, 10, U, 0, 1000, 0), R(50, 1, U, 15, 50, 0, {"behavior": RESET, "burst": 15})],
    refund=[R(0, 4, U, 6, 400, 0), R(0, -9, U, 10, 0, 0), R(0, 10, U, 0, 1000, 0), R(0, -3, U, 3, 700, 0)],
    refund_first=[R(0, -1, U, 10, 0, 0), R(0, 11, O, 10, 0, 0)],
)
def test_giving_back_to_a_leaky_bucket(rows: Rows) -> None:
    """A reset and a refund are under the limit and never make the bucket fuller than its capacity."""
    follow(rows, algorithm=LEAKY)


@pytest.mark.parametrize("burst", [0, 20])
@cases(
    refuses=[
        R(0, 0, U, 0, 1000, 0),
        R(1, 1, O, 0, 1001, 1000),  # it never leaks: reset_time is now + duration
        R(2, 0, O, 0, 1002, 1000),
        R(3, -1, U, 0, 1003, 0),
        R(4, 0, O, 0, 1004, 1000),
        R(1004, 0, U, 0, 2004, 0),  # reset_time has come
    ],
    drains=[R(0, 1, O, 0, 1000, 1000, DRAINING), R(0, 1, O, 0, 1000, 1000)],
    resets=[R(0, 1, O, 0, 1000, 1000), R(0, 1, U, 0, 1000, 0, {"behavior": RESET}), R(0, 0, U, 0, 1000, 0)],
    keeps_the_level=[
        R(0, 4, U, 6, 400, 0, {"limit": 10, "burst": 0}),
        R(100, 0, U, 0, 1100, 0),
        R(5000, 0, U, 7, 5300, 0, {"limit": 10, "burst": 0}),  # nothing has leaked since 100
    ],
)
def test_a_leaky_bucket_of_limit_0(rows: Rows, burst: int) -> None:
    """A limit of 0 refuses every positive hit and never leaks, whatever the burst."""
    follow(rows, limit=0, algorithm=LEAKY, burst=burst)


@cases(
    alone=[R(0, 10, U, 0, 0, 0), R(0, 10, U, 0, 0, 0), R(0, 0, U, 10, 0, 0), R(1, -1, U, 10, 1, 0)],
    too_much=[R(0, 11, O, 10, 0, 0), R(0, 0, U, 10, 0, 0)],
    too_much_draining=[R(0, 11, O, 0, 0, 0, DRAINING), R(0, 1, U, 9, 0, 0)],
    of_nothing=[R(0, 1, O, 0, 0, 0, {"limit": 0}), R(0, 0, U, 0, 0, 0, {"limit": 0})],
    of_nothing_from_before=[R(9, 1, O, 0, 9, 0, {"limit": 0}), R(9, 0, U, 0, 9, 0, {"limit": 0}, seen=5)],
    ends_a_refusal=[R(0, 1, O, 0, 1000, 1000, {"limit": 0, "duration": 1000}), R(0, 0, U, 0, 0, 0, {"limit": 0})],
)
def test_a_leaky_bucket_of_duration_0(rows: Rows) -> None:
    """A window of 0 ms is over at once, so that every request is judged alone."""
    follow(rows, duration=0, algorithm=LEAKY)


@cases(
    late_at_first=[R(0, 10, U, 0, -9000, 0, seen=-99_999), R(0, 1, U, 9, 100, 0)],
    ahead_by_an_hour=[
        R(0, 10, U, 0, 11_000, 0, seen=3_600_000),
        R(1000, 1, O, 0, 11_000, 9100),  # judged as of 10 s, the bucket's own time
        R(10_100, 1, U, 0, 11_100, 0),
    ],
    from_before=[R(5000, 10, U, 0, 6000, 0), R(5000, 1, O, 0, 6000, 1100, seen=4000), R(5100, 1, U, 0, 6100, 0)],
    leaks_once=[
        R(0, 10, U, 0, 1000, 0),
        R(500, 5, U, 0, 1500, 0),
        R(500, 1, O, 0, 1500, 400, seen=200),
        R(500, 1, O, 0, 1500, 100),  # going back and forth gave nothing
    ],
    reset_from_before=[R(5000, 9, U, 1, 5900, 0), R(5000, 1, U, 10, 4000, 0, {"behavior": RESET}, seen=4000)],
)
def test_created_at_of_a_request_to_a_leaky_bucket(rows: Rows) -> None:
    """A request from before the bucket's own time is judged as of that time, and nothing leaks twice."""
    follow(rows, algorithm=LEAKY)


@cases(
    no_refill=[
        R(59_999, 10, U, 0, 119_999, 0),
        R(60_000, 1, O, 0, 120_000, 5999),  # a new minute, but a token is due each 6 s only
        R(65_999, 1, U, 0, 125_999, 0),
    ],
    to_plain_and_back=[
        R(0, 4, U, 6, 24_000, 0),
        R(6000, 0, U, 7, 6300, 0, {"duration": 1000, "behavior": 0}),
        R(6100, 0, U, 8, 18_100, 0),
    ],
    other_interval=[R(0, 10, U, 0, 60_000, 0), R(6000, 1, U, 0, 3_606_000, 0, {"duration": HOUR})],
)
def test_gregorian_rates_of_a_leaky_bucket(rows: Rows) -> None:
    """The rate is the limit in the calendar's interval; a new interval refills nothing."""
    follow(rows, NOON, duration=MINUTE, algorithm=LEAKY, behavior=GREGORIAN)


@pytest.mark.parametrize(("february", "days"), [("2024-02-01T00:00Z", 29), ("2023-02-01T00:00Z", 28)])
def test_a_leap_years_february_leaks_over_29_days(february: str, days: int) -> None:
    """A token a day leaks out of a monthly limit of as many tokens as February has days."""
    rows = [
        R(0, days, U, 0, days * DAY_MS, 0),
        R(DAY_MS - 1, 1, O, 0, (days + 1) * DAY_MS - 1, 1),
        R(DAY_MS, 1, U, 0, (days + 1) * DAY_MS, 0),
        # March has 31 days: the one token that has not leaked by then takes longer.
        R(days * DAY_MS, 0, U, days - 1, days * DAY_MS - (-31 * DAY_MS // days), 0),
    ]
    follow(rows, epoch_ms(february), limit=days, duration=MONTH, algorithm=LEAKY, behavior=GREGORIAN)


# --- The ends of int64

END = INT64_MAX - T
"""The last instant there is, counted from T."""


@cases(
    token_hits=[
        R(0, INT64_MAX, U, 0, 1000, 0),
        R(0, INT64_MAX, O, 0, 1000, 1000),
        R(0, INT64_MIN, U, INT64_MAX, 1000, 0),  # 2^63 left: more than can be told
        R(0, INT64_MIN, U, INT64_MAX, 1000, 0),
        R(0, INT64_MAX, U, INT64_MAX, 1000, 0),
    ],
    token_duration=[
        R(0, INT64_MAX, U, 0, END, 0, {"duration": INT64_MAX}),
        R(0, 1, O, 0, END, INT64_MAX, {"duration": INT64_MAX}),
        R(1, 1, O, 0, END, INT64_MAX - 1, {"duration": INT64_MAX}),
    ],
    leaky_hits=[
        R(0, INT64_MAX, U, 0, 1000, 0, L),
        R(0, INT64_MAX, O, 0, 1000, 1000, L),
        R(999, INT64_MAX, O, INT64_MAX * 999 // 1000, 1001, 1, L),  # less than 999 thousandths, in whole tokens
        R(999, INT64_MIN, U, INT64_MAX, 999, 0, L),
    ],
    leaky_rate=[R(0, INT64_MAX, U, 0, 1, 0, {**L, "duration": 1}), R(1, INT64_MAX, U, 0, 2, 0, {**L, "duration": 1})],
    leaky_burst=[
        R(0, INT64_MAX, U, 0, END, 0, {**L, "limit": 1, "burst": INT64_MAX}),
        R(0, INT64_MAX, O, 0, END, INT64_MAX, {**L, "limit": 1, "burst": INT64_MAX}),
    ],
    leaky_duration=[
        R(0, 1, U, 0, END, 0, {**L, "limit": 1, "duration": INT64_MAX}),
        R(0, 1, O, 0, END, INT64_MAX, {**L, "limit": 1, "duration": INT64_MAX}),
    ],
    leaky_never=[R(0, 1, O, 0, END, INT64_MAX, {**L, "limit": 0, "duration": INT64_MAX})],
)
def test_numbers_at_the_ends_of_int64(rows: Rows) -> None:
    """The largest limits, hits and windows are counted exactly, and no answer leaves int64."""
    follow(rows, limit=INT64_MAX)


@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
def test_a_late_request_near_the_epoch_stays_in_int64(algorithm: int) -> None:
    """A wait that is longer than int64 holds is told as its largest value."""
    rows = [R(0, 10, U, 0, INT64_MAX, 0), R(0, 99, O, 0, INT64_MAX, INT64_MAX, seen=-10_000)]
    follow(rows, 0, duration=INT64_MAX, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", [TOKEN, LEAKY])
@pytest.mark.parametrize("behavior", [1, 2, 16, 1 | 16])
def test_behaviors_without_effect_on_one_node(algorithm: int, behavior: int) -> None:
    """NO_BATCHING, GLOBAL and MULTI_REGION change no answer of the bucket's owner."""
    rows = [R(0, 10, U, 0, 1000, 0), R(0, 0, U, 0, 1000, 0), R(1000, 10, U, 0, 2000, 0)]
    follow(rows, algorithm=algorithm, behavior=behavior)


@pytest.mark.parametrize(("first", "then"), [(TOKEN, LEAKY), (LEAKY, TOKEN)])
def test_another_algorithm_starts_a_new_bucket(first: int, then: int) -> None:
    """A changed algorithm forgets what was consumed, each time it changes."""
    a, b = {"algorithm": first}, {"algorithm": then}
    rows = [
        R(0, 10, U, 0, 1000, 0, a),
        R(0, 10, U, 0, 1000, 0, b),
        R(0, 10, U, 0, 1000, 0, a),
        R(0, 1, O, 0, 1000, 1000 if first == TOKEN else 100, a),
    ]
    follow(rows)
