"""What is asked: one hit, the same for every contender, and the calls that a worker makes of them.

Decides keys and limits.  All is made from the scene's seed, so that every contender is asked the same in the same
order.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from benchmarks.load import LIMIT, NAME

WINDOW_S = 3600
"""Long enough that no window ends while it is measured."""
GLOBAL = 2
"""Gubernator's Behavior bit; ours is the same."""


class Hit(NamedTuple):
    """One hit of a limit of so many an hour."""

    name: str
    key: str
    limit: int = LIMIT
    behavior: int = 0


Call = list[Hit]


def scattered(number: int) -> str:
    """The key of an account's number: as long for all, and unlike its neighbour's from the first letter.

    Gubernator's hash puts keys that differ in their last letters close together, and so often all on one node.
    """
    return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}"


def one_each(who: int, keys: int) -> list[Call]:
    """One hit a call, this worker's own keys, in random order."""
    return _shuffled([[Hit(NAME, f"account:{who}:{number}")] for number in range(keys)], who)


def two_limits(who: int, keys: int) -> list[Call]:
    """Two limits of one account a call, as an API's request checks them."""
    names = (NAME, "requests_per_hour")
    return _shuffled([[Hit(name, f"account:{who}:{number}") for name in names] for number in range(keys)], who)


def batches(size: int, keys: int) -> list[Call]:
    """`size` hits a call, each key once before any comes again."""
    every = [Hit(NAME, f"account:0:{number}") for number in range(max(size, keys))]
    return [every[first : first + size] for first in range(0, len(every) - size + 1, size)]


def live(keys: int, who: int, calls: int) -> list[Call]:
    """One hit a call, at random of so many keys that all workers share."""
    chance = random.Random(who)
    return [[Hit(NAME, scattered(chance.randrange(keys)))] for _ in range(calls)]


def filling(keys: int, first: int, step: int, size: int) -> list[Call]:
    """The keys of `live`, each once, `size` a call: this worker's share, every `step`th call from `first`."""
    starts = range(first * size, keys, step * size)
    return [[Hit(NAME, scattered(number)) for number in range(start, min(start + size, keys))] for start in starts]


def abuse(who: int, calls: int) -> tuple[list[Call], list[Call]]:
    """95 calls in 100 over their limit: (what uses the limits up, then the calls)."""
    chance = random.Random(who)
    spent = [Hit("logins", f"abuser:{who}:{number}", limit=1) for number in range(100)]
    good = [Hit(NAME, f"account:{who}:{number}") for number in range(100)]
    # Drawn without luck, so that a short run has the share too.
    kinds = [spent] * 19 + [good]
    return [[hit] for hit in spent], _shuffled([[chance.choice(kinds[number % 20])] for number in range(calls)], who)


def _shuffled(calls: list[Call], seed: int) -> list[Call]:
    random.Random(seed).shuffle(calls)
    return calls
