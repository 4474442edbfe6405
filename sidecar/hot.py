"""Which keys are asked for most, lately: a bounded count, however many keys there are.

Decides which keys are kept, how far a count may be off, and which requests are looked at.  Knows no bucket, no socket
and no clock: time is an argument, and chance is handed in.

A `Counter` is the space-saving one: when it is full, a new key takes the place of one that was seen least, and that
one's count with it.  So of n sightings no count is off by more than n / capacity, and every key that was seen more
often than that is there.  Keys of one count stand together, so that a sighting is a few dict operations whatever the
capacity; a heap (the way not taken) would take the logarithm of it.

`HotKeys` counts in halves: the current one, and the one before it.  What is read is the sum of the two, so that a key
that cooled down is gone after two halves, and none is forgotten all at once.  Only one request in `every` is looked at,
on average and at random: looking at each one would cost a tenth of the throughput, and looking at exactly each
sixty-fourth would see but a few of the keys of a client that asks for them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)

HALF = 10.0
"""Seconds that a half lasts."""
EVERY = 64
"""Requests of which one is looked at."""
NEVER = 1 << 63
"""The number of a request that never comes."""


class Counter(Generic[Key]):
    """How often keys were seen, of at most `capacity` (>= 1) keys at a time.

    total: all sightings.  floor: no key that is not held was seen more often than this.
    """

    __slots__ = ("_alike", "_capacity", "_counts", "_least", "_too_much", "total")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: dict[Key, int] = {}
        self._too_much: dict[Key, int] = {}
        self._alike: dict[int, dict[Key, None]] = {}
        self._least = 0
        self.total = 0

    def __len__(self) -> int:
        return len(self._counts)

    def see(self, key: Key) -> None:
        """Count one sighting."""
        self.total += 1
        count = self._counts.get(key)
        if count is not None:
            alike = self._alike[count]
            del alike[key]
            if not alike:
                del self._alike[count]
                if count == self._least:
                    self._least = count + 1  # where this key now goes
        elif len(self._counts) < self._capacity:
            count = 0
            self._least = 1
        else:
            count = self._least
            alike = self._alike[count]
            gone = next(iter(alike))
            del alike[gone], self._counts[gone]
            self._too_much.pop(gone, None)
            self._too_much[key] = count
            if not alike:
                del self._alike[count]
                self._least = count + 1
        count += 1
        self._counts[key] = count
        alike = self._alike.get(count)  # type: ignore[assignment]
        if alike is None:
            self._alike[count] = {key: None}
        else:
            alike[key] = None

    @property
    def floor(self) -> int:
        return self._least if len(self._counts) >= self._capacity else 0

    def bounds(self, key: Key) -> tuple[int, int]:
        """How often a key was seen, at least and at most; also of a key that is not held."""
        count = self._counts.get(key)
        if count is None:
            return 0, self.floor
        return count - self._too_much.get(key, 0), count

    def __iter__(self) -> Iterator[Key]:
        """The keys held, in no order."""
        return iter(self._counts)


class Hot(NamedTuple):
    """A key and how many requests asked for it in the window read: at least and at most, of those looked at and
    multiplied by how many there are to each."""

    key: Any
    at_least: int
    at_most: int


class Hottest(NamedTuple):
    """What was asked for in the last `seconds`, the hottest first."""

    seconds: float
    requests: int
    names: list[Hot]
    keys: list[Hot]


class _Half:
    __slots__ = ("began", "keys", "names")

    def __init__(self, capacity: int, began: float) -> None:
        self.began = began
        self.keys: Counter[tuple[str, str]] = Counter(capacity)
        self.names: Counter[str] = Counter(capacity)


class HotKeys:
    """The keys and the names that requests ask for, over the last one to two halves.

    capacity: keys and names that are counted at a time.  now: seconds of any clock.
    chance: a number from 0 to below 1, a new one each call.  every: of so many requests one is looked at.
    """

    def __init__(self, capacity: int, now: float, chance: Callable[[], float], every: int = EVERY) -> None:
        self._capacity = capacity
        self._chance = chance
        self.every = every
        self._spread = 2 * every - 1
        self._half = _Half(capacity, now)
        self._before: _Half | None = None

    def next_look(self, number: int) -> int:
        """The number of the next request to look at, after that of this number: 1 to 2 * every - 1 later, `every` on
        average."""
        return number + 1 + int(self._chance() * self._spread)

    def look(self, key: tuple[str, str], number: int) -> int:
        """Look at the request of this number, which asks for `key` (name, unique_key); `next_look` after it."""
        half = self._half
        half.keys.see(key)
        half.names.see(key[0])
        return number + 1 + int(self._chance() * self._spread)

    def renew(self, now: float) -> None:
        """Begin a new half if this one is over; call it now and then."""
        if now - self._half.began >= HALF:
            # After a long silence the half that has just ended says nothing of lately.
            self._before = self._half if now - self._half.began < 2 * HALF else None
            self._half = _Half(self._capacity, now)

    def hottest(self, now: float, most: int) -> Hottest:
        """The `most` hottest names and keys, by what they were certainly asked for."""
        halves = [self._half] if self._before is None else [self._half, self._before]
        return Hottest(
            max(0.0, now - halves[-1].began),
            sum(half.keys.total for half in halves) * self.every,
            self._ranked([half.names for half in halves], most),
            self._ranked([half.keys for half in halves], most),
        )

    def _ranked(self, counters: list[Counter[Any]], most: int) -> list[Hot]:
        found = []
        for key in {key: None for counter in counters for key in counter}:
            bounds = [counter.bounds(key) for counter in counters]
            least, highest = (sum(side) * self.every for side in zip(*bounds, strict=True))
            found.append(Hot(key, least, highest))
        found.sort(key=lambda hot: (-hot.at_least, -hot.at_most, hot.key))
        return found[:most]
