"""A copy of what a Kubernetes API server lists, kept by one thread: list, watch, and what to do about each trouble.

Decides when to list and when to watch, from which version, how long to wait after which trouble, and that nobody is
listed only when a fresh list says so.  Knows no client library, no loop and no clock: how the server is spoken to, how
to wait and what is done with what was found are handed in.

Rules of the server's side: https://kubernetes.io/docs/reference/using-api/api-concepts/ (efficient detection of
changes, 410 Gone, bookmarks, resourceVersion), and what a 1.36 server was seen to do (tests/cases/kubernetes).
A version is opaque: never compared, only given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple, Protocol

from cluster_link.discovery import stepwise
from cluster_link.discovery.endpoints import Endpoint, Rules, endpoints_of, leaving_of, members_of
from cluster_link.membership import Peer

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
"""Seconds: the longest wait after the first trouble, and after many."""
_LEAST = 0.1
"""The part of a wait that is not left to chance, so that a minute's attempts have a bound: 20, once they are spread."""
_LONGEST_ASKED = 300.0
"""Seconds that a server may have us wait (Retry-After); longer ones are taken for a mistake of some proxy."""
_WATCH = (240, 360)
"""Seconds that one watch lasts; spread, or the watches of a rollout would end together for ever."""
_TOO_SHORT = 1.0
"""Seconds: a watch that ends sooner without having told anything counts as trouble, or it would be a loop."""
_INSURANCE = (600.0, 900.0)
"""Seconds between full lists, whatever the watches tell."""
_LONGEST_TEXT = 64 << 20
"""Bytes of one list or event: twenty times those of 10,000 pods."""
_FREED_AT_ONCE = 100
_WALK_LIST, _WALK_EVENT = 4, 3
"""How deep a list's endpoints and an event's lie."""


class Trouble(Exception):
    """What kept the server from being listened to, in one line.

    renew: read credentials again.  after: seconds the server asks for.
    """

    def __init__(self, why: str, renew: bool = False, after: float = 0.0) -> None:
        super().__init__(why)
        self.renew = renew
        self.after = min(max(after, 0.0), _LONGEST_ASKED)


class Answer(Protocol):
    """An answer whose headers are there.  after: seconds by its Retry-After, 0 if it has none."""

    status: int
    after: float

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes; raises Trouble when the connection ends before it does, or is silent too long."""

    def close(self) -> None:
        """Be done with it, read or not."""


class Api(Protocol):
    """The server.  Both raise Trouble if it gives no answer."""

    def list(self, version: str | None) -> Answer:
        """Every slice of the Service; version "0": as any cache has them, None: as they are."""

    def watch(self, version: str, seconds: int) -> Answer:
        """What happens to them after this version, for so long."""


class Snapshot(NamedTuple):
    """Who is a member, and which pods (their uid, else their address) and addresses are terminating."""

    members: frozenset[Peer]
    leaving: frozenset[str]


class Lost(NamedTuple):
    """The server is not listened to at present."""

    why: str


class Heard(NamedTuple):
    """The server has shown that the last snapshot still holds."""


class Reflector:
    """Keeps the copy while `run` runs.

    connect: opens the server's API, reading credentials anew; raises Trouble.  tell: is told a Snapshot when it
    differs from the last, Lost and Heard.  wait: waits so many seconds, True if it was told to stop meanwhile.
    now: seconds.  uniform: a number between two.  rest: see endpoints.py.
    had: the members of the last snapshot told before this reflector's time.
    """

    def __init__(
        self,
        connect: Callable[[], Api],
        rules: Rules,
        tell: Callable[[Snapshot | Lost | Heard], None],
        wait: Callable[[float], bool],
        now: Callable[[], float],
        uniform: Callable[[float, float], float],
        rest: Callable[[], object] = lambda: None,
        had: frozenset[Peer] = frozenset(),
    ) -> None:
        self._connect = connect
        self._rules = rules
        self._tell = tell
        self._wait = wait
        self._now = now
        self._uniform = uniform
        self._rest = rest
        self._api: Api | None = None
        self._slices: dict[str, tuple[Endpoint, ...]] = {}
        self._told: Snapshot | None = None
        self._had = bool(had)
        # What to list next: as any cache has it until something is known, then None; nothing while a watch can go on.
        self._list_from: str | None = "0"
        self._must_list = True
        self._list_due = 0.0
        self._version = ""
        self._longest = FIRST_PAUSE

    def run(self) -> None:
        """Until `wait` says to stop."""
        while not self._wait(0):
            try:
                if self._api is None:
                    self._api = self._connect()
                if self._must_list or self._now() >= self._list_due:
                    self._list(self._api)
                self._watch(self._api)
            except Trouble as trouble:
                if self._wait(0) or self._wait(self._pause(trouble)):
                    return

    def _pause(self, trouble: Trouble) -> float:
        """Take note of a trouble; seconds to wait."""
        # Whatever it was, the server may have come back from a backup, with lower versions.  It does not refuse a watch
        # from the old one: it is silent until it has passed that version, and never tells what happened before.
        self._must_list = True
        if trouble.renew:
            self._api = None
        if str(trouble):
            self._tell(Lost(str(trouble)))
        pause = self._uniform(self._longest * _LEAST, self._longest)
        self._longest = min(self._longest * 2, LONGEST_PAUSE)
        # On top of what the server asks for, since it asks it of all its clients at once.
        return trouble.after + pause

    def _list(self, api: Api) -> None:
        fresh = self._list_from is None
        answer = api.list(self._list_from)
        try:
            if answer.status != 200:
                raise self._refused(answer, "list")
            text = b"".join(_bounded(answer.pieces()))
        finally:
            answer.close()
        found = self._read(text, _WALK_LIST)
        version = _version(found)
        # Whatever else answers in the server's place, a proxy's page or another API's list, lists nobody.
        if found.get("kind") != "EndpointSliceList" or not version:
            raise Trouble("what was listed is no list of EndpointSlices")
        slices = {}
        for item in found.get("items") or ():
            slices[_name(item)] = self._endpoints(item)
        self._slices, self._version = slices, version
        self._must_list, self._list_from = False, None
        self._list_due = self._now() + self._uniform(*_INSURANCE)
        self._publish(fresh)

    def _watch(self, api: Api) -> None:
        if self._must_list:
            return
        began = self._now()
        seconds = min(self._uniform(*_WATCH), self._list_due - began)
        answer = api.watch(self._version, max(1, int(seconds)))
        events = 0
        try:
            if answer.status != 200:
                raise self._refused(answer, "watch")
            self._tell(Heard())
            for line in _lines(answer.pieces()):
                events += 1
                self._take(self._read(line, _WALK_EVENT))
                self._longest = FIRST_PAUSE
                self._tell(Heard())
                if self._must_list or self._wait(0):
                    return
        finally:
            answer.close()
            if self._now() - began >= LONGEST_PAUSE:
                self._longest = FIRST_PAUSE  # a quiet Service behind a proxy that ends what is idle
        if not events and self._now() - began < _TOO_SHORT:
            raise Trouble("its watches end at once")

    def _take(self, event: dict[str, Any]) -> None:
        kind, item = event.get("type"), event.get("object")
        if not isinstance(item, dict):
            raise Trouble("what was told is no event")
        if kind == "ERROR":
            raise _error(item)
        version = _version(item)
        if not version:
            raise Trouble("an event without a version")
        self._version = version
        if kind == "DELETED":
            self._slices.pop(_name(item), None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[_name(item)] = self._endpoints(item)
        else:
            return  # a bookmark, or a kind that a later server may add: its version is all it says
        self._publish(fresh=False)

    def _endpoints(self, item: Any) -> tuple[Endpoint, ...]:
        try:
            found = endpoints_of(item, self._rules, self._rest)
        except (AttributeError, TypeError, LookupError):
            raise Trouble(f"{_name(item)} is no EndpointSlice") from None
        # Given back piece by piece: freeing a thousand at once holds the interpreter for as long as reading them.
        endpoints = item.get("endpoints") or []
        while endpoints:
            del endpoints[-_FREED_AT_ONCE:]
            self._rest()
        return found

    def _publish(self, fresh: bool) -> None:
        every = list(chain.from_iterable(self._slices.values()))
        members = members_of(every, self._rest)
        self._rest()
        found = Snapshot(members, leaving_of(every))
        self._rest()
        if not found.members and self._had and not fresh:
            self._must_list, self._list_from = True, None
            return
        self._had = bool(found.members)
        if found != self._told:
            self._told = found
            self._tell(found)

    def _read(self, text: bytes, depth: int) -> dict[str, Any]:
        try:
            found = stepwise.loads(text.decode(), depth, self._rest)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Trouble("what was told is not JSON")
        return found

    def _refused(self, answer: Answer, verb: str) -> Trouble:
        """What another status than 200 means; the body says more than the status, if it can be read."""
        try:
            said = self._read(b"".join(_bounded(answer.pieces())), 0)
        except Trouble:
            said = {}
        return _error({"code": answer.status, **_status(said)}, answer.after, verb)


def _error(status: dict[str, Any], after: float = 0.0, verb: str = "watch") -> Trouble:
    """What a Status means, told in a stream or as an answer's body."""
    code, reason = status.get("code"), status.get("reason")
    details = status.get("details") or {}
    asked = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    if isinstance(asked, int):
        after = max(after, float(asked))
    if code == 410 or reason in ("Expired", "Gone"):
        return Trouble("")  # no trouble of the server's: what we knew is too old for it
    why = f"{verb}: HTTP {code}, {status.get('message') or reason or 'it does not say why'}"
    why = "".join(letter if letter.isprintable() else " " for letter in why)[:300]
    return Trouble(why, renew=code == 401, after=after)


def _status(said: dict[str, Any]) -> dict[str, Any]:
    return {
        name: said[name] for name in ("reason", "message", "details") if said.get("kind") == "Status" and name in said
    }


def _version(item: object) -> str:
    return _metadata(item, "resourceVersion")


def _name(item: object) -> str:
    return _metadata(item, "name")


def _metadata(item: object, field: str) -> str:
    metadata = item.get("metadata") if isinstance(item, dict) else None
    text = metadata.get(field) if isinstance(metadata, dict) else None
    return text if isinstance(text, str) else ""


def _bounded(pieces: Iterator[bytes]) -> Iterator[bytes]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > _LONGEST_TEXT:
            raise Trouble(f"more than {_LONGEST_TEXT >> 20} MiB in one answer")
        yield piece


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The lines that the pieces make; an end in the midst of one is a connection that was cut."""
    waiting: list[bytes] = []
    length = 0
    for piece in pieces:
        *whole, rest = piece.split(b"\n")
        for end in whole:
            line = b"".join((*waiting, end))
            waiting, length = [], 0
            if line.strip():
                yield line
        waiting.append(rest)
        length += len(rest)
        if length > _LONGEST_TEXT:
            raise Trouble(f"more than {_LONGEST_TEXT >> 20} MiB in one event")
    if b"".join(waiting).strip():
        raise Trouble("the connection ended within an event")
