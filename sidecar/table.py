"""Which buckets this node holds, and when one may be forgotten.

Decides where a bucket lies, which one goes when the table is full, and that forgetting is invisible.
Knows no socket and no clock; the arithmetic is bucket.py's.

Buckets lie in many small dicts, chosen by hash: a single dict of a million entries stops its process for
43 ms at its largest resize, one of these for 0.4 ms.  Each bucket also hangs in one of two rings, in the
order of last use: those that still had tokens after their last request, and the exhausted ones.  That
costs 16 bytes and 0.15 us a hit, and makes the least recently used one exact and free to find; sampling
(the way not taken) would let a flood of new keys push out a bucket in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sidecar.bucket import LeakyBucket, State, Terms, TokenBucket, check_instant, make, opened
from sidecar.calendar import Calendar
from sidecar.errors import InvalidRequest
from sidecar.messages import INT64_MAX, INT64_MIN, Algorithm, Verdict, text_fault, validate

DEFAULT_MAX_BUCKETS = 1_000_000
DEFAULT_MAX_CLOCK_SKEW = 10_000
_LINKS = ("key", "newer", "older")
_SHARD_TARGET = 16_384
_MIN_SHARDS = 64
_MAX_REMEMBERED = 4_096
"""Distinct terms, and distinct names, remembered; past it the memory starts anew."""
_EVICTION_LOOK = 64
"""Buckets looked at for an ended one before a live one is evicted: a bound on one insertion's work."""


class _TokenEntry(TokenBucket):
    __slots__ = _LINKS
    key: tuple[str, str]
    older: _Entry
    newer: _Entry


class _LeakyEntry(LeakyBucket):
    __slots__ = _LINKS
    key: tuple[str, str]
    older: _Entry
    newer: _Entry


_Entry = _TokenEntry | _LeakyEntry
Known = tuple[_Entry, int, Terms]
"""A request whose bucket and terms have been found: the bucket, the hits, the terms."""


class Counters(NamedTuple):
    """What has happened to buckets since the start.

    ended: forgotten because no answer could change.  evicted, evicted_exhausted: live ones lost to a
    full table, with tokens left and without.
    """

    buckets: int
    created: int
    ended: int
    evicted: int
    evicted_exhausted: int
    reset: int


class Table:
    """All buckets of a node, at most `max_buckets` of them.

    max_clock_skew: how far (ms) a request's `created_at` may lie from the node's clock; beyond, it is
    clamped.  A bucket is kept this much longer than its window, since a late request may still ask.
    """

    def __init__(
        self,
        max_buckets: int = DEFAULT_MAX_BUCKETS,
        max_clock_skew: int = DEFAULT_MAX_CLOCK_SKEW,
        calendar: Calendar | None = None,
    ) -> None:
        self._max = max_buckets
        self._skew = max_clock_skew
        self._calendar = calendar or Calendar()
        shards = _MIN_SHARDS
        while shards * _SHARD_TARGET < max_buckets:
            shards *= 2
        self._shards: list[dict[tuple[str, str], _Entry]] = [{} for _ in range(shards)]
        self._mask = shards - 1
        self._terms: dict[tuple[int, int, int, int, int], Terms] = {}
        self._names: dict[str, str] = {}
        nothing = Terms(0, 0, 0, 0, 0, self._calendar)
        self._spare = _ring(nothing)
        self._exhausted = _ring(nothing)
        self._gone = _ring(nothing)
        self._count = self._created = self._ended = self._evicted = self._evicted_exhausted = self._reset = 0
        self._sweep_shard = 0
        self._sweep_rest: list[_Entry] = []

    def __len__(self) -> int:
        return self._count

    @property
    def counters(self) -> Counters:
        return Counters(self._count, self._created, self._ended, self._evicted, self._evicted_exhausted, self._reset)

    def decide(self, now: int, request: Sequence[Any]) -> Verdict:
        """Judge one request, its nine values in the order of RateLimit, at `now` (this node's epoch ms).

        Raises InvalidRequest for values that are no request, however odd their types.
        """
        # Terms that are known and a bucket that exists were found valid when they came first, so the usual
        # hit is looked up, not checked anew.  The types are: True and 1.0 equal 1 in a dict's eyes.
        name, unique_key, hits, limit, duration, algorithm, behavior, burst, created_at = request
        try:
            terms = self._terms[limit, duration, algorithm, behavior, burst]
            key = (name, unique_key)
            shard = self._shards[hash(key) & self._mask]
            entry = shard.get(key)
        except (KeyError, TypeError, RecursionError):
            terms = self._agree(request)
            key = (name, unique_key)
            shard = self._shards[hash(key) & self._mask]
            entry = shard.get(key)
        whole = type(hits) is type(limit) is type(duration) is type(algorithm) is type(behavior) is type(burst) is int
        if created_at is not None or not whole or not INT64_MIN <= hits <= INT64_MAX:
            validate(request)
        at = now
        if created_at is not None:
            at = min(max(created_at, now - self._skew), now + self._skew)
        if entry is None or entry.algorithm != algorithm:
            entry = self._add(request, entry, terms, at, now)
        verdict = self.judge(entry, hits, terms, at)
        assert verdict is not None  # the bucket was found just now
        return verdict

    def find(self, request: Sequence[Any]) -> Known | None:
        """What `judge` needs to judge again what `decide` has just judged; None if its caller dated it."""
        name, unique_key, hits, limit, duration, algorithm, behavior, burst, created_at = request
        if created_at is not None:
            return None
        key = (name, unique_key)
        entry = self._shards[hash(key) & self._mask][key]
        return entry, hits, self._terms[limit, duration, algorithm, behavior, burst]

    def judge(self, entry: _Entry, hits: int, terms: Terms, at: int) -> Verdict | None:
        """Judge hits on a bucket that `find` gave, at `at`; None if it has been forgotten since."""
        newer = entry.newer
        if newer is self._gone:
            return None
        older = entry.older
        older.newer = newer
        newer.older = older
        verdict = entry.hit(hits, terms, at)
        ring = self._spare if verdict[2] else self._exhausted
        last = ring.older
        entry.older = last
        entry.newer = ring
        last.newer = entry
        ring.older = entry
        return verdict

    def charge(self, now: int, request: Sequence[Any], at: int | None = None, refused: bool = False) -> State:
        """Charge what another node admitted, also beyond the limit; the bucket's state after it.

        Negative hits, RESET_REMAINING and changed terms apply as those of an ordinary request do.  Nothing is refused;
        what is too old to count (its window was over before the bucket's began) is left out.
        at: when it was admitted: the end of its window (token bucket) or epoch ms (leaky), never taken for later
            than the clock skew allows.  None: when the request was created, else now.
        refused: the node refused the hits, so that they only count as a refusal; with DRAIN_OVER_LIMIT they empty
            the bucket.

        Raises InvalidRequest, and charges nothing, for values that are no request and no instant.
        """
        validate(request)
        name, unique_key, hits, limit, duration, algorithm, behavior, burst, created_at = request
        terms = self._terms.get((limit, duration, algorithm, behavior, burst)) or self._agree(request)
        leaky = algorithm == Algorithm.LEAKY_BUCKET
        entry = self._shards[hash((name, unique_key)) & self._mask].get((name, unique_key))
        latest = now + self._skew
        ended = False
        if at is None:
            at = now if created_at is None else min(max(created_at, now - self._skew), latest)
            if not leaky:
                end = 0
                if isinstance(entry, _TokenEntry) and at < entry.end and not terms.fresh:
                    end = entry.end_under(terms)
                ended = at >= end
                at = terms.window_end(at) if ended else end
        else:
            check_instant(algorithm, duration, behavior, at)
            at = min(at, latest if leaky else terms.window_end(latest))
            if entry is not None and entry.algorithm == algorithm and entry.over(at, self._skew):
                return entry.export()
        if entry is None or ended or entry.algorithm != algorithm:
            entry = self._add(request, entry, terms, at if leaky else terms.window_start(at), now)
        entry.charge(hits, terms, at, refused)
        self._use(entry)
        return entry.export()

    def state(self, name: str, unique_key: str) -> State | None:
        """A bucket in plain values, as its last request left it; None if there is none."""
        entry = self._shards[hash((name, unique_key)) & self._mask].get((name, unique_key))
        return None if entry is None else entry.export()

    def peek(self, now: int, name: str, unique_key: str) -> Verdict | None:
        """What a request of 0 hits under the bucket's own terms would be answered at `now`; None if there is no bucket.

        Judged on a copy: nothing is changed, not even which bucket was used last.
        """
        state = self.state(name, unique_key)
        if state is None:
            return None
        bucket = make(state, self._calendar)
        return bucket.hit(0, bucket.terms, now)

    def adopt(self, now: int, name: str, unique_key: str, state: object) -> None:
        """Hold a bucket of this exported state, in place of the one that is there; room is made as for any new one.

        Raises InvalidRequest for what no bucket exports, and then changes nothing.
        """
        why = text_fault("name", name) or text_fault("unique_key", unique_key)
        if why:
            raise InvalidRequest(why)
        stated, refused, numbers = opened(state)
        terms = self._terms.get(stated) or self._agree((name, unique_key, 0, *stated, None))
        kind = _LeakyEntry if terms.algorithm == Algorithm.LEAKY_BUCKET else _TokenEntry
        old = self._shards[hash((name, unique_key)) & self._mask].get((name, unique_key))
        self._use(self._hang(kind.restored(terms, refused, *numbers), name, unique_key, old, now))

    def forget(self, name: str, unique_key: str) -> bool:
        """Drop one bucket, so that its next request opens a new one; whether there was one."""
        entry = self._shards[hash((name, unique_key)) & self._mask].get((name, unique_key))
        if entry is None:
            return False
        self._remove(entry)
        self._reset += 1
        return True

    def sweep(self, now: int, budget: int) -> int:
        """Look at the next `budget` buckets and forget the ended ones; how many that were.

        Bounded, and no answer depends on it: calling it never, or after every request, changes none.
        """
        horizon = now - self._skew
        forgotten = 0
        shards = len(self._shards)
        while budget > 0:
            if not self._sweep_rest:
                if not shards:
                    break
                shards -= 1
                # A snapshot of one shard (0.1 ms at most), so that requests may come between two calls.
                self._sweep_rest = list(self._shards[self._sweep_shard].values())
                self._sweep_shard = (self._sweep_shard + 1) & self._mask
            rest = self._sweep_rest
            for _ in range(min(budget, len(rest))):
                budget -= 1
                entry = rest.pop()
                if entry.ended(horizon) and self._shards[hash(entry.key) & self._mask].get(entry.key) is entry:
                    self._remove(entry)
                    forgotten += 1
        self._ended += forgotten
        return forgotten

    def _agree(self, request: Sequence[Any]) -> Terms:
        """The terms of a valid request, remembered for those that say the same."""
        validate(request)
        if len(self._terms) >= _MAX_REMEMBERED:
            self._terms.clear()
        _, _, _, limit, duration, algorithm, behavior, burst, _ = request
        terms = Terms(limit, duration, algorithm, behavior, burst, self._calendar)
        self._terms[limit, duration, algorithm, behavior, burst] = terms
        return terms

    def _add(self, request: Sequence[Any], old: _Entry | None, terms: Terms, at: int, now: int) -> _Entry:
        """A new bucket for a valid request; `old`, of another algorithm, goes."""
        validate(request)
        kind = _LeakyEntry if terms.algorithm == Algorithm.LEAKY_BUCKET else _TokenEntry
        return self._hang(kind(terms, at), request[0], request[1], old, now)

    def _hang(self, entry: _Entry, name: str, unique_key: str, old: _Entry | None, now: int) -> _Entry:
        """Give a new bucket its place, that of `old` if there is one."""
        if old is not None:
            self._remove(old)
        if self._count >= self._max:
            self._make_room(now)
        # Every frame brings its own copy of a name; buckets of one limit share the first.
        if len(self._names) >= _MAX_REMEMBERED:
            self._names.clear()
        key = (self._names.setdefault(name, name), unique_key)
        entry.key = key
        last = self._spare.older
        entry.older = last
        entry.newer = self._spare
        last.newer = self._spare.older = entry
        self._shards[hash(key) & self._mask][key] = entry
        self._count += 1
        self._created += 1
        return entry

    def _use(self, entry: _Entry) -> None:
        """Make this bucket its ring's last used one; `judge` does so by itself, without the cost of a call."""
        entry.older.newer = entry.newer
        entry.newer.older = entry.older
        ring = self._spare if entry.spare() else self._exhausted
        last = ring.older
        entry.older = last
        entry.newer = ring
        last.newer = ring.older = entry

    def _make_room(self, now: int) -> None:
        """Forget one bucket: an ended one, else the least recently used with tokens, else an exhausted one."""
        horizon = now - self._skew
        for ring in (self._spare, self._exhausted):
            if ring.newer is not ring and ring.newer.ended(horizon):
                self._ended += 1
                self._remove(ring.newer)
                return
        if self.sweep(now, _EVICTION_LOOK):
            return
        if self._spare.newer is not self._spare:
            self._evicted += 1
            self._remove(self._spare.newer)
        else:
            self._evicted_exhausted += 1
            self._remove(self._exhausted.newer)

    def _remove(self, entry: _Entry) -> None:
        entry.older.newer = entry.newer
        entry.newer.older = entry.older
        # What `judge` knows a forgotten bucket by.  Not itself: such a cycle would never be freed, since the
        # daemon keeps the collector off the table.
        entry.newer = entry.older = self._gone
        del self._shards[hash(entry.key) & self._mask][entry.key]
        self._count -= 1


def _ring(terms: Terms) -> _Entry:
    """The fixed point of an empty ring: `newer` leads to the oldest entry, `older` to the newest."""
    ring = _TokenEntry(terms, 0)
    ring.older = ring.newer = ring
    return ring
