"""What a daemon does each second: two of its answers to TOP in, one view out.

Decides what a rate is where a counter began anew or the daemon was started again.  Knows no terminal; the view is
plain values, as `sidegate top --once --json` prints them (docs/top.md).
"""

from __future__ import annotations

import time
from typing import Any

from sidecar.client import Client

_COUNTED = ("under_limit", "over_limit", "errors")


def look_twice(client: Client, seconds: float) -> dict[str, Any]:
    """The view of the next so many seconds; raises SidegateError if the daemon does not answer."""
    before = client.top()
    time.sleep(seconds)
    return view(before, client.top())


def view(before: dict[str, Any] | None, after: dict[str, Any]) -> dict[str, Any]:
    """The view at `after`; its rates are None if there is no answer before it of the same daemon's run."""
    seconds = 0.0
    if before is not None and before["pid"] == after["pid"]:
        seconds = (after["uptime_ms"] - before["uptime_ms"]) / 1000
    known = before if before is not None and seconds > 0 else None

    def rate(*path: str) -> float | None:
        return None if known is None else _grown(_at(known, path), _at(after, path)) / seconds

    counted = [rate("counters", name) for name in _COUNTED]
    decisions = None if known is None else sum(one or 0.0 for one in counted)
    under, over, errors = counted
    evicted = [rate("counters", name) for name in ("evicted", "evicted_exhausted")]
    return {
        "node": after["node"],
        "version": after["version"],
        "pid": after["pid"],
        "uptime_ms": after["uptime_ms"],
        "now": after["now"],
        "interval_ms": None if known is None else round(seconds * 1000),
        "per_second": {
            "decisions": decisions,
            "under_limit": under,
            "over_limit": over,
            "errors": errors,
            "forwarded": rate("cluster", "forwarded"),
            "fallbacks": rate("cluster", "fallbacks"),
            "evicted": None if known is None else sum(one or 0.0 for one in evicted),
        },
        "over_limit_share": over / decisions if decisions and over is not None else None,
        "buckets": after["counters"]["buckets"],
        "max_buckets": after["max_buckets"],
        "memory": after["memory"],
        "connections": after["connections"]["open"],
        "peers": _peers(known, after, seconds),
        "hot": _hot(after["hot"], after["now"]),
    }


def _at(facts: dict[str, Any], path: tuple[str, ...]) -> int:
    first, last = path
    number = facts[first].get(last, 0)  # a daemon without peers has no cluster
    assert isinstance(number, int)
    return number


def _grown(before: int, after: int) -> int:
    """By how much a counter grew; one that is lower than before began anew."""
    return after - before if after >= before else after


def _peers(before: dict[str, Any] | None, after: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    known = {} if before is None else {peer["name"]: peer for peer in before["cluster"].get("peers", ())}
    return [
        {
            "name": peer["name"],
            "address": peer["address"],
            "state": peer["state"],
            "queued": peer["queued"],
            "requests_per_second": _grown(known[peer["name"]]["requests"], peer["requests"]) / seconds
            if peer["name"] in known
            else None,
            "p50_us": peer["p50_us"],
            "p99_us": peer["p99_us"],
        }
        for peer in after["cluster"].get("peers", ())
    ]


def _hot(hot: dict[str, Any] | None, now: int) -> dict[str, Any] | None:
    if hot is None:
        return None
    seconds = max(hot["window_ms"], 1) / 1000
    return {
        "window_ms": hot["window_ms"],
        "every": hot["every"],
        "requests": hot["requests"],
        "names": [
            {"name": name, "per_second": at_least / seconds, "at_least": at_least, "at_most": at_most}
            for name, at_least, at_most in hot["names"]
        ],
        "keys": [_key(key, now, seconds) for key in hot["keys"]],
    }


def _key(told: tuple[Any, ...], now: int, seconds: float) -> dict[str, Any]:
    name, unique_key, at_least, at_most, bucket = told
    status, limit, remaining, reset_time = bucket or (None, None, None, None)
    return {
        "name": name,
        "key": unique_key,
        "per_second": at_least / seconds,
        "at_least": at_least,
        "at_most": at_most,
        "over_limit": None if status is None else bool(status),
        "limit": limit,
        "remaining": remaining,
        "reset_time": reset_time,
        "reset_in_ms": None if reset_time is None else max(0, reset_time - now),
    }
