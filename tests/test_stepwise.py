"""JSON read in small steps is JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_link.discovery.stepwise import REST_EVERY, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=30,
)


def strictly(text: str, depth: int) -> Any:
    """The value, or "" for a text that is none."""
    try:
        return loads(text, depth, lambda: None)
    except ValueError:
        return ""


@given(VALUES, st.integers(0, 6), st.sampled_from([None, 1, "\t"]))
def test_the_same_value(value: Any, depth: int, indent: Any) -> None:
    """Whatever the depth and the spaces."""
    assert loads(json.dumps(value, indent=indent), depth, lambda: None) == value


@given(VALUES, st.integers(0, 4), st.data())
def test_the_same_texts_are_refused(value: Any, depth: int, data: st.DataObject) -> None:
    """A text with a letter more, less or changed is taken by both or by neither, and means the same."""
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.sampled_from(["", "{", "]", ",", ":", '"', "1", " ", "x", "\\"])) + text[at + 1 :]
    try:
        expected: Any = json.loads(text)
    except ValueError:
        expected = ""
    assert repr(strictly(text, depth)) == repr(expected)


@pytest.mark.parametrize("text", ["", " ", "[", "{", "[1,]", '{"a":1,}', "{1:2}", "[1 2]", "1 2", "nul", '{"a"}', "]"])
def test_no_value(text: str) -> None:
    """What is no JSON is refused at every depth."""
    for depth in range(3):
        with pytest.raises(ValueError, match=r"."):
            loads(text, depth, lambda: None)


def test_rests() -> None:
    """The interpreter is let go of in proportion to the text, and for a short one never."""
    rests = 0

    def rest() -> None:
        nonlocal rests
        rests += 1

    text = json.dumps({"items": [{"endpoints": [{"addresses": ["10.0.0.1"], "number": n} for n in range(2_000)]}]})
    loads(text, 4, rest)
    assert len(text) / REST_EVERY / 2 < rests <= len(text) / REST_EVERY
    rests = 0
    loads("[1, 2, 3]", 4, rest)
    assert rests == 0
