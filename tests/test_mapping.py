"""V1's messages and our values, without a door."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.gateway.json_v1 import BadBody, add_request, plain, requests_in
from sidecar.gateway.mapping import TooManyRequests, request_of, response_of
from sidecar.gateway.proto.gubernator_pb2 import GetRateLimitsReq, RateLimitReq, RateLimitResp
from tests.helpers import INT64_MAX, INT64_MIN, fields


def test_a_request_becomes_the_nine_values_of_a_frame() -> None:
    """In their order; created_at is None unless it was set, and 0 is a time like any other."""
    values: dict[str, Any] = {"hits": INT64_MIN, "limit": INT64_MAX, "duration": 3, "algorithm": 7, "behavior": 65}
    asked = RateLimitReq(name="n", unique_key="k", burst=4, **values)
    assert request_of(asked) == ("n", "k", INT64_MIN, INT64_MAX, 3, 7, 65, 4, None)
    asked.created_at = 0
    assert request_of(asked)[-1] == 0
    assert request_of(RateLimitReq()) == fields("", "", 0, 0, 0)


@pytest.mark.parametrize(
    ("answer", "status", "error", "metadata"),
    [
        ((0, 5, 4, 9, 0), 0, "", {"owner": "here"}),
        ((1, 5, 4, 9, 7, "there"), 1, "", {"owner": "there"}),
        ((1, 5, 4, 9, 7, "there", False, ""), 1, "", {"owner": "there"}),
        ((0, 5, 4, 9, 0, None, True, "away"), 0, "", {"owner": "here", "degraded": "away"}),
        ((0, 5, 4, 9, 0, None, True, ""), 0, "", {"owner": "here", "degraded": "true"}),
        ((2, 0, 0, 0, 0, None, False, "no"), 0, "no", {"owner": "here"}),
        ((2, 0, 0, 0, 0), 0, "no reason was given", {"owner": "here"}),
        ((2, 0, 0, 0, 0, "\udcff", False, "\udcfe"), 0, "?", {"owner": "?"}),
        ((0, "5", 4, 9, 0), 0, "what its owner sent is no decision", {"owner": "here"}),
        ((0, 2**63, 4, 9, 0), 0, "what its owner sent is no decision", {"owner": "here"}),
        ((0, 5, None, [], 0), 0, "what its owner sent is no decision", {"owner": "here"}),
    ],
)
def test_an_answer_says_who_decided_and_never_hides_an_error(
    answer: tuple[Any, ...], status: int, error: str, metadata: dict[str, str]
) -> None:
    """An owner always; `degraded` with its cause, and an error's text exactly where nothing was decided."""
    response = response_of(answer, "here")
    assert (response.status, response.error, dict(response.metadata)) == (status, error, metadata)
    assert bool(response.limit) == (not error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)) | st.just("9" * 5_000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*RateLimitReq.DESCRIPTOR.fields_by_name, "uniqueKey", "createdAt", "odd"])


@given(st.lists(st.dictionaries(NAMES, JSON, max_size=4) | JSON, max_size=3))
def test_no_value_of_json_breaks_the_reading(requests: list[Any]) -> None:
    """Any value at any place is read, or refused with the place at fault; nothing else comes out."""
    asked = GetRateLimitsReq()
    for place, request in enumerate(requests):
        told = f"requests[{place}]"
        try:
            add_request(asked, place, request)
        except BadBody as error:
            told = str(error)
        assert f"requests[{place}]" in told


@given(st.binary(max_size=60) | JSON.map(lambda value: repr(value).encode(errors="replace")))
def test_no_bytes_break_the_reading(body: bytes) -> None:
    """A body is an array of requests, or refused."""
    try:
        assert isinstance(requests_in(body), list)
    except (BadBody, TooManyRequests):
        pass


def test_an_odd_name_is_told_in_short() -> None:
    """A body cannot have its own length sent back."""
    with pytest.raises(BadBody) as refused:
        add_request(GetRateLimitsReq(), 0, {"x" * 100_000: 1})
    assert len(str(refused.value)) < 200


def test_defaults_are_written_out() -> None:
    """By the proto's own names."""
    assert plain(RateLimitResp()) == {
        "status": "UNDER_LIMIT",
        "limit": "0",
        "remaining": "0",
        "reset_time": "0",
        "error": "",
        "metadata": {},
    }
