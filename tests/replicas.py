"""Nodes with copies of one owner's buckets, links that delay, and a clock moved by hand: GLOBAL without a process."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgpack

from sidecar.messages import Verdict
from sidecar.replica import Replicas, settle
from sidecar.table import Table
from tests.helpers import U, fields

GLOBAL = 2
LONG = 1_000_000


def sent(value: Any) -> Any:
    """What comes out at the other end of a link."""
    return msgpack.unpackb(msgpack.packb(value), use_list=False)


@dataclass
class Node:
    """One node's copies, and its link to the owner: messages and answers, each in order."""

    owner: Table
    replicas: Replicas = field(default_factory=Replicas)
    up: deque[tuple[str, Any]] = field(default_factory=deque)
    down: deque[tuple[str, Any, Any]] = field(default_factory=deque)
    admitted: int = 0
    dropped: int = 0

    def hit(self, now: int, **values: Any) -> Verdict | None:
        """Ask for `fields(**values)`: by the copy, or else by way of the owner, whose answer comes later."""
        request: tuple[Any, ...] = fields(**{"duration": LONG, **values})
        verdict = self.replicas.decide(now, request)
        if verdict is None:
            self.up.append(("ask", request))
        elif verdict[0] == U:
            self.admitted += values.get("hits", 1)
        return verdict

    def take(self, limit: int = 100) -> None:
        """Send the next reports."""
        self.up.extend(("report", report) for report in self.replicas.take(limit))

    def deliver(self, now: int) -> None:
        """The owner gets this node's oldest message."""
        if not self.up:
            return
        kind, what = self.up.popleft()
        if kind == "report":
            self.down.append((kind, what, sent(settle(self.owner, now, sent(what)))))
            return
        verdict = self.owner.decide(now, what)
        if verdict[0] == U:
            self.admitted += what[2]
        self.down.append((kind, what, sent(self.owner.state(*what[:2]))))

    def answer(self, now: int) -> None:
        """This node gets the owner's oldest answer."""
        if not self.down:
            return
        kind, what, state = self.down.popleft()
        if kind == "report":
            self.replicas.settled(what, state)
        else:
            self.replicas.adopt(now, what[0], what[1], state)

    def give_back(self) -> None:
        """The link breaks: no report in it was sent.  What was asked is answered by a fallback, and forgotten."""
        self.replicas.returned([what for kind, what in self.up if kind == "report"])
        self.up.clear()

    def lose(self, now: int, arrived: bool) -> None:
        """The oldest message is not heard of again, whether it had arrived or not."""
        if not self.up or self.up[0][0] != "report":
            return
        _, report = self.up.popleft()
        if arrived:
            settle(self.owner, now, sent(report))
        else:
            self.dropped += sum(entry[0] for entry in report.entries)
        self.replicas.lost([report])

    def flush(self, now: int) -> None:
        """All is delivered and answered, and nothing is left to report."""
        while self.up or self.down or self.replicas.due:
            self.take()
            while self.up:
                self.deliver(now)
            while self.down:
                self.answer(now)

    def ask(self, now: int, **values: Any) -> Verdict:
        """The verdict, the owner's where the copy gives none."""
        verdict = self.hit(now, **values)
        if verdict is None:
            request = self.up.pop()[1]
            verdict = self.owner.decide(now, request)
            if verdict[0] == U:
                self.admitted += request[2]
            self.replicas.adopt(now, request[0], request[1], sent(self.owner.state(request[0], request[1])))
        return verdict


def cluster(nodes: int = 2, **options: Any) -> tuple[Table, list[Node]]:
    """An owner, and nodes that ask it."""
    owner = Table()
    return owner, [Node(owner, Replicas(**options)) for _ in range(nodes)]


def used(table: Table, name: str = "n", unique_key: str = "k") -> int:
    """What the owner holds as consumed."""
    state = table.state(name, unique_key)
    assert state is not None
    return state[7] if isinstance(state[7], int) else int.from_bytes(state[7], "big", signed=True)
