"""V1's three calls, whichever door they come through.

Decides how a call meets the router that answers the socket's frames, and what a node tells of its health.  Knows
neither gRPC nor HTTP; the mapping of values is mapping.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sidecar.gateway.mapping import check_count, error_of, refusal, request_of, response_of
from sidecar.gateway.proto.gubernator_pb2 import GetRateLimitsReq, GetRateLimitsResp, HealthCheckResp, PeerHealthResp
from sidecar.service import Service


class Standing(NamedTuple):
    """How this node stands.

    unready: why it takes no requests now, "" if it does.  address: its own, "" if it has none.
    peers: addresses of all nodes, its own included.  away: names of those that do not answer.
    """

    unready: str
    address: str
    peers: Sequence[str]
    away: Sequence[str]


class V1:
    """V1 on one node.  now: epoch ms.  node: its name.  standing: how it stands at present."""

    def __init__(self, service: Service, now: Callable[[], int], node: str, standing: Callable[[], Standing]) -> None:
        self._service = service
        self._now = now
        self._node = node
        self.standing = standing
        self._waiting: set[asyncio.Future[Sequence[Any]]] = set()

    @property
    def traces(self) -> bool:
        """Whether a caller's traceparent is of use."""
        return self._service.tracing is not None

    async def get_rate_limits(
        self, asked: GetRateLimitsReq, budget: int | None, traceparent: str | None = None
    ) -> GetRateLimitsResp:
        """Decide every request, in order; budget: ms that the caller waits, None if it sets no bound.
        traceparent: of the caller's span, as it came.

        Raises TooManyRequests.
        """
        check_count(len(asked.requests))
        node = self._node
        refusals = [refusal(one) for one in asked.requests]
        requests = [request_of(one) for one, why in zip(asked.requests, refusals, strict=True) if not why]
        self._service.tally.other.owned.error += len(refusals) - len(requests)
        answers = iter(await self._decide(requests, budget, traceparent) if requests else ())
        return GetRateLimitsResp(
            responses=[error_of(why, node) if why else response_of(next(answers), node) for why in refusals]
        )

    async def _decide(self, requests: list[Any], budget: int | None, traceparent: str | None) -> Sequence[Any]:
        later: asyncio.Future[Sequence[Any]] = asyncio.get_running_loop().create_future()
        caller = _Caller(later)
        asker = caller if traceparent is None else self._service.traced(traceparent, caller)
        answers = self._service.check(requests, self._now(), asker, budget, _as_they_are)
        if answers is not None:
            return answers
        self._waiting.add(later)
        try:
            return await later
        finally:
            caller.gone = True  # a call that was cancelled is waited for by nobody
            self._waiting.discard(later)

    def health_check(self) -> HealthCheckResp:
        """Healthy while requests are taken; a peer that is away is told of, and makes no other node unhealthy."""
        unready, address, peers, away = self.standing()
        return HealthCheckResp(
            status="unhealthy" if unready else "healthy",
            message=unready or (f"away: {', '.join(away)}" if away else ""),
            peer_count=len(peers),
            advertise_address=address,
            local_peers=[PeerHealthResp(grpc_address=peer) for peer in peers],
        )

    async def finish(self, grace: float) -> None:
        """Wait for the calls that are under way now, `grace` seconds at most."""
        if self._waiting:
            await asyncio.wait(set(self._waiting), timeout=grace)


class _Caller:
    """Who waits for answers of other nodes (forward.Asker)."""

    __slots__ = ("_later", "gone")

    def __init__(self, later: asyncio.Future[Sequence[Any]]) -> None:
        self._later = later
        self.gone = False

    def send(self, answers: Any) -> None:
        if not self._later.done():
            self._later.set_result(answers)


def _as_they_are(answers: list[Any]) -> list[Any]:
    """Answers need no packing here."""
    return answers
