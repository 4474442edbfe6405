"""Which keys the asked node of a cluster owns, as the system itself says it.

Decides nothing; reads the owner's name from answers.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterable, Sequence

from benchmarks.peers.hits import WINDOW_S
from benchmarks.peers.systems import Endpoint
from sidecar.client import Client
from sidecar.limit import Limit

_LIMIT = 1_000_000
_MOST = 1_000


def owners(system: str, endpoint: Endpoint, name: str, keys: Sequence[str]) -> dict[str, bool]:
    """Of each key of the limit `name`: whether the asked node owns it.  Each costs a hit of 0.

    Raises RuntimeError where an owner does not answer.
    """
    ask = LINKED[system]
    found: dict[str, bool] = {}
    for first in range(0, len(keys), _MOST):
        part = keys[first : first + _MOST]
        found.update(zip(part, ask(endpoint, name, part), strict=True))
    return found


def await_linked(system: str, endpoint: Endpoint) -> None:
    """Return when the asked node has an answer from the owner of each of many keys; raises RuntimeError after 30 s."""
    end = time.monotonic() + 30
    while True:
        try:
            owners(system, endpoint, "linked", [f"{number}:linked" for number in range(300)])
            return
        except RuntimeError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def _refuse(errors: Iterable[str]) -> None:
    error = next((text for text in errors if text), None)
    if error:
        raise RuntimeError(f"an owner does not answer: {error}")


def _sidegate(endpoint: Endpoint, name: str, keys: Sequence[str]) -> list[bool]:
    limit = Limit(name, _LIMIT, per=WINDOW_S * 1000)
    with Client(endpoint.socket, timeout=5) as client:
        here = client.ping()
        decisions = client.check([limit.request(key, 0) for key in keys])
    _refuse(decision.error for decision in decisions)
    return [decision.owner == here for decision in decisions]


def _gubernator(endpoint: Endpoint, name: str, keys: Sequence[str]) -> list[bool]:
    terms = {"name": name, "hits": 0, "limit": _LIMIT, "duration": WINDOW_S * 1000}
    asked = json.dumps({"requests": [{**terms, "unique_key": key} for key in keys]}).encode()
    request = urllib.request.Request(f"http://{endpoint.http}/v1/GetRateLimits", asked)
    with urllib.request.urlopen(request, timeout=30) as answer:
        responses = json.load(answer)["responses"]
    _refuse(one["error"] for one in responses)
    # A node names the owner of what it forwarded; of its own keys it may say nothing.
    return [one["metadata"].get("owner", endpoint.grpc) == endpoint.grpc for one in responses]


LINKED = {"sidegate": _sidegate, "gubernator": _gubernator}
"""The systems whose nodes share keys among them."""
