"""What Gubernator's published functional tests state, asked of a daemon with a clock that is moved.

Where an answer differs a comment says so, and docs/gubernator.md why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.clusters import free_port
from tests.daemons import EPOCH, DaemonProcess, running_daemon
from tests.v1_client import Stranger

U, O = 0, 1  # noqa: E741  the two verdicts, as the tables write them
TOKEN, LEAKY = 0, 1
GREGORIAN, RESET, DRAIN = 4, 8, 32


class Step(NamedTuple):
    """One request and its answer; then: ms that the clock moves on behind it; fields: what this request sets."""

    hits: int
    status: int
    remaining: int
    then: int = 0
    fields: dict[str, int] = {}  # noqa: RUF012  read only


S = Step


@pytest.fixture(scope="module")
def daemon() -> Iterator[tuple[DaemonProcess, Stranger]]:
    """A daemon whose clock stands until it is moved, and a client of its V1."""
    listen = f"127.0.0.1:{free_port()}"
    with running_daemon("--listen", listen) as process, Stranger(listen) as stranger:
        yield process, stranger


SEQUENCES: dict[str, tuple[dict[str, int], list[Step]]] = {
    "over the limit": ({"limit": 2, "duration": 9_000}, [S(1, U, 1), S(1, U, 0), S(1, O, 0)]),
    "token bucket": ({"limit": 2, "duration": 5}, [S(1, U, 1), S(1, U, 0, 100), S(1, U, 1)]),
    "token bucket, gregorian": (
        {"limit": 60, "duration": 0, "behavior": GREGORIAN},
        [S(1, U, 59), S(1, U, 58), S(58, U, 0), S(1, O, 0, 61_000), S(0, U, 60)],
    ),
    "token bucket, negative hits": (
        {"limit": 2, "duration": 5},
        [S(-1, U, 3), S(-1, U, 4), S(4, U, 0), S(-1, U, 1)],
    ),
    # A peek at the drained bucket is UNDER_LIMIT there: the first line of docs/gubernator.md's table.
    "drain, token bucket": (
        {"limit": 10, "duration": 30_000, "behavior": DRAIN},
        [S(0, U, 10), S(1, U, 9), S(100, O, 0), S(0, O, 0)],
    ),
    "drain, leaky bucket": (
        {"limit": 10, "duration": 30_000, "behavior": DRAIN, "algorithm": LEAKY},
        [S(0, U, 10), S(1, U, 9), S(100, O, 0), S(0, O, 0)],
    ),
    "leaky bucket": (
        {"limit": 10, "duration": 30_000, "algorithm": LEAKY},
        [
            S(1, U, 9, 1_000),
            S(1, U, 8, 1_000),
            S(1, U, 7, 1_500),
            S(0, U, 8, 3_000),
            S(0, U, 9),
            S(9, U, 0),
            S(1, O, 0, 3_000),
            S(0, U, 1, 60_000),
            S(0, U, 10, 60_000),
            S(10, U, 0, 29_000),
            S(9, U, 0, 3_000),
            S(1, U, 0, 1_000),
        ],
    ),
    "leaky bucket with a burst": (
        {"limit": 10, "duration": 30_000, "algorithm": LEAKY, "burst": 20},
        [
            S(1, U, 19, 1_000),
            S(1, U, 18, 1_000),
            S(1, U, 17, 1_500),
            S(0, U, 18, 3_000),
            S(0, U, 19),
            S(19, U, 0),
            S(1, O, 0, 3_000),
            S(0, U, 1, 60_000),
            S(0, U, 20, 1_000),
        ],
    ),
    "leaky bucket, gregorian": (
        {"limit": 60, "duration": 0, "behavior": GREGORIAN, "algorithm": LEAKY},
        [S(1, U, 59, 500), S(1, U, 58, 1_000), S(1, U, 58)],
    ),
    "leaky bucket, negative hits": (
        {"limit": 10, "duration": 30_000, "algorithm": LEAKY},
        [S(1, U, 9), S(-1, U, 10), S(10, U, 0), S(-1, U, 1)],
    ),
    "leaky bucket, more hits than ms": (
        {"limit": 2_000, "duration": 1_000, "algorithm": LEAKY},
        [S(1, U, 1_999), S(100, U, 1_899)],
    ),
    "changed limits": (
        {"duration": 9_000},
        [
            S(1, U, 99, fields={"limit": 100}),
            S(1, U, 98, fields={"limit": 100}),
            S(1, U, 7, fields={"limit": 10}),
            S(1, U, 6, fields={"limit": 10}),
            S(1, U, 195, fields={"limit": 200}),
            S(1, U, 99, fields={"limit": 100, "algorithm": LEAKY}),
            # 9 and 8 there, which forgets the hit before: the second line of the table.
            S(1, U, 8, fields={"limit": 10, "algorithm": LEAKY}),
            S(1, U, 7, fields={"limit": 10, "algorithm": LEAKY}),
        ],
    ),
    "reset": (
        {"limit": 100, "duration": 9_000},
        [S(1, U, 99), S(1, U, 98), S(1, U, 100, fields={"behavior": RESET}), S(1, U, 99)],
    ),
    "no duration": ({"limit": 10, "duration": 0}, [S(1, U, 9)]),
    "no limit": ({"limit": 0, "duration": 10_000}, [S(1, O, 0)]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_published_sequence_is_answered_so(daemon: tuple[DaemonProcess, Stranger], name: str) -> None:
    """Status, limit and remaining of every step; a window's end lies ahead, and a leaky bucket's is when it is full."""
    process, stranger = daemon
    common, steps = SEQUENCES[name]
    with process.client() as clock:
        now = clock.set_clock(EPOCH)
        for number, step in enumerate(steps):
            fields: dict[str, Any] = {**common, **step.fields}
            (answer,) = stranger.ask({"name": name, "unique_key": "account:1", "hits": step.hits, **fields})
            where = f"step {number} of {name}"
            assert answer.error == "", where
            found = (answer.status, answer.limit, answer.remaining)
            assert found == (step.status, fields["limit"], step.remaining), where
            assert answer.reset_time >= now, where
            if fields == {"limit": 10, "duration": 30_000, "algorithm": LEAKY}:
                assert answer.reset_time // 1_000 == now // 1_000 + (10 - step.remaining) * 3, where
            now = clock.advance_clock(step.then)
