"""How many requests were answered how, by path and by limit name: plain integers for whoever reads them now and then.

Decides which names are told apart: the first so many that come, the rest together, so that no caller can make a
scrape grow.  Never by key.  Knows no metric's name and no request.
"""

from __future__ import annotations

from collections.abc import Iterator

from sidecar.messages import Status

OTHER = "_other"
"""What names past the bound are counted as."""
DEFAULT_NAMES = 100
PATHS = ("owned", "replica", "fallback")
"""Where a request was decided: by this node's own buckets, by a GLOBAL replica of another's, by a fallback."""


class Row:
    """One name's answers on each path, a count for each Status."""

    __slots__ = PATHS

    def __init__(self) -> None:
        self.owned = [0] * len(Status)
        self.replica = [0] * len(Status)
        self.fallback = [0] * len(Status)


class Tally:
    """The counts of one node.

    names: most names told apart, >= 0.
    forwarded: answers that came from owners, a count for each Status; they are in the owners' rows.
    """

    def __init__(self, names: int = DEFAULT_NAMES) -> None:
        self._names = names
        # Errors are counted here too: what is no request may have no name.
        self.other = Row()
        self._rows: dict[str, Row] = {}
        self.forwarded = [0] * len(Status)

    def row(self, name: str) -> Row:
        """Where to count answers about limits of that name; keep it, rather than ask again for each."""
        row = self._rows.get(name)
        if row is None:
            if len(self._rows) >= self._names or name == OTHER:
                return self.other
            row = self._rows[name] = Row()
        return row

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Every name with its row, and OTHER."""
        yield from self._rows.items()
        yield OTHER, self.other

    def total(self, path: str) -> list[int]:
        """The counts of a path over all names."""
        counts = [getattr(row, path) for _, row in self.rows()]
        return [sum(column) for column in zip(*counts, strict=True)]
