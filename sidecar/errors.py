"""What can go wrong for an application that asks, split by who must act.

The caller must act on `InvalidRequest` (it is a mistake in the program).  The operator must act on
`ProtocolError` (two releases that cannot talk) and on `RequestRefused` (the daemon is not set up for
what was asked).  Nobody in particular must act on `DaemonUnreachable` and `DaemonTimeout`: the daemon
is away for a moment, and `on_error` says what a program does meanwhile.

Each is also the builtin error that a caller would expect to catch.
"""

from __future__ import annotations


class SidegateError(Exception):
    """The root of all that Sidegate raises."""


class InvalidRequest(SidegateError, ValueError):
    """A limit, a key or a number that no daemon would accept; nothing was sent."""


class DaemonUnreachable(SidegateError, ConnectionError):
    """No answer: the daemon is not there, closed the connection, or the circuit to it is open."""


class DaemonTimeout(SidegateError, TimeoutError):
    """No answer within the call's deadline; whether the hits were counted is not known."""


class RequestRefused(SidegateError):
    """The daemon understood the call and declined it; the connection goes on."""


class ProtocolError(SidegateError, ConnectionError):
    """The two ends do not speak the same protocol; the connection was closed."""
