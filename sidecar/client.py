"""How a process asks: one call, one answer, one deadline, from any thread and after any fork.

Decides what a failure becomes (`on_error`).  Knows no socket (connection.py) and no arithmetic.  Importing
it costs little more than msgpack; sockets and threads are loaded, and anything opened, at the first call.
"""

from __future__ import annotations

from os import fspath, getpid
from os.path import dirname

from sidecar.address import foreign, socket_path
from sidecar.errors import (
    DaemonTimeout,
    DaemonUnreachable,
    InvalidRequest,
    ProtocolError,
    RequestRefused,
    SidegateError,
)
from sidecar.limit import Limit
from sidecar.messages import Decision, RateLimit, Status, count_fault, int_fault, text_fault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike
    from types import TracebackType
    from typing import Any

    from sidecar.connection import Pool

DEFAULT_TIMEOUT = 0.1
DEFAULT_MAX_CONNECTIONS = 16

_CHECK, _RESET, _PING, _INFO, _CLOCK, _PEERS, _TOP = 1, 2, 3, 4, 5, 6, 9
_STATUS = {0: Status.UNDER_LIMIT, 1: Status.OVER_LIMIT, 2: Status.ERROR}
_PLAIN, _WHOLE = 5, 8
_ABSENT = (None, False, "")
_FRAME_BYTES = 1 << 20
_FEW = 100
"""Requests whose frame is never too long, whatever their keys."""
_FLAGS_END = 55
"""Where the flags of a W3C traceparent end, of any of its versions; the last bit before it says that it is sampled."""
_SAMPLED = frozenset("13579bdf")
_POLICIES = ("raise", "allow", "deny")
_AWAY = (DaemonUnreachable, DaemonTimeout, ProtocolError)


class Client:
    """Asks the daemon of this host.

    address: a path or `unix:///path`, which may end in `?timeout=0.05&on_error=allow&max_connections=4`;
        None finds the socket by the daemon's own rule (see docs/client.md).
    on_error: what a call answers when the daemon gives no answer: "raise" a SidegateError, or a made-up
        decision that says `degraded`: "allow" or "deny".  Mistakes of the caller always raise.
    timeout: seconds for one whole call, connecting included.
    max_connections: the most connections a process keeps; further threads wait for one, within the time-out.
    traceparent: called by each hit, peek, refund, check and reset: the W3C traceparent of the caller's span, or None.
        One whose sampled flag is set goes with the request (docs/tracing.md); what it raises comes out of the call.

    Threads may share one client, and so may the two sides of a fork.
    """

    def __init__(
        self,
        address: str | PathLike[str] | None = None,
        *,
        on_error: str | None = None,
        timeout: float | None = None,
        max_connections: int | None = None,
        traceparent: Callable[[], str | None] | None = None,
    ) -> None:
        self._path, options = _parse_address(None if address is None else fspath(address))
        self._on_error = on_error or options.get("on_error", "raise")
        self._timeout = _positive("timeout", options.get("timeout", DEFAULT_TIMEOUT) if timeout is None else timeout)
        size = options.get("max_connections", DEFAULT_MAX_CONNECTIONS) if max_connections is None else max_connections
        self._size = int(_positive("max_connections", size))
        if self._size != float(size):
            raise InvalidRequest(f"max_connections is a whole number, not {size!r}")
        if self._on_error not in _POLICIES:
            raise InvalidRequest(f"on_error is one of {', '.join(_POLICIES)}, not {self._on_error!r}")
        if traceparent is not None and not callable(traceparent):
            raise InvalidRequest(f"traceparent is a callable, not {type(traceparent).__name__}")
        self._traceparent = traceparent
        self._pools: dict[int, Pool] = {}

    def hit(self, limit: Limit, key: str, hits: int = 1) -> Decision:
        """Ask for `hits` tokens (>= 0) of `limit` for `key`.

        Raises InvalidRequest for a bad key or number, and as `on_error` says when there is no answer.
        """
        if type(hits) is int and hits < 0:
            raise InvalidRequest("hits cannot be negative; use refund")
        return self._one(limit, key, hits)

    def peek(self, limit: Limit, key: str) -> Decision:
        """What is left, consuming nothing."""
        return self._one(limit, key, 0)

    def refund(self, limit: Limit, key: str, hits: int = 1) -> Decision:
        """Give `hits` tokens (>= 1) back."""
        why = int_fault("hits", hits, 1)
        if why:
            raise InvalidRequest(why)
        return self._one(limit, key, -hits)

    def reset(self, limit: Limit | str, key: str) -> bool:
        """Forget the bucket of `limit` (or of the limit so named) for `key`; whether there was one.

        Raises SidegateError whatever `on_error` says: there is no decision to make up.
        """
        name = limit if isinstance(limit, str) else _limit(limit).name
        why = text_fault("name", name) or text_fault("unique_key", key)
        if why:
            raise InvalidRequest(why)
        return bool(self._open().ask(_RESET, (name, key), self._context())[0])

    def check(self, requests: Iterable[RateLimit]) -> list[Decision]:
        """Ask for 1 to 1,000 requests in one frame; their decisions in the same order.

        A request that failed by itself has status ERROR in its place; the others stand.
        """
        try:
            batch = list(requests)
            why = count_fault(len(batch))
        except TypeError:
            batch, why = [], "a check takes requests, one after the other"
        wires = [request.wire() for request in batch if type(request) is RateLimit]
        if why or len(wires) != len(batch):
            raise InvalidRequest(why or "a check takes RateLimits; Limit.request makes them")
        try:
            return self._check(wires)
        except _AWAY as error:
            return [self._made_up(request.limit, error) for request in batch]

    def ping(self) -> str:
        """The daemon's node name; raises SidegateError if it does not answer."""
        return self._ask(_PING, None)[1]

    def info(self) -> dict[str, Any]:
        """What the daemon says of itself: version, node, uptime_ms, clock, counters."""
        facts, node = self._ask(_INFO, None)
        return {"node": node, **facts}

    def peers(self) -> dict[str, Any]:
        """The daemons of the cluster as this one knows them: me, peers (name, address, state, ...), counters."""
        return dict(self._ask(_PEERS, None)[0])

    def top(self, count: int = 20) -> dict[str, Any]:
        """What `info` and `peers` tell, at one moment, and the `count` (1 to 100) hottest names and keys with what is
        left of each; docs/protocol.md, "Top".  Changes nothing."""
        why = int_fault("count", count, 1, 100)
        if why:
            raise InvalidRequest(why)
        facts, node = self._ask(_TOP, count)
        return {"node": node, **facts}

    def advance_clock(self, ms: int) -> int:
        """Move a manual clock forward by `ms` >= 0; the new epoch ms.  Raises RequestRefused on a real clock."""
        return self._move_clock(1, ms)

    def set_clock(self, epoch_ms: int) -> int:
        """Set a manual clock, also back; the new epoch ms.  Raises RequestRefused on a real clock."""
        return self._move_clock(0, epoch_ms)

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        pool = self._pools.pop(getpid(), None)
        if pool is not None:
            pool.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _move_clock(self, how: int, ms: int) -> int:
        why = int_fault("ms", ms)
        if why:
            raise InvalidRequest(why)
        return int(self._ask(_CLOCK, (how, ms))[0])

    def _one(self, limit: Limit, key: str, hits: int) -> Decision:
        # Most calls are one hit of a plain key: then all but the key is packed already.
        payload: object = None
        if type(limit) is not Limit:
            _limit(limit)
        elif hits == 1 and type(hits) is int and self._traceparent is None:
            payload = limit.packed_hit(key)
        if payload is None:
            payload = (limit.wire(key, hits),)
        try:
            context = None if self._traceparent is None else self._context()
            answers, node = self._open().ask(_CHECK, payload, context)
            try:
                (answer,) = answers
                decision = _decision(answer, node)
            except (TypeError, ValueError, LookupError):
                (decision,) = self._decisions(answers, node, 1)  # which says what is wrong
        except _AWAY as error:
            return self._made_up(limit.limit, error)
        if decision.status == Status.ERROR:
            return self._made_up(limit.limit, RequestRefused(decision.error))
        return decision

    def _check(self, batch: Sequence[tuple[Any, ...]]) -> list[Decision]:
        if len(batch) <= _FEW:
            return self._decisions(*self._open().ask(_CHECK, batch, self._context()), len(batch))
        decisions: list[Decision] = []
        parts = _parts(batch)
        for part, (answers, node) in zip(parts, self._open().ask_all(_CHECK, parts, self._context()), strict=True):
            decisions += self._decisions(answers, node, len(part))
        return decisions

    def _decisions(self, answers: Any, node: str, count: int) -> list[Decision]:
        try:
            if len(answers) == count:
                return [_decision(answer, node) for answer in answers]
            why = f"{len(answers)} decisions on {count} requests"
        except (TypeError, ValueError, LookupError) as error:
            why = str(error)
        self.close()
        raise ProtocolError(f"the daemon sent what is no decision: {why}")

    def _ask(self, op: int, payload: object) -> tuple[Any, str]:
        return self._open().ask(op, payload)

    def _context(self) -> str | None:
        """The caller's traceparent, if it says that it is sampled: the daemon makes spans of no other, and a frame
        without one is answered faster."""
        text = None if self._traceparent is None else self._traceparent()
        if text is None:
            return None
        if not isinstance(text, str):
            raise InvalidRequest(f"a traceparent is text or None, not {type(text).__name__}")
        return text if text[_FLAGS_END - 1 : _FLAGS_END] in _SAMPLED and text.isascii() else None

    def _open(self) -> Pool:
        # Looked up by process on every call, since not every server that forks runs Python's fork hooks.
        return self._pools.get(getpid()) or self._new_pool()

    def _new_pool(self) -> Pool:
        from sidecar.connection import Pool

        here = getpid()
        path = self._path or socket_path()
        why = foreign(dirname(path))
        if why:
            raise DaemonUnreachable(why)
        # setdefault lets one of several threads win, so that all of them share one bound on connections.
        pool = self._pools.setdefault(here, Pool(path, self._timeout, self._size))
        for process in [process for process in self._pools if process != here]:
            parent = self._pools.pop(process, None)
            if parent is not None:
                parent.abandon()
        return pool

    def _made_up(self, limit: int, error: SidegateError) -> Decision:
        if self._on_error == "raise":
            raise error
        status = Status.UNDER_LIMIT if self._on_error == "allow" else Status.OVER_LIMIT
        return Decision(status, limit, degraded=True, error=str(error))


def _limit(limit: Limit) -> Limit:
    if not hasattr(limit, "wire"):
        raise InvalidRequest(f"a limit is a Limit, not {type(limit).__name__}")
    return limit


def _decision(answer: Any, node: str) -> Decision:
    if len(answer) == _PLAIN:
        status, limit, remaining, reset_time, retry_after = answer
        return Decision(_STATUS[status], limit, remaining, reset_time, retry_after, node)
    whole = answer if len(answer) == _WHOLE else (*answer, *_ABSENT[len(answer) - _PLAIN :])
    status, limit, remaining, reset_time, retry_after, owner, degraded, error = whole
    return Decision(
        _STATUS[status], limit, remaining, reset_time, retry_after, node if owner is None else owner, degraded, error
    )


def _parts(batch: Sequence[tuple[Any, ...]]) -> list[Sequence[tuple[Any, ...]]]:
    """The batch in parts whose frames a daemon takes: a thousand of the longest keys are more than one may hold."""
    # A character has at most 4 bytes of UTF-8; the numbers and heads of a request have less than 100.
    size = sum(100 + 4 * (len(request[0]) + len(request[1])) for request in batch)
    if size < _FRAME_BYTES:
        return [batch]
    middle = len(batch) // 2
    return _parts(batch[:middle]) + _parts(batch[middle:])


def _parse_address(address: str | None) -> tuple[str, dict[str, str]]:
    if not address:
        return "", {}
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address, {}
    if scheme != "unix":
        raise InvalidRequest(f"an address is a path or unix:///path, not {address!r}")
    path, _, query = rest.partition("?")
    options = dict(part.partition("=")[::2] for part in query.split("&") if part)
    unknown = set(options) - {"timeout", "on_error", "max_connections"}
    if unknown or not path.startswith("/"):
        what = f"unknown option {min(unknown)!r}" if unknown else "the path is not absolute"
        raise InvalidRequest(f"{what} in {address!r}")
    return path, options


def _positive(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < 1e9:
        raise InvalidRequest(f"{name} is a number above 0, not {value!r}")
    return number
