"""How the daemon speaks to its operators: one line an event, JSON on a pipe, readable on a terminal.

Decides the form of a line, the lowest level told, and that repeated trouble becomes one line an interval with a
count of what was held back.  Which events there are stands in docs/logs.md.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Lines:
    """Writes lines to a stream whose reader may have gone: that must not stop a rate limiter."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass

    debug = info = warning = error = critical = msg


class Log:
    """Writes events; `debug`, `info`, `warning` and `error` take an event's name and its fields.

    level: the lowest told, one of LEVELS.  form: "json", "console" or "auto" (by terminal).  Raises KeyError for
    another level.
    """

    debug: Callable[..., Any]
    info: Callable[..., Any]
    warning: Callable[..., Any]
    error: Callable[..., Any]

    def __init__(self, level: str, form: str, out: TextIO) -> None:
        terminal = form == "console" or (form == "auto" and out.isatty())
        render: list[Any] = (
            [structlog.dev.ConsoleRenderer(colors=out.isatty())]
            if terminal
            else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        )
        self._lines = _Lines(out)
        self._processors = [
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *render,
        ]
        self.tell_from(level)

    def tell_from(self, level: str) -> None:
        """Tell events of this level and above from now on."""
        # structlog chooses a class by its level, whose methods below it do nothing; taking over the methods of one
        # logger of that class costs a line nothing, where asking for the level each time would.
        kind = structlog.make_filtering_bound_logger(LEVELS[level])
        logger = structlog.wrap_logger(self._lines, wrapper_class=kind, processors=self._processors).bind()
        for name in LEVELS:
            setattr(self, name, getattr(logger, name))


def make_logger(level: str, form: str, stream: TextIO | None = None) -> Log:
    """A log writing to `stream` (stderr); see Log."""
    # A supervisor may start daemons with standard error closed.
    return Log(level, form, stream or sys.stderr or open(os.devnull, "w"))


class Repeats:
    """Tells of trouble that may repeat: each event at once, then at most one line an interval; of each peer or door, if
    it has a field `peer` or `door`.

    interval: seconds.  now: a clock in seconds.  `flush` tells of what was held back when no further trouble
    comes; call it now and then.
    """

    def __init__(self, log: Any, now: Callable[[], float], interval: float = 10.0) -> None:
        self._log = log
        self._now = now
        self._interval = interval
        self._last: dict[tuple[str, object], float] = {}
        self._held: dict[tuple[str, object], tuple[int, dict[str, object]]] = {}
        self.held_back = 0

    def __call__(self, event: str, **fields: object) -> None:
        """Log a warning (an error, if it has a field `error`), or hold it back and count it."""
        now = self._now()
        kind = (event, fields.get("peer", fields.get("door")))
        if kind in self._last and now - self._last[kind] < self._interval:
            count, _ = self._held.get(kind, (0, fields))
            # The last one's fields are told, but not its traceback: it would no longer be the current one.
            fields.pop("exc_info", None)
            self._held[kind] = (count + 1, fields)
            self.held_back += 1
            return
        self._last[kind] = now
        held, _ = self._held.pop(kind, (0, fields))
        self._tell(event, held, fields)

    def flush(self, everything: bool = False) -> None:
        """Tell of events held back whose interval is over; of all of them, before the end."""
        now = self._now()
        for kind in [kind for kind in self._held if everything or now - self._last[kind] >= self._interval]:
            count, fields = self._held.pop(kind)
            self._last[kind] = now
            self._tell(kind[0], count, fields)
        for kind in [kind for kind, at in self._last.items() if now - at >= self._interval]:
            del self._last[kind]

    def _tell(self, event: str, held: int, fields: dict[str, object]) -> None:
        if held:
            fields = {**fields, "held_back": held}
        (self._log.error if "error" in fields else self._log.warning)(event, **fields)
