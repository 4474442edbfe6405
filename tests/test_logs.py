"""Log lines as data, and trouble that repeats told seldom."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog

from sidecar.logs import LEVELS, Repeats, make_logger


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


class Broken(io.StringIO):
    """A stream whose reader has gone."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.tried = 0

    def write(self, text: str) -> int:
        """Fail."""
        self.tried += 1
        raise self.error


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """The JSON lines on a stream."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


# --- Lines


@pytest.mark.parametrize("form", ["json", "auto"])
def test_a_line_is_one_json_object(form: str) -> None:
    """On what is no terminal, an event is one line of JSON with its level, its time and its fields."""
    stream = io.StringIO()
    make_logger("info", form, stream).info("daemon_ready", socket="/srv/x\n.sock", pid=7, none=None)
    (line,) = lines(stream)
    at = datetime.fromisoformat(line.pop("timestamp"))
    assert at.tzinfo == UTC
    assert line == {"event": "daemon_ready", "level": "info", "socket": "/srv/x\n.sock", "pid": 7, "none": None}
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("form", "stream"), [("console", io.StringIO()), ("auto", Terminal()), ("console", Terminal())]
)
def test_a_line_for_people(form: str, stream: io.StringIO) -> None:
    """On a terminal, or when asked for, a line is no JSON but tells event and fields."""
    make_logger("info", form, stream).info("daemon_ready", pid=7)
    text = stream.getvalue()
    assert "daemon_ready" in text
    assert "pid" in text
    assert not text.startswith("{")


@pytest.mark.parametrize("level", LEVELS)
def test_levels_below_the_lowest_are_left_out(level: str) -> None:
    """Just the chosen level and those above are written."""
    stream = io.StringIO()
    log = make_logger(level, "json", stream)
    for name in LEVELS:
        getattr(log, name)("event")
    assert [line["level"] for line in lines(stream)] == list(LEVELS)[list(LEVELS).index(level) :]


def test_an_exception_is_a_field_of_its_line() -> None:
    """A traceback stands in the line's `exception`, so that a line stays a line."""
    stream = io.StringIO()
    log = make_logger("info", "json", stream)
    try:
        raise RuntimeError("the reason")
    except RuntimeError:
        log.error("internal_error", exc_info=True)
    (line,) = lines(stream)
    assert "Traceback" in line["exception"]
    assert "the reason" in line["exception"]
    assert "exc_info" not in line


def test_lines_are_there_at_once() -> None:
    """Each line is flushed, so that nothing is lost should the process die."""
    flushed: list[str] = []

    class Stream(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    log = make_logger("info", "json", Stream())
    log.info("one")
    log.info("two")
    assert [text.count("\n") for text in flushed] == [1, 2]


def test_without_a_stream_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output stays free."""
    make_logger("info", "json").info("event")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "event"


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(28, "No space left on device"), BlockingIOError(), ValueError("closed file")]
)
def test_a_stream_that_fails_does_no_harm(error: Exception) -> None:
    """A reader that has gone, or a full disk, stops no rate limiter; every event is tried anew."""
    stream = Broken(error)
    log = make_logger("info", "json", stream)
    log.info("one")
    log.warning("two")
    assert stream.tried == 2


def test_a_closed_stream_does_no_harm() -> None:
    """A stream that was closed is as one that fails."""
    stream = io.StringIO()
    log = make_logger("info", "json", stream)
    stream.close()
    log.info("event")
    assert stream.closed


# --- Trouble that repeats


class Trouble:
    """Repeats with a clock turned by hand, and what it told."""

    def __init__(self) -> None:
        self.now = 1000.0
        log = structlog.testing.CapturingLogger()
        self._calls = log.calls
        self.tell = Repeats(log, lambda: self.now, interval=10.0)

    @property
    def told(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Level, event and fields of each line since last asked."""
        calls = [(call.method_name, call.args[0], dict(call.kwargs)) for call in self._calls]
        self._calls.clear()
        return calls


@pytest.fixture
def trouble() -> Trouble:
    """Nothing told yet."""
    return Trouble()


def test_the_first_is_told_at_once_and_more_are_held_back(trouble: Trouble) -> None:
    """Within an interval of the first, the same event is counted only."""
    for number in range(5):
        trouble.tell("bad_frame", why=f"why {number}")
        trouble.now += 2.4
    assert trouble.told == [("warning", "bad_frame", {"why": "why 0"})]
    assert trouble.tell.held_back == 4


def test_the_next_after_the_interval_tells_the_count(trouble: Trouble) -> None:
    """An event an interval later is told with its own fields and how many were not."""
    for at, why in (
        (0.0, "first"),
        (1.0, "second"),
        (9.999, "third"),
        (10.0, "fourth"),
        (10.5, "fifth"),
        (20.0, "last"),
    ):
        trouble.now = 1000.0 + at
        trouble.tell("bad_frame", why=why)
    assert trouble.told == [
        ("warning", "bad_frame", {"why": "first"}),
        ("warning", "bad_frame", {"why": "fourth", "held_back": 2}),
        ("warning", "bad_frame", {"why": "last", "held_back": 1}),
    ]


def test_events_are_told_apart(trouble: Trouble) -> None:
    """One kind of trouble does not hold back another."""
    trouble.tell("bad_frame", why="a")
    trouble.tell("client_dropped", reason="b")
    trouble.tell("bad_frame", why="c")
    assert [event for _, event, _ in trouble.told] == ["bad_frame", "client_dropped"]


def test_peers_are_told_apart(trouble: Trouble) -> None:
    """Each of several peers that go in one moment has its line; only the same one's next is held back."""
    for peer in ("a", "b", "c", "a"):
        trouble.tell("peer_away", peer=peer)
    assert [fields["peer"] for _, _, fields in trouble.told] == ["a", "b", "c"]
    trouble.now += 10
    trouble.tell.flush()
    assert trouble.told == [("warning", "peer_away", {"peer": "a", "held_back": 1})]


def test_flush_tells_what_was_held_back_when_no_more_comes(trouble: Trouble) -> None:
    """Once the interval is over, flush tells the last one held back, with the count, and only once."""
    trouble.tell("bad_frame", why="first")
    for why in ("second", "third"):
        trouble.tell("bad_frame", why=why)
    trouble.told.clear()
    trouble.now += 9.999
    trouble.tell.flush()
    assert trouble.told == []
    trouble.now += 0.001
    trouble.tell.flush()
    assert trouble.told == [("warning", "bad_frame", {"why": "third", "held_back": 2})]
    trouble.now += 100
    trouble.tell.flush()
    assert trouble.told == []


def test_a_flush_counts_as_telling(trouble: Trouble) -> None:
    """After a flush told an event, the next of it is held back for an interval."""
    trouble.tell("bad_frame", why="first")
    trouble.tell("bad_frame", why="second")
    trouble.now += 10
    trouble.tell.flush()
    trouble.tell("bad_frame", why="third")
    assert [fields for _, _, fields in trouble.told] == [{"why": "first"}, {"why": "second", "held_back": 1}]


def test_after_a_quiet_interval_an_event_is_new(trouble: Trouble) -> None:
    """Long after, the event is told at once and without a count."""
    trouble.tell("bad_frame", why="first")
    trouble.now += 50
    trouble.tell.flush()
    trouble.tell("bad_frame", why="second")
    assert [fields for _, _, fields in trouble.told] == [{"why": "first"}, {"why": "second"}]


def test_a_fault_of_ours_is_an_error(trouble: Trouble) -> None:
    """What carries an error is told at that level, again after an interval, and its old traceback is not kept."""
    trouble.tell("internal_error", error="E()", exc_info=True)
    trouble.tell("internal_error", error="F()", exc_info=True)
    trouble.now += 10
    trouble.tell.flush()
    assert trouble.told == [
        ("error", "internal_error", {"error": "E()", "exc_info": True}),
        ("error", "internal_error", {"error": "F()", "held_back": 1}),
    ]


@pytest.mark.parametrize("ask", [lambda t: t.tell.flush(), lambda t: t.tell("event")])
def test_nothing_is_told_twice(trouble: Trouble, ask: Callable[[Trouble], None]) -> None:
    """However often it is asked within one instant, an event is told once."""
    trouble.tell("event")
    for _ in range(5):
        ask(trouble)
    assert len(trouble.told) == 1
