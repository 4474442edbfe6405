"""The gRPC door: pb.gubernator.V1, with grpc.health.v1 and reflection, on the port that peers use too.

Decides gRPC's status codes, and that a call's deadline is its requests' budget.  Binds nothing: the server is handed
in.  Import sidecar.cluster first, which sets gRPC up.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sidecar.gateway.mapping import TooManyRequests
from sidecar.gateway.proto import gubernator_pb2 as pb
from sidecar.gateway.proto import gubernator_pb2_grpc
from sidecar.gateway.v1 import V1

SERVICE = pb.DESCRIPTOR.services_by_name["V1"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcDoor(gubernator_pb2_grpc.V1Servicer):
    """V1 over gRPC.  Not serving, by grpc.health.v1, until `serve`."""

    def __init__(self, v1: V1) -> None:
        self._v1 = v1
        self._health = health.aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add all three services to a server that has not started."""
        gubernator_pb2_grpc.add_V1Servicer_to_server(self, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    async def serve(self, serving: bool) -> None:
        """Tell whoever asks or watches that this node takes requests, or that it does not."""
        for service in ("", SERVICE):
            await self._health.set(service, _SERVING if serving else _NOT_SERVING)

    async def GetRateLimits(self, request: pb.GetRateLimitsReq, context: Any) -> pb.GetRateLimitsResp:
        left = context.time_remaining()
        budget = None if left is None else max(1, int(left * 1000))
        traceparent = _traceparent(context) if self._v1.traces else None
        try:
            return await self._v1.get_rate_limits(request, budget, traceparent)
        except TooManyRequests as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
            raise

    async def HealthCheck(self, request: pb.HealthCheckReq, context: Any) -> pb.HealthCheckResp:
        return self._v1.health_check()

    async def LiveCheck(self, request: pb.LiveCheckReq, context: Any) -> pb.LiveCheckResp:
        return pb.LiveCheckResp()


def _traceparent(context: Any) -> str | None:
    """The call's traceparent; of several, gRPC itself lets one through."""
    return next((value for name, value in context.invocation_metadata() or () if name == "traceparent"), None)
