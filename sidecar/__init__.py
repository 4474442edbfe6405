"""Sidegate: a rate limiter that rides beside Python workers.

One hit's journey: an application calls `Client.hit` (client.py) with a `Limit` (limit.py), which becomes a
`RateLimit` (messages.py) and, through a pooled connection (connection.py), a frame of msgpack (wire.py) on the
daemon's Unix socket (address.py says where).  There the server (server.py) cuts the frames out of what it read
and takes one reading of the clock (clock.py); the service (service.py) opens each frame and asks the table
(table.py), which finds the bucket that (name, unique_key) names and has it judge the hit (bucket.py, with
calendar.py for Gregorian windows).  The verdict goes back the same way, as one write for all that was read, and
reaches the application as a `Decision`.  daemon.py wires the daemon's rooms together; cli.py is the command.
"""

from sidecar.client import Client
from sidecar.errors import (
    DaemonTimeout,
    DaemonUnreachable,
    InvalidRequest,
    ProtocolError,
    RequestRefused,
    SidegateError,
)
from sidecar.limit import Limit
from sidecar.messages import Algorithm, Behavior, Decision, RateLimit, Status

__all__ = [
    "Algorithm",
    "Behavior",
    "Client",
    "DaemonTimeout",
    "DaemonUnreachable",
    "Decision",
    "InvalidRequest",
    "Limit",
    "ProtocolError",
    "RateLimit",
    "RequestRefused",
    "SidegateError",
    "Status",
]
