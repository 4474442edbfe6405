"""List and watch: what is asked when, and what each trouble leads to.  No server, and time is a number."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_link.discovery.endpoints import Rules
from cluster_link.discovery.reflector import LONGEST_PAUSE, Heard, Lost, Reflector, Snapshot, Trouble
from cluster_link.membership import Peer
from tests.kube_server import error_event, failure
from tests.test_endpoints import a_slice, end

CASES = Path(__file__).parent / "cases" / "kubernetes"
GONE, REFUSED = "the end", "refused"


class Reply:
    """An answer.  pieces: of its body; a number lets time pass, a text is how the connection ends."""

    def __init__(self, server: Server, status: int, pieces: list[Any], after: float) -> None:
        self.status = status
        self.after = after
        self._server = server
        self._pieces = pieces
        self.closed = 0

    def pieces(self) -> Iterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, str):
                raise Trouble(piece)
            if isinstance(piece, bytes):
                yield piece
            else:
                self._server.now += piece

    def close(self) -> None:
        self.closed += 1


class Server:
    """The API and all that a reflector is handed.  answers: (status, pieces, Retry-After) in order; REFUSED is a
    server that is not there.  It says stop when there is no answer left."""

    def __init__(self, *answers: Any) -> None:
        self.now = 1_000.0
        self.answers = list(answers)
        self.asked: list[tuple[str, str | None]] = []
        self.at: list[float] = []
        self.connected = 0
        self.seconds: list[int] = []
        self.waits: list[float] = []
        self.told: list[Snapshot | Lost | Heard] = []
        self.replies: list[Reply] = []
        self.uniform = random.Random(1).uniform

    def connect(self) -> Server:
        self.connected += 1
        return self

    def list(self, version: str | None) -> Reply:
        return self._answer("list", version)

    def watch(self, version: str, seconds: int) -> Reply:
        self.seconds.append(seconds)
        return self._answer("watch", version)

    def _answer(self, verb: str, version: str | None) -> Reply:
        self.asked.append((verb, version))
        self.at.append(self.now)
        answer = self.answers.pop(0)
        if answer == REFUSED:
            raise Trouble("not reached: refused", renew=True)
        status, pieces, *after = answer
        self.replies.append(Reply(self, status, pieces, *(after or [0.0])))
        return self.replies[-1]

    def wait(self, seconds: float) -> bool:
        if seconds:
            self.waits.append(seconds)
            self.now += seconds
        return not self.answers

    def run(self, had: frozenset[Peer] = frozenset()) -> Server:
        """Reflect until the answers are used up."""
        Reflector(
            self.connect, Rules("grpc"), self.told.append, self.wait, lambda: self.now, self.uniform, had=had
        ).run()
        assert all(reply.closed for reply in self.replies)
        return self

    @property
    def snapshots(self) -> Sequence[set[str]]:
        """The names of each set told."""
        return [{peer.name for peer in told.members} for told in self.told if isinstance(told, Snapshot)]

    @property
    def troubles(self) -> Sequence[str]:
        """Each trouble told."""
        return [told.why for told in self.told if isinstance(told, Lost)]


def item(name: str, version: int, *uids: str) -> dict[str, Any]:
    """A slice of these pods."""
    made = a_slice(*(end(f"10.0.0.{uid[1:]}", uid) for uid in uids))
    return made | {"metadata": {"name": name, "resourceVersion": str(version)}}


def listed(version: int, *items: dict[str, Any]) -> Any:
    """A list's answer."""
    body = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(version)}, "items": list(items) or None}
    return 200, [json.dumps(body).encode()]


def event(kind: str, one: dict[str, Any]) -> bytes:
    """A line of a watch."""
    return json.dumps({"type": kind, "object": one}).encode() + b"\n"


def bookmark(version: int) -> bytes:
    """A line that holds a version alone."""
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}, "endpoints": None, "ports": None})


def watched(*pieces: Any) -> Any:
    """A watch's answer."""
    return 200, list(pieces)


def test_list_then_watch() -> None:
    """The first list may come from a cache; watches go on from the version of every event, bookmarks too."""
    server = Server(
        listed(7, item("a", 5, "u1")),
        watched(event("ADDED", item("b", 8, "u2")), bookmark(12), 300.0),
        watched(event("DELETED", item("a", 13, "u1")), 300.0),
        watched(),
    ).run()
    assert server.asked == [("list", "0"), ("watch", "7"), ("watch", "12"), ("watch", "13")]
    assert server.snapshots == [{"u1"}, {"u1", "u2"}, {"u2"}]
    assert not server.troubles
    assert 240 <= server.seconds[0] <= 360


def test_an_unchanged_set_is_told_once() -> None:
    """Events that change nothing of ours, and lists that say the same, are signs of life only."""
    server = Server(
        listed(7, item("a", 5, "u1")),
        watched(event("MODIFIED", item("a", 8, "u1"))),
        watched(error_event(410, "Expired")),
        listed(9, item("b", 9, "u1")),
        watched(300.0),
    ).run()
    assert server.snapshots == [{"u1"}]
    assert sum(isinstance(told, Heard) for told in server.told) >= 4


@pytest.mark.parametrize(
    ("answer", "renewed", "least", "trouble"),
    [
        (watched(error_event(410, "Expired", "too old")), 1, 0, ""),
        (watched(error_event(410, "Gone")), 1, 0, ""),
        ((410, [failure(410)]), 1, 0, ""),
        ((410, [b"<html>"]), 1, 0, ""),
        ((401, [failure(401)]), 2, 0, "watch: HTTP 401, told to say 401"),
        ((403, [failure(403, message="no\nlist")]), 1, 0, "watch: HTTP 403, no list"),
        ((429, [failure(429)], 5.0), 1, 5, "watch: HTTP 429, told to say 429"),
        ((503, [b""], 3.0), 1, 3, "watch: HTTP 503, it does not say why"),
        ((503, [failure(503, retryAfterSeconds=4)]), 1, 4, "watch: HTTP 503, told to say 503"),
        ((429, [failure(429)], 1e9), 1, 300, "watch: HTTP 429, told to say 429"),
        ((500, [failure(500)]), 1, 0, "watch: HTTP 500, told to say 500"),
        ((502, [b"<html>", GONE]), 1, 0, "watch: HTTP 502, it does not say why"),
        ((404, [b"{}"]), 1, 0, "watch: HTTP 404, it does not say why"),
        (watched(error_event(500, "InternalError")), 1, 0, "watch: HTTP 500, told to say 500"),
        (watched(error_event(504, "Timeout", "Too large", retryAfterSeconds=1)), 1, 1, "HTTP 504"),
        (watched(b'{"type":"ADDED"'), 1, 0, "the connection ended within an event"),
        (watched(b'{"type":"ADDED"', GONE), 1, 0, GONE),
        (watched(b"<html>\n"), 1, 0, "what was told is not JSON"),
        (watched(b"[" * 100_000 + b"\n"), 1, 0, "what was told is not JSON"),
        (watched(b"\xff\n"), 1, 0, "what was told is not JSON"),
        (watched(b"[]\n"), 1, 0, "what was told is not JSON"),
        (watched(b"{}\n"), 1, 0, "what was told is no event"),
        (watched(event("ADDED", {"metadata": []})), 1, 0, "an event without a version"),
        (watched(event("ADDED", item("x", 8) | {"endpoints": 7})), 1, 0, "x is no EndpointSlice"),
        (watched(event("ADDED", item("x", 8) | {"endpoints": ["y"]})), 1, 0, "x is no EndpointSlice"),
        (watched(), 1, 0, "its watches end at once"),
        (REFUSED, 2, 0, "not reached: refused"),
    ],
)
def test_troubles_of_a_watch(answer: Any, renewed: int, least: float, trouble: str) -> None:
    """After each the slices are listed anew, past the caches; how long is waited at least, and what is told; the
    members stand."""
    server = Server(listed(7, item("a", 5, "u1")), answer, listed(9, item("a", 5, "u1")), watched(300.0)).run()
    assert server.asked[2] == ("list", None)
    assert server.connected == renewed
    assert server.snapshots == [{"u1"}]
    assert trouble in "".join(server.troubles[:1])
    assert bool(server.troubles) == bool(trouble)
    assert least + 0.02 <= server.waits[0] <= least + 0.2


@pytest.mark.parametrize(
    "answer",
    [
        (200, [b"<html>"]),
        (200, [b'{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":[]}']),
        (200, [b'{"kind":"EndpointSliceList","items":[]}']),
        (200, [b'{"kind":"EndpointSliceList","metadata":{"resourceVersion":"1"},"items":[1]}']),
        (200, [b"{", GONE]),
        (403, [failure(403)]),
        (504, [failure(504, "Timeout", retryAfterSeconds=1)], 1.0),
        REFUSED,
    ],
)
def test_troubles_of_a_list(answer: Any) -> None:
    """What is no list of slices changes nothing, and is asked for again; a cache will do while nothing is known."""
    server = Server(answer, listed(9, item("a", 5, "u1")), watched(300.0)).run()
    assert server.asked == [("list", "0"), ("list", "0"), ("watch", "9")]
    assert server.snapshots == [{"u1"}]
    assert len(server.troubles) == 1


def test_recorded_errors() -> None:
    """What a 1.36 server says, in streams and as answers, is understood."""
    lines = (CASES / "instream-errors.jsonl").read_bytes().splitlines(keepends=True)
    for line, pause in zip(lines, (0, 0, 1), strict=True):
        server = Server(listed(7), watched(line), listed(9), watched(300.0)).run()
        assert server.asked[2] == ("list", None)
        assert pause <= server.waits[0] <= pause + 0.2
    for name in ("401.http", "403-anonymous.http", "list-rv-too-large.http"):
        head, _, body = (CASES / name).read_text().partition("\n\n")
        server = Server((int(head.split()[1]), [body.encode()]), listed(9), watched(300.0)).run()
        assert server.asked[1] == ("list", "0")
        assert head.split()[1] in server.troubles[0]


def test_nobody_after_somebody_is_confirmed() -> None:
    """An event that leaves nobody is not told before a fresh list says the same."""
    server = Server(
        listed(7, item("a", 5, "u1")),
        watched(event("MODIFIED", item("a", 8)), bookmark(9)),
        listed(8, item("a", 8, "u2")),
        watched(event("DELETED", item("a", 10)), 5.0),
        listed(10),
        watched(300.0),
    ).run()
    assert server.asked[2] == server.asked[4] == ("list", None)
    assert server.snapshots == [{"u1"}, {"u2"}, set()]
    assert not server.troubles


def test_nobody_while_the_server_is_away_is_not_told() -> None:
    """Without the fresh list the last members stand."""
    server = Server(listed(7, item("a", 5, "u1")), watched(event("DELETED", item("a", 8))), *[REFUSED] * 5).run()
    assert server.snapshots == [{"u1"}]


def test_a_cache_that_lists_nobody_is_not_believed() -> None:
    """The first list may be older than what an earlier reflector told."""
    server = Server(listed(3), listed(9, item("a", 5, "u1")), watched(300.0)).run(had=frozenset({Peer("u1", "x:1")}))
    assert server.asked == [("list", "0"), ("list", None), ("watch", "9")]
    assert server.snapshots == [{"u1"}]
    assert Server(listed(3), watched(300.0)).run().snapshots == [set()]


@pytest.mark.parametrize("between", [(200, [60.0, "silent in the midst of an answer"]), (503, [b"no server"]), REFUSED])
def test_a_restore(between: Any) -> None:
    """A server whose versions went backwards tells a watch from the old version nothing: however little was seen of
    its going, it is not watched before it was listed."""
    server = Server(
        listed(900, item("a", 5, "u1")),
        watched(10.0, GONE),
        between,
        listed(40, item("a", 5, "u2")),
        watched(event("ADDED", item("b", 41, "u3")), 300.0),
        watched(300.0),
    ).run()
    assert server.asked[-4:] == [("list", None), ("list", None), ("watch", "40"), ("watch", "41")]
    assert server.snapshots == [{"u1"}, {"u2"}, {"u2", "u3"}]


def test_all_is_listed_now_and_then() -> None:
    """Every 10 to 15 minutes, whatever the watches tell: an event that was lost is made up for."""
    rounds = [watched(bookmark(7), 300.0)] * 3
    server = Server(listed(7), *rounds, listed(7), *rounds, listed(7), watched(300.0))
    server.uniform = lambda a, b: b
    server.run()
    lists = [at for (verb, _), at in zip(server.asked, server.at, strict=True) if verb == "list"]
    assert [after - before for before, after in pairwise(lists)] == [900.0, 900.0]
    assert server.asked[4] == ("list", None)
    rounds = [watched(bookmark(7), 240.0)] * 2
    server = Server(listed(7), *rounds, watched(bookmark(7), 120.0), listed(7), watched(300.0))
    server.uniform = lambda a, b: a
    server.run()
    assert server.seconds[:3] == [240, 240, 120], "the last watch before a list is short"


@given(st.integers(0, 2**32))
def test_a_server_that_is_down_for_minutes(seed: int) -> None:
    """Attempts are spread, and bounded: at most 40 in the first minute, 20 in each after it; nothing else is told."""
    server = Server(listed(7, item("a", 5, "u1")), watched(1.0, GONE), *[REFUSED] * 300, listed(9), watched(300.0))
    server.uniform = random.Random(seed).uniform
    server.run()
    down = server.at[2:]
    for minute in range(1, 20):
        attempts = sum(minute * 60 <= at - down[0] < minute * 60 + 60 for at in down)
        assert 1 <= attempts <= 20, (minute, attempts)
    assert sum(at - down[0] < 60 for at in down) <= 40
    assert server.snapshots == [{"u1"}, set()], "the list at the end, fresh, says that nobody is left"
    assert max(server.waits) <= LONGEST_PAUSE


@pytest.mark.parametrize("watch", [(bookmark(9), GONE), (35.0, GONE)], ids=["an event", "35 quiet seconds"])
def test_a_good_watch_ends_the_patience(watch: Any) -> None:
    """After many troubles the pauses are long; an event, or half a minute without one, and the next is short again."""
    troubles = [(503, [b""])] * 12
    server = Server(listed(7), *troubles, listed(7), watched(*watch), listed(9), watched(300.0)).run()
    assert max(server.waits[:-1]) > 3
    assert server.waits[12] <= 0.2


@given(st.data())
def test_any_order_of_events(data: st.DataObject) -> None:
    """However slices were put, changed and taken away, and wherever the stream was cut into pieces and watches, the
    members are those of the slices that stand in the end."""
    uids = [f"u{number}" for number in range(1, 9)]
    slices: dict[str, list[str]] = {}
    lines = []
    for version in range(10, 10 + data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from("abc"))
        held = data.draw(st.lists(st.sampled_from(uids), min_size=1, max_size=4))
        if name in slices and len(slices) > 1 and data.draw(st.booleans()):
            del slices[name]
            lines.append(event("DELETED", item(name, version)))
        else:
            lines.append(event("MODIFIED" if name in slices else "ADDED", item(name, version, *held)))
            slices[name] = held
    split = data.draw(st.integers(0, len(lines)))
    watches = []
    for part in (lines[:split], lines[split:]):
        text = b"".join(part)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        watches.append(watched(*pieces, 300.0))
    server = Server(listed(7), *watches, watched(300.0)).run()
    assert server.snapshots[-1] == {uid for held in slices.values() for uid in held}
