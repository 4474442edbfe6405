"""V1's messages <-> our requests and decisions; one place for both doors.

Decides what a V1 client is told where its API has no word of ours: it knows two statuses and no `degraded`.  Knows no
door, no loop and no clock, and refuses nothing that the table would refuse anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sidecar.gateway.proto.gubernator_pb2 import RateLimitReq, RateLimitResp, Status
from sidecar.messages import MAX_REQUESTS
from sidecar.messages import Status as OurStatus

_ERROR = int(OurStatus.ERROR)
_NO_NAME = "field 'namespace' cannot be empty"
_NO_KEY = "field 'unique_key' cannot be empty"
_NO_DECISION = "what its owner sent is no decision"


class TooManyRequests(ValueError):
    """More requests in one call than it may hold; the call fails as a whole."""

    def __init__(self, count: int) -> None:
        super().__init__(f"field 'requests' holds {count} requests, more than {MAX_REQUESTS}")


def check_count(count: int) -> None:
    """Raise TooManyRequests if one call may not hold so many."""
    if count > MAX_REQUESTS:
        raise TooManyRequests(count)


def refusal(asked: RateLimitReq) -> str:
    """Why V1 refuses this request before anyone is asked, or "": its own words, which clients compare with."""
    return _NO_KEY if not asked.unique_key else _NO_NAME if not asked.name else ""


def request_of(asked: RateLimitReq) -> tuple[Any, ...]:
    """The request as it stands in a frame (docs/protocol.md); its metadata is dropped."""
    return (
        asked.name,
        asked.unique_key,
        asked.hits,
        asked.limit,
        asked.duration,
        asked.algorithm,
        asked.behavior,
        asked.burst,
        asked.created_at if asked.HasField("created_at") else None,
    )


def response_of(answer: Sequence[Any], node: str) -> RateLimitResp:
    """The V1 answer; node: the owner where the answer names none, which is the node that was asked.

    An error comes as UNDER_LIMIT with a text, since V1 has no third status.  What a fallback decided has an empty
    error, as clients take any text for a failure, and the cause in metadata["degraded"].
    """
    status, limit, remaining, reset_time = answer[:4]
    owner, degraded, why = answer[5:8] if len(answer) == 8 else (answer[5] if len(answer) > 5 else None, False, "")
    metadata = {"owner": _clean(owner or node)}
    if status == _ERROR:
        return error_of(why or "no reason was given", metadata["owner"])
    if degraded:
        metadata["degraded"] = _clean(why or "true")
    try:
        return RateLimitResp(
            status=Status.OVER_LIMIT if status else Status.UNDER_LIMIT,
            limit=limit,
            remaining=remaining,
            reset_time=reset_time,
            metadata=metadata,
        )
    except (TypeError, ValueError):  # from a peer gone wrong
        return error_of(_NO_DECISION, metadata["owner"])


def error_of(why: str, node: str) -> RateLimitResp:
    """The answer to a request that was not decided."""
    return RateLimitResp(error=_clean(why), metadata={"owner": node})


def _clean(text: object) -> str:
    """Text that protobuf takes: odd bytes of a peer's come as lone surrogates."""
    return str(text).encode(errors="replace").decode()
