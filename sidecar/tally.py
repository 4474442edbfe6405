"""How many requests were answered how, by path and by limit name: plain integers for whoever reads them now and then.

Decides which names are told apart: the first so many that come, the rest together, so that no caller can make a
scrape grow.  Never by key.  Knows no metric's name and no request.

Integers in slots, since they are counted up where a decision takes a microsecond: an item of a list costs half as
much again (benchmarks/README.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from sidecar.messages import Status

OTHER = "_other"
"""What names past the bound are counted as."""
DEFAULT_NAMES = 100
PATHS = ("owned", "replica", "fallback")
"""Where a request was decided: by this node's own buckets, by a GLOBAL replica of another's, by a fallback."""
RESULTS = ("under_limit", "over_limit", "error")
"""How a request was answered; each is a count of `Counts`."""
_UNDER, _OVER = int(Status.UNDER_LIMIT), int(Status.OVER_LIMIT)
_MAX_REMEMBERED = 4_096
"""Names past the bound that are remembered as such, and those within it; past it the memory starts anew."""


class Counts:
    """Answers by their Status.  Whoever is in a hurry counts one up by itself."""

    __slots__ = RESULTS

    def __init__(self) -> None:
        self.under_limit = self.over_limit = self.error = 0

    def see(self, status: float) -> None:
        """Count one answer; a peer's status may be a number of another kind that equals one of ours."""
        if status == _UNDER:
            self.under_limit += 1
        elif status == _OVER:
            self.over_limit += 1
        else:
            self.error += 1


class Row:
    """One name's answers on each path."""

    __slots__ = PATHS

    def __init__(self) -> None:
        self.owned = Counts()
        self.replica = Counts()
        self.fallback = Counts()


class Tally:
    """The counts of one node.

    names: most names told apart, >= 0.
    owned: the counts on that path of names that `row` was asked for lately: a look at it saves the call.
    forwarded: answers that came from owners; they are in the owners' rows.
    """

    def __init__(self, names: int = DEFAULT_NAMES) -> None:
        self._names = names
        # Errors are counted here too: what is no request may have no name.
        self.other = Row()
        self._rows: dict[str, Row] = {}
        self.owned: dict[str, Counts] = {}
        self.forwarded = Counts()

    def row(self, name: str) -> Row:
        """Where to count answers about limits of that name; keep it, rather than ask again for each."""
        row = self._rows.get(name)
        if row is None:
            if len(self._rows) >= self._names or name == OTHER:
                row = self.other
            else:
                row = self._rows[name] = Row()
        if name not in self.owned:
            if len(self.owned) >= _MAX_REMEMBERED:
                self.owned.clear()
            self.owned[name] = row.owned
        return row

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Every name with its row, and OTHER."""
        yield from self._rows.items()
        yield OTHER, self.other

    def total(self, path: str) -> Counts:
        """The counts of a path over all names."""
        total = Counts()
        for _, row in self.rows():
            counts: Counts = getattr(row, path)
            total.under_limit += counts.under_limit
            total.over_limit += counts.over_limit
            total.error += counts.error
        return total
