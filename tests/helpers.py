"""What the unit tests share: one place that calls the table, the service and the check of a request's values."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgpack
import pytest

from sidecar.calendar import Calendar
from sidecar.errors import InvalidRequest
from sidecar.messages import RateLimit, Verdict, validate
from sidecar.service import Service
from sidecar.table import Table

T = 1_700_000_000_000
"""Where most tests start, epoch ms: 2023-11-14T22:13:20Z."""
NOON = 1_700_049_600_000
"""2023-11-15T12:00:00Z, the start of a minute and of an hour."""
U, O = 0, 1  # noqa: E741  the two verdicts, as the tables write them
TOKEN, LEAKY = 0, 1
GREGORIAN, RESET, DRAIN = 4, 8, 32
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class Answer(NamedTuple):
    """An answer as service frames carry it."""

    request_id: int
    outcome: int
    payload: Any
    node: str


def fields(
    name: object = "n",
    unique_key: object = "k",
    hits: object = 1,
    limit: object = 10,
    duration: object = 1000,
    algorithm: object = TOKEN,
    behavior: object = 0,
    burst: object = 0,
    created_at: object = None,
) -> tuple[object, ...]:
    """A request's nine values in the order of the wire; valid but for what a test puts in."""
    return (name, unique_key, hits, limit, duration, algorithm, behavior, burst, created_at)


def decide(table: Table, now: int, request: Sequence[object]) -> Verdict:
    """The table's verdict on a request's nine values."""
    return table.decide(now, request)


def ask(table: Table, now: int, **values: object) -> Verdict:
    """The table's verdict on `fields(**values)`."""
    return decide(table, now, fields(**values))


def fault(**values: object) -> str:
    """Why `fields(**values)` are no valid request, or ""; both ends must say the same."""
    request = fields(**values)
    texts = []
    for check in (lambda: validate(request), lambda: RateLimit(*request), lambda: decide(Table(), T, request)):  # type: ignore[arg-type]
        try:
            check()
            texts.append("")
        except InvalidRequest as error:
            texts.append(str(error))
    assert texts == texts[:1] * 3, "the client, the table and the check itself disagree"
    return texts[0]


def pack(value: object) -> bytes:
    """A frame's body: one msgpack value."""
    body: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return body


def answer(service: Service, now: int, body: bytes) -> Answer:
    """The service's answer to a request frame's body, opened by msgpack alone."""
    found = service.answer(body, now, Nobody())
    assert found is not None
    assert found[:4] == struct.pack(">I", len(found) - 4), "the answer is one whole frame"
    version, *rest = msgpack.unpackb(found[4:], unicode_errors="surrogateescape")
    assert version == 1
    return Answer(*rest)


class Nobody:
    """Who asks a service by itself: all its answers come at once."""

    gone = False

    def send(self, data: bytes) -> None:
        raise AssertionError("nothing here is decided elsewhere")


def call(service: Service, now: int, op: int, payload: object, request_id: int = 1) -> Answer:
    """The service's answer to an operation."""
    return answer(service, now, pack((1, request_id, op, payload)))


def epoch_ms(text: str) -> int:
    """Epoch ms of an ISO time that names its offset."""
    at = datetime.fromisoformat(text)
    assert at.tzinfo is not None, f"{text} names no offset"
    return round(at.timestamp() * 1000)


class Row(NamedTuple):
    """One request to a bucket and its answer; `terms` overrides the table's, and `seen` is its created_at."""

    at: int
    hits: int
    status: int
    remaining: int
    reset: int
    retry_after: int
    terms: dict[str, int] = {}  # noqa: RUF012  read only
    seen: int | None = None


Rows = list[Row]
R = Row


def follow(
    rows: Rows, start: int = T, zone: str = "UTC", *, limit: int = 10, duration: int = 1000, **terms: int
) -> None:
    """Ask row by row, of one bucket, and compare every field."""
    table = Table(max_clock_skew=10_000, calendar=Calendar(ZoneInfo(zone)))
    for number, row in enumerate(rows):
        asked = {"limit": limit, "duration": duration, **terms, **row.terms}
        created_at = None if row.seen is None else start + row.seen
        status, limited, left, reset, retry = ask(table, start + row.at, hits=row.hits, created_at=created_at, **asked)
        found = (status, limited, left, reset - start, retry)
        wanted = (row.status, asked["limit"], row.remaining, row.reset, row.retry_after)
        assert found == wanted, f"row {number}: {row}"


def cases(**named: Rows) -> pytest.MarkDecorator:
    """Parametrize a test by tables with names."""
    return pytest.mark.parametrize("rows", [pytest.param(rows, id=name) for name, rows in named.items()])
