"""A limit as an application names it, and the ways to write a window."""

from __future__ import annotations

from datetime import timedelta

import msgpack
import pytest

from sidecar.errors import InvalidRequest
from sidecar.limit import Limit, parse_window
from sidecar.messages import INT64_MAX, Algorithm, Behavior, RateLimit


@pytest.mark.parametrize(
    ("per", "duration"),
    [
        (0, 0),
        (1, 1),
        (INT64_MAX, INT64_MAX),
        (timedelta(milliseconds=1), 1),
        (timedelta(days=1, seconds=1, milliseconds=1), 86_401_001),
        (timedelta(0), 0),
        ("250ms", 250),
        ("1s", 1000),
        ("5m", 300_000),
        ("12h", 43_200_000),
        ("1d", 86_400_000),
        ("2w", 1_209_600_000),
        ("0s", 0),
        ("007s", 7000),
        (" 10 s ", 10_000),
        ("60 ms", 60),
    ],
)
def test_ways_to_write_a_window(per: str | int | timedelta, duration: int) -> None:
    """A window is ms, a timedelta, or a number with its unit."""
    assert parse_window(per) == (duration, False)
    assert Limit("n", 1, per).duration == duration


@pytest.mark.parametrize(
    ("per", "number"),
    [
        ("calendar minute", 0),
        ("calendar hour", 1),
        ("calendar day", 2),
        ("calendar week", 3),
        ("calendar month", 4),
        ("calendar year", 5),
        ("  calendar   day ", 2),
    ],
)
def test_calendar_windows(per: str, number: int) -> None:
    """A calendar interval becomes its number and sets the Gregorian behavior beside the caller's own."""
    assert parse_window(per) == (number, True)
    limit = Limit("n", 1, per, behavior=Behavior.DRAIN_OVER_LIMIT)
    assert (limit.duration, limit.behavior) == (number, 32 | 4)


@pytest.mark.parametrize(
    "per",
    [
        "",
        "s",
        "10",
        "1.5s",
        "-1s",
        "+1s",
        "1 x",
        "1S",
        "1sm",
        "1mss",
        "1s 1m",
        "1,000s",
        "1_000s",
        "9" * 5000 + "s",  # more digits than int() reads
        "²s",
        "٣s",
        "calendar",
        "calendar ",
        "calendar decade",
        "calendarday",
        "Calendar day",
        1.5,
        1.0,
        None,
        True,
        b"1s",
        [1],
        (1, "s"),
    ],
    ids=lambda per: ascii(per)[:20],
)
def test_windows_that_are_not(per: object) -> None:
    """Anything else is refused at once, with what may be written and what was."""
    with pytest.raises(InvalidRequest) as caught:
        Limit("n", 1, per)  # type: ignore[arg-type]
    assert 'a window is an int of ms, a timedelta, "<number><ms|s|m|h|d|w>" or "calendar <minute|' in str(caught.value)
    assert str(caught.value).endswith(f"not {per!r}")


def test_a_window_of_parts_of_a_millisecond_is_refused() -> None:
    """A timedelta is never rounded."""
    with pytest.raises(InvalidRequest, match="whole milliseconds"):
        Limit("n", 1, timedelta(microseconds=1500))


@pytest.mark.parametrize(
    "per", [-1, timedelta(milliseconds=-1), INT64_MAX + 1, "9223372036854775808ms", "99999999999999999w"]
)
def test_a_window_out_of_range_is_refused(per: str | int | timedelta) -> None:
    """A window below 0 or beyond int64 names the field and its range."""
    with pytest.raises(InvalidRequest, match="field 'duration' must lie in 0"):
        Limit("n", 1, per)


@pytest.mark.parametrize(
    ("algorithm", "number"),
    [("token", 0), ("leaky", 1), (0, 0), (1, 1), (Algorithm.TOKEN_BUCKET, 0), (Algorithm.LEAKY_BUCKET, 1)],
)
def test_ways_to_name_an_algorithm(algorithm: str | int, number: int) -> None:
    """An algorithm is its short name, its number or the enum's member."""
    assert Limit("n", 1, "1s", algorithm=algorithm).algorithm == number


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"algorithm": "bucket"}, 'unknown algorithm \'bucket\'; use "token" or "leaky"'),
        ({"algorithm": ""}, "unknown algorithm ''"),
        ({"algorithm": 2}, "unknown algorithm 2"),
        ({"algorithm": None}, "field 'algorithm' must be an integer"),
        ({"algorithm": True}, "field 'algorithm' must be an integer, not bool"),
        ({"name": ""}, "field 'name' cannot be empty"),
        ({"name": None}, "field 'name' must be a string"),
        ({"limit": -1}, "field 'limit' must lie in"),
        ({"limit": 1.5}, "field 'limit' must be an integer, not float"),
        ({"limit": True}, "field 'limit' must be an integer, not bool"),
        ({"burst": -1}, "field 'burst' must lie in"),
        ({"behavior": 64}, "unknown behavior 64"),
        ({"behavior": Behavior.DURATION_IS_GREGORIAN}, "duration 1000 is no Gregorian interval"),
    ],
)
def test_a_wrong_limit_cannot_be_made(changed: dict[str, object], why: str) -> None:
    """A mistake in a limit shows where the limit is made, and names the field."""
    values: dict[str, object] = {"name": "n", "limit": 1, "per": "1s", **changed}
    with pytest.raises(InvalidRequest) as caught:
        Limit(**values)  # type: ignore[arg-type]
    assert str(caught.value).startswith(why)


def test_a_request_of_a_limit() -> None:
    """A limit's request carries all its terms, the key, and the hits (1 if not said)."""
    limit = Limit("n", 10, "1m", algorithm="leaky", burst=20, behavior=Behavior.DRAIN_OVER_LIMIT)
    assert limit.request("k") == RateLimit("n", "k", 1, 10, 60_000, 1, 32, 20)
    assert limit.request("k", -3) == RateLimit("n", "k", -3, 10, 60_000, 1, 32, 20)


@pytest.mark.parametrize(("key", "hits"), [("", 1), ("k" * 1025, 1), (None, 1), ("k", 1.0), ("k", 2**63), ("k", True)])
def test_a_wrong_request_of_a_limit(key: object, hits: object) -> None:
    """A wrong key or number of hits is refused."""
    with pytest.raises(InvalidRequest):
        Limit("n", 10, "1m").request(key, hits)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [Limit("n", 10, "1m"), Limit("é" * 300, INT64_MAX, 1, burst=9, fallback="deny")])
@pytest.mark.parametrize("key", ["k", "k" * 31, "k" * 32, "a:b/c d" * 36, "k" * 255])
def test_a_hit_of_a_plain_key_is_packed_as_msgpack_would(limit: Limit, key: str) -> None:
    """Joined from parts, with every form of the length before the key, it is what packing the request gives."""
    assert limit.packed_hit(key) == msgpack.packb([limit.wire(key, 1)])


class Text(str):
    """As a template's safe string is."""


@pytest.mark.parametrize("key", ["", "k" * 256, "é", Text("k"), None, 5, b"k"])
def test_a_hit_of_an_unusual_key_is_not_packed_so(key: object) -> None:
    """What has to be looked at more closely is left to who does."""
    assert Limit("n", 10, "1m").packed_hit(key) is None  # type: ignore[arg-type]


def test_limits_compare_by_their_fields() -> None:
    """However its window was written, the same limit is equal, and prints its fields."""
    assert Limit("n", 1, "1s") == Limit("n", 1, 1000, algorithm=0) == Limit("n", 1, timedelta(seconds=1))
    assert Limit("n", 1, "1s") != Limit("n", 1, "2s")
    assert len({Limit("n", 1, "1s"), Limit("n", 1, 1000)}) == 1
    text = repr(Limit("n", 1, "1s"))
    assert text.startswith("Limit(")
    assert "duration=1000" in text
