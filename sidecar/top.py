"""`sidegate top`: what one daemon is doing, on a terminal, drawn anew each interval.

Decides what is shown where there is little room, and that the terminal is left as it was found, however this ends.
What the numbers mean is rates.py's; this knows no frame and no counter.  The only file that loads rich.

One wait for all: a key, a new size of the window, the next look.  Nothing that came from elsewhere is taken for markup
or for a terminal's control sequence: a key is whatever an application made of its users' input.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sidecar.client import Client
from sidecar.errors import SidegateError
from sidecar.rates import look_twice, view

_GAP = 3
_PRINTED = 60
"""Lines of a view that is printed, not drawn."""
_KEYS_FIRST = 5
"""Hottest keys that have room before names and peers."""
_QUITS = b"q", b"Q"


def print_once(client: Client, interval: float) -> None:
    """Print the view of the next `interval` seconds; raises SidegateError if the daemon does not answer."""
    _console().print(Page(look_twice(client, interval), drawn=False))


def can_draw() -> bool:
    """Whether standard output is a terminal whose cursor can be moved."""
    return sys.stdout.isatty() and not _console().is_dumb_terminal


def watch(client: Client, interval: float) -> int:
    """Draw a view each `interval` seconds until q or Ctrl-C; the exit status, 0."""
    console = _console()
    page = Page(None, drawn=True)
    try:
        with (
            _keys() as wait,
            Live(page, console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live,
        ):
            looked = _look(client, page, None)
            due = time.monotonic() + interval
            while True:
                live.update(page, refresh=True)
                if wait(max(0.0, due - time.monotonic())) in _QUITS:
                    return 0
                if time.monotonic() >= due:
                    looked = _look(client, page, looked)
                    due = max(due + interval, time.monotonic())
    except KeyboardInterrupt:
        return 0


def _console() -> Console:
    # A key may hold letters that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def _look(client: Client, page: Page, before: dict[str, Any] | None) -> dict[str, Any] | None:
    """Put the daemon's view on the page, or that it is away; what it answered, None if it did not."""
    try:
        after = client.top()
    except SidegateError as error:
        page.away = str(error)
        return None
    page.away = ""
    page.view = view(before, after)
    return after


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """A wait of so many seconds that ends sooner at a key, which it answers, or at a new size of the window.

    Keys come one by one and unseen.  The end of the input counts as q.  SIGTERM and SIGHUP end the process with status
    128 + the signal's number, by an exception, so that whoever changed the terminal changes it back.
    """
    keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    def wait(seconds: float) -> bytes:
        ready, _, _ = select.select([reading] if keyboard < 0 else [reading, keyboard], [], [], seconds)
        if reading in ready:
            os.read(reading, 4096)
        return (os.read(keyboard, 1) or b"q") if keyboard in ready else b""

    handlers = {
        number: signal.signal(number, handler)
        for number, handler in ((signal.SIGWINCH, lambda *_: None), (signal.SIGTERM, end), (signal.SIGHUP, end))
    }
    woken_before = signal.set_wakeup_fd(writing)
    found = termios.tcgetattr(keyboard) if keyboard >= 0 else None
    try:
        if found is not None:
            tty.setcbreak(keyboard)
            # Suspended, this would leave the shell on a drawn-over screen.
            quiet = termios.tcgetattr(keyboard)
            quiet[6][termios.VSUSP] = b"\0"
            termios.tcsetattr(keyboard, termios.TCSANOW, quiet)
        yield wait
    finally:
        if found is not None:
            termios.tcsetattr(keyboard, termios.TCSANOW, found)
        signal.set_wakeup_fd(woken_before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


class Page:
    """One view, laid out for the room there is.

    view: None before the first.  drawn: to fill a screen, rather than printed.  away: why the daemon does not answer.
    """

    def __init__(self, view: dict[str, Any] | None, drawn: bool) -> None:
        self.view = view
        self.away = ""
        self._drawn = drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        room = options.size.height if self._drawn else _PRINTED
        head = [line for items in self._head() for line in _flow(items, width)]
        foot = self._foot() if len(head) + 2 <= room else []
        yield from head[:room]
        room -= len(head) + len(foot)
        for table in _tables(self.view, width, room) if self.view is not None else ():
            yield Text()
            yield table
        yield from (_line(text, "dim") for text in foot)

    def _head(self) -> Iterator[list[Text]]:
        found = self.view
        if self.away:
            yield [Text("away", "bold red"), Text(clean(self.away), "red")]
        if found is None:
            yield [Text("sidegate top", "bold")]
            return
        each = found["per_second"]
        share = found["over_limit_share"]
        yield [
            Text("sidegate top", "bold"),
            Text(clean(found["node"]), "bold cyan"),
            Text(f"up {length(found['uptime_ms'])}"),
            Text(f"version {clean(found['version'])}"),
        ]
        yield [
            _fact(rate(each["decisions"]), "owned decisions/s"),
            _fact("-" if share is None else f"{share:.1%}", "over limit"),
            _fact(rate(each["errors"]), "errors/s"),
            _fact(rate(each["forwarded"]), "forwarded/s"),
            _fact(rate(each["fallbacks"]), "fallbacks/s"),
        ]
        yield [
            _fact(f"{count(found['buckets'])} of {count(found['max_buckets'])}", "buckets"),
            _fact(rate(each["evicted"]), "evicted/s"),
            _fact(f"{found['memory'] / (1 << 20):,.1f}", "MiB"),
            _fact(count(found["connections"]), "clients"),
        ]

    def _foot(self) -> list[str]:
        ends = "q quits" if self._drawn else ""
        if self.view is None:
            return [ends] if ends else []
        hot = self.view["hot"]
        if hot is None:
            told = "hot keys are not counted (hot_keys is 0)"
        else:
            told = f"hottest of the last {length(hot['window_ms'])}, by 1 request in {hot['every']}"
        return ["", f"{ends}{' ' * _GAP if ends else ''}{told}"]


def _tables(found: dict[str, Any], width: int, room: int) -> list[Table]:
    """The tables that fit into `room` lines, each with the blank line before it; some keys before all else."""
    hot = found["hot"] or {"names": [], "keys": []}
    names, keys = hot["names"], hot["keys"]
    # Who is away comes first; a node is no news to itself.
    peers = sorted((peer for peer in found["peers"] if peer["state"] != "self"), key=lambda one: one["state"] != "away")
    heads = 2

    def fit(rows: int, lines: int) -> int:
        """Rows that fit into the lines; with none, the table's head is not drawn either."""
        return min(rows, max(lines - heads, 0))

    def used(rows: int) -> int:
        return rows + heads if rows else 0

    spare = room - used(min(len(keys), _KEYS_FIRST))
    peers = peers[: fit(len(peers), min(spare, room // 3))]
    spare -= used(len(peers))
    names = names[: fit(len(names), min(spare, room // 3))]
    keys = keys[: fit(len(keys), room - used(len(peers)) - used(len(names)))]
    tables = []
    if names:
        tables.append(_names(names, width, hot["requests"]))
    if keys:
        tables.append(_hottest(keys, width))
    if peers:
        tables.append(_links(peers, width))
    return tables


def _names(names: list[dict[str, Any]], width: int, requests: int) -> Table:
    table = _table(("HOTTEST NAMES", None), ("REQ/S", 9), ("SHARE", 6 if width >= 40 else 0))
    for one in names:
        share = f"{one['at_least'] / requests:.0%}" if requests else "-"
        _row(table, width >= 40, clean(one["name"]), rate(one["per_second"]), share)
    return table


def _hottest(keys: list[dict[str, Any]], width: int) -> Table:
    wide, middle = width >= 72, width >= 50
    table = _table(
        ("HOTTEST KEYS", None),
        ("OF LIMIT", 16 if wide else 0, "left"),
        ("REQ/S", 9 if width >= 36 else 7),
        ("LEFT", 9 if middle else 7),
        ("OF", 9 if wide else 0),
        ("RESET IN", 11 if middle else 0),
    )
    for one in keys:
        remaining = Text("gone", "dim") if one["remaining"] is None else Text(count(one["remaining"]))
        if one["remaining"] == 0:
            remaining.stylize("bold red")
        cells = [Text(clean(one["key"]))]
        cells += [Text(clean(one["name"]))] if wide else []
        cells += [Text(rate(one["per_second"])), remaining]
        cells += [Text("-" if one["limit"] is None else count(one["limit"]))] if wide else []
        cells += [Text("-" if one["reset_in_ms"] is None else length(one["reset_in_ms"]))] if middle else []
        table.add_row(*cells)
    return table


_STATES = {"away": "bold red", "connected": "green"}


def _links(peers: list[dict[str, Any]], width: int) -> Table:
    wide, middle = width >= 64, width >= 50
    table = _table(
        ("PEERS", None),
        ("STATE", 9, "left"),
        ("REQ/S", 9 if middle else 0),
        ("QUEUED", 7 if wide else 0),
        ("P50", 8),
        ("P99", 8 if width >= 40 else 0),
    )
    for one in peers:
        cells = [Text(clean(one["name"])), Text(one["state"], _STATES.get(one["state"], ""))]
        cells += [Text(rate(one["requests_per_second"]))] if middle else []
        cells += [Text(count(one["queued"]))] if wide else []
        cells += [Text(trip(one["p50_us"]))]
        cells += [Text(trip(one["p99_us"]))] if width >= 40 else []
        table.add_row(*cells)
    return table


def _table(first: tuple[str, None], *others: tuple[str, int] | tuple[str, int, str]) -> Table:
    """A table of one line a row: the first column takes what the others leave; one of width 0 is left out."""
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(first[0], ratio=1, no_wrap=True, overflow="ellipsis")
    for title, width, *side in others:
        if width:
            align: Any = side[0] if side else "right"
            table.add_column(title, width=width, justify=align, no_wrap=True, overflow="ellipsis")
    return table


def _row(table: Table, whole: bool, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in (cells if whole else cells[:-1])))


def _fact(value: str, name: str) -> Text:
    return Text.assemble((value, "bold"), f" {name}")


def _line(text: str, style: str) -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _flow(items: Iterable[Text], width: int) -> list[Text]:
    """The items in as few lines as hold them; none is broken, only one longer than a line is cut."""
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + _GAP + item.cell_len <= width:
            lines[-1].append(" " * _GAP).append_text(item)
        else:
            line = item.copy()
            line.no_wrap, line.overflow = True, "ellipsis"
            lines.append(line)
    return lines


def clean(text: str) -> str:
    """Text of unknown origin as a terminal may be given it: what is not printable becomes a question mark in a box."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def rate(number: float | None) -> str:
    """A rate in as many digits as matter; "-" where there is none yet."""
    if number is None:
        return "-"
    return f"{number:.1f}" if 0 < number < 9.95 else count(round(number))


def count(number: int) -> str:
    """A whole number, short."""
    return f"{number:,}" if number < 1_000_000_000 else f"{number:.3g}".replace("e+", "e")


def length(ms: int) -> str:
    """A time that something lasts, in its one or two largest units."""
    if ms < 1_000:
        return f"{ms} ms"
    seconds = ms // 1_000
    for unit, larger, size, part in (("d", "h", 86_400, 3_600), ("h", "min", 3_600, 60), ("min", "s", 60, 1)):
        if seconds >= size:
            rest = seconds % size // part
            return f"{count(seconds // size)} {unit}" + (f" {rest} {larger}" if rest and size * 100 > seconds else "")
    return f"{seconds} s"


def trip(us: int | None) -> str:
    """A round trip."""
    if us is None:
        return "-"
    return f"{us} us" if us < 1_000 else f"{us / 1000:.1f} ms"
