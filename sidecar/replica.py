"""GLOBAL: answers from copies of other nodes' buckets, and what was admitted by them, to be reported to the owners.

Decides when a copy may answer, what its owner is told and in which order, and that nothing admitted is forgotten or
told twice.  Knows no ring, no link and no clock: whoever owns those sends what `take` gives and hands back what came
of it.  The arithmetic is bucket.py's, here as at the owner.

A copy is never more than the owner's last state with what this node has admitted since charged on top.  A copy that
was used, if only by a peek or a refusal, is renewed with the next report, so that a refund, a reset or a raised limit
of one node is seen by all that ask.

A window is known by its end, which is the owner's and the same on all nodes: what was admitted in one that is over
is not charged to the next, whatever the nodes' clocks say.  A leaky bucket has no windows; there, hits are told as
two sums, so that owner and copy agree to a token: what had leaked again by the run's last hit, at the time of its
first, and the rest at that of its last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from sidecar.bucket import Bucket, LeakyBucket, State, Terms, TokenBucket, make
from sidecar.calendar import Calendar
from sidecar.errors import InvalidRequest
from sidecar.messages import INT64_MAX, INT64_MIN, Algorithm, Behavior, Verdict, validate
from sidecar.table import DEFAULT_MAX_CLOCK_SKEW, Table

DEFAULT_MAX_REPLICAS = 100_000
_MAX_REMEMBERED = 4_096
"""Distinct terms remembered; past it the memory starts anew."""
_ROOM_LOOK = 64
"""Replicas looked at for an ended one when there is no room: a bound on one insertion's work."""
_ENTRY_SIZE = 8
_RESET = int(Behavior.RESET_REMAINING)
_DRAIN = int(Behavior.DRAIN_OVER_LIMIT)

Entry: TypeAlias = tuple[int, int, int, int, int, int, int, bool]
"""hits, limit, duration, algorithm, behavior, burst, at, refused: see Table.charge."""


class Report(NamedTuple):
    """What one node did to one bucket, in order; without entries it only asks for the owner's state."""

    name: str
    unique_key: str
    entries: tuple[Entry, ...]


class Counters(NamedTuple):
    """unsent: runs of hits that no owner has answered for yet.  turned_away: requests for the owner since there was
    no room.  lost_reports, lost_hits: what may have been told or not, and is not told again."""

    replicas: int
    unsent: int
    turned_away: int
    lost_reports: int
    lost_hits: int


class _Run:
    """Hits of the same terms, one after the other; or one reset; or refusals.

    at: the window's end (token), or the first hit's time (leaky).
    own: a leaky bucket that took just these hits, which tells how much of them had leaked by the last one.
    sealed: nothing may be added.
    """

    __slots__ = ("at", "hits", "own", "refused", "sealed", "terms")

    def __init__(self, terms: Terms, hits: int, at: int, refused: bool, sealed: bool) -> None:
        self.terms = terms
        self.hits = hits
        self.at = at
        self.refused = refused
        self.sealed = sealed or terms.reset
        self.own: LeakyBucket | None = None
        if terms.algorithm == Algorithm.LEAKY_BUCKET and hits > 0:
            self.own = LeakyBucket(terms, at)
            self.own.charge(hits, terms, at, False)

    def takes(self, terms: Terms, hits: int, end: int, refused: bool = False) -> bool:
        """Whether adding these hits changes nothing for the owner; `end` is the window's (token)."""
        if self.sealed or self.terms is not terms or self.refused != refused:
            return False
        if terms.algorithm == Algorithm.TOKEN_BUCKET:
            return self.at == end and INT64_MIN <= self.hits + hits <= INT64_MAX
        return (self.hits > 0) == (hits > 0) and INT64_MIN <= self.hits + hits <= INT64_MAX

    def add(self, hits: int, at: int) -> None:
        """Add hits that `takes` allowed; `at` as in __init__."""
        self.hits += hits
        if self.own is not None:
            self.own.charge(hits, self.terms, at, False)
        elif self.terms.algorithm == Algorithm.LEAKY_BUCKET:
            self.at = max(self.at, at)

    def absorb(self, later: _Run) -> bool:
        """Take in the run that follows; False if the owner must be told of both."""
        if later.sealed or not self.takes(later.terms, later.hits, later.at, later.refused):
            return False
        own, other = self.own, later.own
        if own is None or other is None:
            self.add(later.hits, later.at)
            return True
        if own.unit != other.unit:
            return False
        leaked = max(0, other.at - own.at) * own.terms.limit
        own.level = max(own.level - leaked + later.hits * own.unit, other.level)
        own.at = max(own.at, other.at)
        self.hits += later.hits
        return True

    def sums(self) -> list[tuple[int, int]]:
        """(hits, at) as the owner charges them."""
        if self.own is None:
            return [(self.hits, self.at)]
        kept = min(self.hits, -(-self.own.level // self.own.unit))
        if self.own.at == self.at or kept == self.hits:
            return [(self.hits, self.own.at)]
        return [(self.hits - kept, self.at), (kept, self.own.at)]

    def entries(self) -> list[Entry]:
        limit, duration, algorithm, behavior, burst = self.terms.stated()
        if self.terms.reset:
            behavior |= _RESET
        if self.refused and self.terms.drain:
            behavior |= _DRAIN
        return [(hits, limit, duration, algorithm, behavior, burst, at, self.refused) for hits, at in self.sums()]


class _Replica:
    """A copy of an owner's bucket.

    runs: admitted and not sent.  flight: the report under way, and `flying` the runs in it; one at a time.
    queued: to be reported, which it is when runs are unsent or the copy was used since the last report.
    """

    __slots__ = ("bucket", "flight", "flying", "key", "queued", "runs")

    def __init__(self, key: tuple[str, str], bucket: Bucket) -> None:
        self.key = key
        self.bucket = bucket
        self.runs: list[_Run] = []
        self.flying: list[_Run] | None = None
        self.flight: Report | None = None
        self.queued = False


class Replicas:
    """A node's copies of other nodes' GLOBAL buckets, and the reports to their owners.

    max_replicas: the most copies, and the most unsent runs of hits.  A copy with unsent hits is never dropped; where
    there is no room the owner is to be asked, so that the bound loses nothing.
    max_clock_skew, calendar: as the table's.

    The answers of one owner must be handed in (`adopt`, `settled`) in the order in which it gave them; otherwise a
    copy may show an older state until it is next renewed.  Each report that `take` gives must end in `settled`,
    `returned` or `lost`; ending it again has no effect.
    """

    def __init__(
        self,
        max_replicas: int = DEFAULT_MAX_REPLICAS,
        max_clock_skew: int = DEFAULT_MAX_CLOCK_SKEW,
        calendar: Calendar | None = None,
    ) -> None:
        self._max = max_replicas
        self._skew = max_clock_skew
        self._calendar = calendar or Calendar()
        self._held: dict[tuple[str, str], _Replica] = {}
        self._due: deque[_Replica] = deque()
        self._terms: dict[tuple[int, int, int, int, int], Terms] = {}
        self._sweep_rest: list[_Replica] = []
        self._unsent = self._turned_away = self._lost_reports = self._lost_hits = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def due(self) -> int:
        """How many buckets the next reports are about."""
        return len(self._due)

    @property
    def counters(self) -> Counters:
        return Counters(len(self._held), self._unsent, self._turned_away, self._lost_reports, self._lost_hits)

    def decide(self, now: int, request: Sequence[Any]) -> Verdict | None:
        """Judge one request, nine values as for Table.decide, by this node's copy; None: the owner must be asked.

        That is so without a copy, when its window has ended (only the owner opens one, so that reset_time is the same
        on all nodes; a leaky one that was full for a whole window counts as ended), for a window of 0 ms, and when what
        was admitted could not be remembered.
        Raises InvalidRequest for values that are no request; a name or key that is none gets None.
        """
        name, unique_key, hits, limit, duration, algorithm, behavior, burst, created_at = request
        try:
            terms = self._terms[limit, duration, algorithm, behavior, burst]
            replica = self._held.get((name, unique_key))
        except (KeyError, TypeError, RecursionError):
            terms = self._agree(request)
            replica = self._held.get((name, unique_key))
        whole = type(hits) is type(limit) is type(duration) is type(algorithm) is type(behavior) is type(burst) is int
        if created_at is not None or not whole or not INT64_MIN <= hits <= INT64_MAX:
            validate(request)
        if replica is None:
            return None
        at = now
        if created_at is not None:
            at = min(max(created_at, now - self._skew), now + self._skew)
        bucket = _usable(replica, terms, hits, at)
        if bucket is None:
            return None
        # Also a peek is told if it changes the terms: it may move a window's end, or the rate of a leak.
        tells = bool(hits) or terms.reset or (bucket.terms is not terms and bucket.terms.stated() != terms.stated())
        last = None
        if tells:
            last = replica.runs[-1] if replica.runs else None
            end = bucket.end if isinstance(bucket, TokenBucket) else 0
            # A refund that ends the memory of a refusal is told by itself, or the owner would go on remembering.
            if last is not None and (terms.reset or bucket.refused or not last.takes(terms, hits, end)):
                last = None
            if self._unsent >= self._max and (last is None or terms.drain):
                self._turned_away += 1
                return None
        known = bucket.terms
        forgets = bucket.refused
        verdict = bucket.hit(hits, terms, at)
        replica.bucket = bucket
        if tells:
            refused = hits > 0 and bool(verdict[0])
            if refused or not hits:
                if bucket.refused or not refused or known is not terms:
                    self._note(replica, terms, bucket.refused and refused)
            elif last is not None:
                last.add(hits, at)
            else:
                self._remember(replica, terms, hits, forgets and hits < 0)
        if not replica.queued:
            replica.queued = True
            if replica.flight is None:
                self._due.append(replica)
        return verdict

    def state(self, name: str, unique_key: str) -> State | None:
        """A copy in plain values, with what this node admitted since; None if there is none."""
        replica = self._held.get((name, unique_key))
        return None if replica is None else replica.bucket.export()

    def adopt(self, now: int, name: str, unique_key: str, state: object) -> bool:
        """Hold the state that came with the owner's answer to a request; False if there was no room for it, or
        its window has ended by this node's clock.

        What this node admitted and the owner has not answered for is charged on top of it.
        Raises InvalidRequest for what no bucket exports, and then changes nothing.
        """
        bucket = make(state, self._calendar)
        replica = self._held.get((name, unique_key))
        if replica is not None:
            self._rebase(replica, bucket)
            return True
        if _idle(bucket, now):
            return False
        if len(self._held) >= self._max and not self.sweep(now, _ROOM_LOOK):
            return False
        self._held[name, unique_key] = _Replica((name, unique_key), bucket)
        return True

    def take(self, limit: int) -> list[Report]:
        """The next reports, together of at most `limit` (2 or more) entries; one without entries counts as one.

        A bucket whose report is under way is left for later, so that its order is kept whatever becomes of that.
        """
        batch: list[Report] = []
        room = limit
        while self._due and room > 0:
            replica = self._due.popleft()
            entries: list[Entry] = []
            taken = 0
            for run in replica.runs:
                more = run.entries()
                if len(entries) + len(more) > room:
                    break
                entries += more
                taken += 1
            if replica.runs and not taken and batch:
                self._due.appendleft(replica)
                break
            replica.flying = replica.runs[:taken]
            del replica.runs[:taken]
            replica.queued = bool(replica.runs)
            replica.flight = Report(*replica.key, tuple(entries))
            batch.append(replica.flight)
            room -= len(entries) or 1
        return batch

    def settled(self, report: Report, state: object) -> None:
        """The owner has charged this report, and its bucket's state is this; None if it holds no such bucket.

        Raises InvalidRequest for what no bucket exports; the report then counts as lost.
        """
        replica = self._find(report)
        if replica is None:
            return
        if state is None:
            self._land(replica)
            if not replica.runs:
                del self._held[replica.key]
            else:
                self._queue_again(replica)
            return
        try:
            bucket = make(state, self._calendar)
        except InvalidRequest:
            self.lost([report])
            raise
        self._land(replica)
        self._rebase(replica, bucket)
        self._queue_again(replica)

    def returned(self, reports: Iterable[Report]) -> None:
        """These have certainly not reached their owner: they are told again, before what was admitted since.

        They queue behind other buckets' reports, so that an owner who is away holds up nobody else's.
        """
        for report in reports:
            replica = self._find(report)
            if replica is None:
                continue
            flying = replica.flying or []
            if flying and replica.runs and flying[-1].absorb(replica.runs[0]):
                del replica.runs[0]
                self._unsent -= 1
            replica.runs = flying + replica.runs
            replica.flying = replica.flight = None
            replica.queued = True
            self._due.append(replica)

    def lost(self, reports: Iterable[Report]) -> None:
        """These may have reached their owner or not, so they are not told again; the owner's state will show it."""
        for report in reports:
            replica = self._find(report)
            if replica is None:
                continue
            if report.entries:
                self._lost_reports += 1
                self._lost_hits += sum(max(0, entry[0]) for entry in report.entries if not entry[-1])
            self._land(replica)
            replica.queued = True
            self._due.append(replica)

    def sweep(self, now: int, budget: int) -> int:
        """Look at the next `budget` copies and forget those that have ended with nothing to report; how many.

        Bounded, and no answer depends on it: an ended copy answers nothing.
        """
        forgotten = 0
        if not self._sweep_rest:
            self._sweep_rest = list(self._held.values())
        for _ in range(min(budget, len(self._sweep_rest))):
            replica = self._sweep_rest.pop()
            told = not replica.queued and replica.flight is None
            if told and _idle(replica.bucket, now) and self._held.get(replica.key) is replica:
                del self._held[replica.key]
                forgotten += 1
        return forgotten

    def _agree(self, request: Sequence[Any]) -> Terms:
        """The terms of a valid request, remembered for those that say the same."""
        validate(request)
        if len(self._terms) >= _MAX_REMEMBERED:
            self._terms.clear()
        stated = (request[3], request[4], request[5], request[6], request[7])
        terms = self._terms[stated] = Terms(*stated, self._calendar)
        return terms

    def _remember(self, replica: _Replica, terms: Terms, hits: int, sealed: bool) -> None:
        """Begin a run with what the copy has just admitted."""
        at = replica.bucket.end if isinstance(replica.bucket, TokenBucket) else replica.bucket.at
        replica.runs.append(_Run(terms, 0 if terms.reset else hits, at, False, sealed))
        self._unsent += 1

    def _note(self, replica: _Replica, terms: Terms, refused: bool) -> None:
        """Remember that the copy was asked under these terms, was reset by them or has refused, if that is news."""
        at = replica.bucket.end if isinstance(replica.bucket, TokenBucket) else replica.bucket.at
        run = _Run(terms, 0, at, refused, False)
        if replica.runs and replica.runs[-1].absorb(run):
            return
        # Past the bound nothing is lost by silence: no hits are admitted here, and with DRAIN_OVER_LIMIT none refused.
        if self._unsent < self._max:
            replica.runs.append(run)
            self._unsent += 1

    def _find(self, report: Report) -> _Replica | None:
        replica = self._held.get((report.name, report.unique_key))
        return replica if replica is not None and replica.flight is report else None

    def _land(self, replica: _Replica) -> None:
        self._unsent -= len(replica.flying or ())
        replica.flying = replica.flight = None

    def _queue_again(self, replica: _Replica) -> None:
        if replica.queued:
            self._due.append(replica)

    def _rebase(self, replica: _Replica, bucket: Bucket) -> None:
        """Put the owner's bucket in the copy's place, and on top of it what the owner has not answered for."""
        for run in (replica.flying or []) + replica.runs:
            for hits, at in run.sums():
                if bucket.algorithm != run.terms.algorithm:
                    bucket = _opened(run.terms, at)
                if not bucket.over(at, self._skew):
                    bucket.charge(hits, run.terms, at, run.refused)
        replica.bucket = bucket


def settle(table: Table, now: int, report: Sequence[Any]) -> State | None:
    """The owner's side of a report: charge its entries in order; the bucket's state after it, None if there is none.

    Raises InvalidRequest at what is no report and at the first entry that is none; those before it are charged.
    """
    if not isinstance(report, tuple | list) or len(report) != 3 or not isinstance(report[2], tuple | list):
        raise InvalidRequest("a report is an array of name, unique_key and entries")
    name, unique_key, entries = report
    state = None
    for entry in entries:
        if not isinstance(entry, tuple | list) or len(entry) != _ENTRY_SIZE or type(entry[-1]) is not bool:
            raise InvalidRequest(f"a report's entry is an array of {_ENTRY_SIZE} values, the last one a boolean")
        *terms, at, refused = entry
        if at is None:
            raise InvalidRequest("field 'at' must be an integer, not NoneType")
        state = table.charge(now, (name, unique_key, *terms, None), at, refused)
    if not entries:
        validate((name, unique_key, 0, 0, 0, 0, 0, 0, None))
        state = table.state(name, unique_key)
    return state


def _usable(replica: _Replica, terms: Terms, hits: int, at: int) -> Bucket | None:
    """The bucket that may judge a request of these terms at `at`; None if that is for the owner."""
    bucket = replica.bucket
    if not (terms.duration or terms.gregorian):
        return None  # each is judged by itself, and nothing is remembered
    if bucket.algorithm != terms.algorithm:
        # The owner starts a new bucket.  Asked now, it would hear of hits on the old one only after that.
        behind = replica.runs or replica.flight is not None
        if not behind or not (hits or terms.reset):
            return None
        return LeakyBucket(terms, at) if terms.algorithm == Algorithm.LEAKY_BUCKET else TokenBucket(terms, at)
    if _idle(bucket, at):
        return None
    if isinstance(bucket, TokenBucket) and not terms.reset and at >= bucket.end_under(terms):
        return None
    return bucket


def _idle(bucket: Bucket, now: int) -> bool:
    """Whether a copy has served its time: its window has ended, or a leaky one has been full for a whole window."""
    return bucket.ended(now if isinstance(bucket, TokenBucket) else now - bucket.unit)


def _opened(terms: Terms, at: int) -> Bucket:
    """A new bucket for a charge at `at`."""
    if terms.algorithm == Algorithm.LEAKY_BUCKET:
        return LeakyBucket(terms, at)
    return TokenBucket(terms, terms.window_start(at))
