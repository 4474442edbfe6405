"""What a request may hold, and how requests and decisions compare, print and count as true."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import InvalidRequest, SidegateError
from sidecar.messages import (
    INT64_MAX,
    INT64_MIN,
    Algorithm,
    Behavior,
    Decision,
    RateLimit,
    Status,
    count_fault,
    int_fault,
    text_fault,
)
from tests.helpers import fault

TEXTS = ["name", "unique_key"]
COUNTS = ["limit", "duration", "burst"]
INTEGERS = ["hits", "algorithm", "behavior", *COUNTS]


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize(
    "value", ["a", "a" * 1024, "é" * 512, "€" * 341 + "a", "😀" * 256, "\0", "a_b", "a b\n"], ids=lambda v: ascii(v[:4])
)
def test_texts_that_are_valid(field: str, value: str) -> None:
    """A name and a key are any text of 1 to 1,024 bytes of UTF-8."""
    assert fault(**{field: value}) == ""


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "cannot be empty"),
        ("a" * 1025, "has 1025 bytes, more than 1024"),
        ("a" * 1023 + "é", "has 1025 bytes, more than 1024"),
        ("é" * 513, "has 1026 bytes, more than 1024"),
        ("€" * 342, "has 1026 bytes, more than 1024"),
        ("😀" * 257, "has 1028 bytes, more than 1024"),
        ("\ud800", "is not valid UTF-8"),
        ("a\udcff", "is not valid UTF-8"),
        (b"k", "must be a string, not bytes"),
        (None, "must be a string, not NoneType"),
        (1, "must be a string, not int"),
        (1.5, "must be a string, not float"),
        (True, "must be a string, not bool"),
        (["k"], "must be a string, not list"),
    ],
    ids=lambda v: ascii(v)[:12],
)
def test_texts_that_are_not(field: str, value: object, why: str) -> None:
    """Of any other name or key the field and the reason are told."""
    assert fault(**{field: value}) == f"field '{field}' {why}"
    assert text_fault(field, value) == f"field '{field}' {why}"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("hits", [INT64_MIN, -1, 0, 1, INT64_MAX]),
        *((field, [0, 1, INT64_MAX]) for field in COUNTS),
        ("algorithm", [0, 1, Algorithm.LEAKY_BUCKET]),
        ("behavior", [*range(4), *range(8, 64), Behavior.DRAIN_OVER_LIMIT | Behavior.GLOBAL]),
        ("created_at", [None, INT64_MIN, -1, 0, 1_700_000_000_000, INT64_MAX]),
    ],
)
def test_numbers_that_are_valid(field: str, values: list[object]) -> None:
    """Each number may take every value of its range, to both ends."""
    for value in values:
        # Gregorian intervals are 0 to 5, so that a duration of 1 goes with every behavior.
        assert RateLimit(**{"name": "n", "unique_key": "k", "hits": 1, "limit": 1, "duration": 1, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", [*INTEGERS, "created_at"])
@pytest.mark.parametrize("value", [True, False, 1.0, 0.5, float("nan"), "1", b"1", [1], None], ids=repr)
def test_numbers_of_a_wrong_type(field: str, value: object) -> None:
    """A number is an int, and neither a bool nor a float that looks like one; only created_at may be missing."""
    if field == "created_at" and value is None:
        assert fault(created_at=None) == ""
    else:
        assert fault(**{field: value}) == f"field '{field}' must be an integer, not {type(value).__name__}"


@pytest.mark.parametrize(
    ("field", "value", "low"),
    [
        ("hits", INT64_MAX + 1, INT64_MIN),
        ("hits", INT64_MIN - 1, INT64_MIN),
        ("hits", 10**40, INT64_MIN),
        ("created_at", INT64_MAX + 1, INT64_MIN),
        ("created_at", INT64_MIN - 1, INT64_MIN),
        *((field, -1, 0) for field in (*COUNTS, "algorithm", "behavior")),
        *((field, INT64_MAX + 1, 0) for field in (*COUNTS, "algorithm", "behavior")),
    ],
)
def test_numbers_out_of_range(field: str, value: int, low: int) -> None:
    """Of a number out of range the field and the range are told."""
    assert fault(**{field: value}) == f"field '{field}' must lie in {low}..{INT64_MAX}"
    assert int_fault(field, value, low) == f"field '{field}' must lie in {low}..{INT64_MAX}"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"algorithm": 2}, "unknown algorithm 2; 0 is TOKEN_BUCKET, 1 LEAKY_BUCKET"),
        ({"algorithm": INT64_MAX}, f"unknown algorithm {INT64_MAX}"),
        ({"behavior": 64}, "unknown behavior 64; known bits are 1, 2, 4, 8, 16 and 32"),
        ({"behavior": 64 | 8}, "unknown behavior 72"),
        ({"behavior": 4, "duration": 6}, "duration 6 is no Gregorian interval; 0 minute to 5 year"),
        ({"behavior": 63, "duration": INT64_MAX}, f"duration {INT64_MAX} is no Gregorian interval"),
    ],
)
def test_choices_that_do_not_exist(values: dict[str, int], why: str) -> None:
    """An unknown algorithm, behavior or calendar interval is named, with the known ones."""
    assert fault(**values).startswith(why)


@pytest.mark.parametrize("duration", range(6))
def test_every_gregorian_interval_is_valid(duration: int) -> None:
    """0 minute to 5 year are intervals."""
    assert fault(duration=duration, behavior=4) == ""


def test_the_first_wrong_field_is_told() -> None:
    """Of several faults, the first in the order of the fields is told."""
    assert fault(name="", unique_key=1, hits=None).startswith("field 'name'")
    assert fault(unique_key=1, hits=None).startswith("field 'unique_key'")
    assert fault(hits=None, behavior=64).startswith("field 'hits'")


ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(-(2**65), 2**65), st.floats(), st.text(), st.binary())


@given(st.lists(ANYTHING, min_size=9, max_size=9))
def test_whatever_is_asked_is_taken_or_refused(values: list[object]) -> None:
    """Any nine values are a request or an InvalidRequest with a reason, the same for client and daemon."""
    names = ("name", "unique_key", "hits", "limit", "duration", "algorithm", "behavior", "burst", "created_at")
    why = fault(**dict(zip(names, values, strict=True)))
    assert why == "" or why.startswith(("field '", "unknown ", "duration "))


@pytest.mark.parametrize(("count", "why"), [(0, "at least one"), (1, ""), (1000, ""), (1001, "1001 requests")])
def test_how_many_requests_one_check_holds(count: int, why: str) -> None:
    """A check holds 1 to 1,000 requests."""
    assert why in count_fault(count)
    assert bool(why) == bool(count_fault(count))


# --- RateLimit


def test_a_request_travels_in_the_order_of_its_fields() -> None:
    """The nine values go out in the order in which they are given, enums as their numbers."""
    request = RateLimit("n", "k", 1, 2, 3, Algorithm.LEAKY_BUCKET, Behavior.DRAIN_OVER_LIMIT, 4, 5)
    assert request.wire() == ("n", "k", 1, 2, 3, 1, 32, 4, 5)
    assert [type(value) for value in request.wire()] == [str, str, *[int] * 7]


def test_a_request_has_defaults() -> None:
    """A request that says no more is a token bucket's, without behavior, burst or time."""
    assert RateLimit("n", "k", 1, 2, 3).wire() == ("n", "k", 1, 2, 3, 0, 0, 0, None)


def test_an_invalid_request_cannot_be_made() -> None:
    """A mistake shows where it is made, as an error of ours that also is a ValueError."""
    with pytest.raises(InvalidRequest, match="field 'limit' must lie in") as caught:
        RateLimit("n", "k", 1, -1, 3)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, SidegateError)


# --- Values


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: RateLimit("n", "k", 1, 2, 3), RateLimit("n", "k", 1, 2, 4)),
        (lambda: Decision(Status.UNDER_LIMIT, 1, 2, 3), Decision(Status.OVER_LIMIT, 1, 2, 3)),
    ],
)
def test_values_compare_by_their_fields(make: Callable[[], object], other: object) -> None:
    """Two with the same fields are equal and hash alike; another field, or another class, makes them differ."""
    assert make() == make()
    assert hash(make()) == hash(make())
    assert len({make(), make(), other}) == 2
    assert make() != other
    assert make() != ("n", "k", 1, 2, 3)
    assert other != RateLimit("else", "k", 1, 2, 3)


def test_values_print_their_fields() -> None:
    """repr tells every field by name."""
    assert repr(RateLimit("n", "k", 1, 2, 3)) == (
        "RateLimit(name='n', unique_key='k', hits=1, limit=2, duration=3, algorithm=0, behavior=0, burst=0, "
        "created_at=None, fallback=0)"
    )
    text = repr(Decision(Status.ERROR, error="why"))
    assert text.startswith("Decision(status=<Status.ERROR: 2>, limit=0, remaining=0,")
    assert "error='why'" in text


@pytest.mark.parametrize(
    ("status", "allowed"), [(Status.UNDER_LIMIT, True), (Status.OVER_LIMIT, False), (Status.ERROR, False)]
)
def test_only_an_admission_is_true(status: Status, allowed: bool) -> None:
    """A decision is true exactly when the hits were admitted, so that no failure reads as a yes."""
    decision = Decision(status, remaining=5, error="" if allowed else "why")
    assert bool(decision) is allowed
    assert decision.allowed is allowed


@pytest.mark.parametrize(
    ("enum", "numbers"),
    [
        (Algorithm, {"TOKEN_BUCKET": 0, "LEAKY_BUCKET": 1}),
        (Status, {"UNDER_LIMIT": 0, "OVER_LIMIT": 1, "ERROR": 2}),
    ],
)
def test_names_have_the_public_numbers(enum: type[Algorithm | Status], numbers: dict[str, int]) -> None:
    """The numbers are those of the public API."""
    assert {member.name: int(member) for member in enum} == numbers


def test_behaviors_have_the_public_numbers() -> None:
    """The bits are those of the public API, and BATCHING is none of them."""
    names = ["NO_BATCHING", "GLOBAL", "DURATION_IS_GREGORIAN", "RESET_REMAINING", "MULTI_REGION", "DRAIN_OVER_LIMIT"]
    assert [int(Behavior[name]) for name in names] == [1, 2, 4, 8, 16, 32]
    assert int(Behavior.BATCHING) == 0
    assert sum(Behavior) == 63
