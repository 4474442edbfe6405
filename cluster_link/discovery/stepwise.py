"""JSON read in small steps: the value is json.loads' own, and the interpreter is let go of on the way.

Decides where a long text is cut.  Knows no Kubernetes and no clock: `rest` is handed in.

A call into C holds the interpreter until it is done, 2.5 ms for a slice of 1,000 endpoints and ten times that for a
list of ten.  So the outer containers are walked here, and json reads what stands in them one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_decoder = json.JSONDecoder()
_space = re.compile(r"[ \t\n\r]*").match
REST_EVERY = 8_192
"""Characters read between two rests: about 0.1 ms."""


def loads(text: str, depth: int, rest: Callable[[], object]) -> Any:
    """What json.loads gives.

    depth: how many containers deep the walk goes; the values below are read in one go each, so they should be short.
    rest: called every REST_EVERY characters.  Raises ValueError for a text that is not one JSON value.
    """
    walk = _Walk(text, rest)
    value = walk.value(walk.skip(0), depth)
    if walk.skip(walk.end) != len(text):
        raise ValueError(f"more than one JSON value, at {walk.end}")
    return value


class _Walk:
    """One text.  end: where the value read last ends."""

    def __init__(self, text: str, rest: Callable[[], object]) -> None:
        self._text = text
        self._rest = rest
        self._rested = 0
        self.end = 0

    def skip(self, at: int) -> int:
        found = _space(self._text, at)
        return found.end() if found else at

    def value(self, at: int, depth: int) -> Any:
        if at - self._rested >= REST_EVERY:
            self._rested = at
            self._rest()
        first = self._text[at : at + 1]
        if depth and first == "{":
            return self._object(at + 1, depth - 1)
        if depth and first == "[":
            return self._array(at + 1, depth - 1)
        value, self.end = _decoder.raw_decode(self._text, at)
        return value

    def _object(self, at: int, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        at = self.skip(at)
        if self._text[at : at + 1] == "}":
            self.end = at + 1
            return made
        while True:
            name = self.value(at, 0)
            at = self.skip(self.end)
            if not isinstance(name, str) or self._text[at : at + 1] != ":":
                raise ValueError(f"not JSON at {at}")
            made[name] = self.value(self.skip(at + 1), depth)
            at = self._next(self.end, "}")
            if at < 0:
                return made

    def _array(self, at: int, depth: int) -> list[Any]:
        made: list[Any] = []
        at = self.skip(at)
        if self._text[at : at + 1] == "]":
            self.end = at + 1
            return made
        while True:
            made.append(self.value(at, depth))
            at = self._next(self.end, "]")
            if at < 0:
                return made

    def _next(self, at: int, closing: str) -> int:
        """Where the next item begins; -1 after the last."""
        at = self.skip(at)
        mark = self._text[at : at + 1]
        if mark == closing:
            self.end = at + 1
            return -1
        if mark != ",":
            raise ValueError(f"not JSON at {at}")
        return self.skip(at + 1)
