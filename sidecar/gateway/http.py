"""The HTTP door: V1 as JSON, health for whoever supervises the daemon, and metrics where they are handed in.

Decides routes, status codes and the form of an error.  Knows no gRPC and opens no path on disk: the listener is handed
in, or an address.  docs/http.md is its manual.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from aiohttp import hdrs, web
from aiohttp.http import HttpProcessingError, HttpVersion11

from sidecar.gateway.gate import Gate
from sidecar.gateway.json_v1 import BadBody, add_request, plain, requests_in
from sidecar.gateway.mapping import TooManyRequests
from sidecar.gateway.proto.gubernator_pb2 import GetRateLimitsReq, LiveCheckResp
from sidecar.gateway.v1 import V1

_BACKLOG = 1024
_SLICE = 100
"""Requests read or answers written in one go, 2 ms: JSON of a full call would else hold up the socket for 30."""
_CONTINUE = "100-continue"
_TOLD = 200
"""Characters of an odd caller's words that are told."""
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The codes of google.rpc, which gRPC's own JSON gateways answer with.
_INVALID, _NOT_FOUND, _EXHAUSTED, _UNIMPLEMENTED, _INTERNAL, _UNAVAILABLE = 3, 5, 8, 12, 13, 14
_DEADLINE, _OUT_OF_RANGE = 4, 11
_CODES = {404: _NOT_FOUND, 405: _UNIMPLEMENTED, 408: _DEADLINE, 413: _EXHAUSTED, 503: _UNAVAILABLE}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    v1: V1,
    report: Callable[..., None],
    metrics: Callable[[], bytes] | None = None,
    *,
    max_body: int,
    patience: float,
) -> web.Application:
    """The routes of docs/http.md.

    report: told of faults of ours.  metrics: the text of /metrics; no such route without.
    max_body: bytes.  patience: seconds that a client may take to send its body.
    """

    def unread(request: web.Request) -> web.Response | None:
        """The refusal of a body that need not be read for it."""
        encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity")
        if encoding.lower() != "identity":
            return _error(415, f"field 'body' is encoded ({encoding[:_TOLD]!r}); it must come as it is")
        if (request.content_length or 0) > max_body:
            return too_large()
        return None

    def too_large() -> web.Response:
        return _error(413, f"field 'body' has more than {max_body} bytes")

    async def expect(request: web.Request) -> web.StreamResponse | None:
        """Whoever waits to be told to send its body is told, or refused before it has sent any."""
        expected = request.headers.get(hdrs.EXPECT, "")
        if request.version >= HttpVersion11:
            if expected.lower() != _CONTINUE:
                return _error(417, f"field 'Expect' must be {_CONTINUE}, not {expected[:_TOLD]!r}")
            if refused := unread(request):
                return refused
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer itself has not begun
        return None

    async def get_rate_limits(request: web.Request) -> web.Response:
        if refused := unread(request):
            return refused
        try:
            async with asyncio.timeout(patience):
                body = await request.read()
        except TimeoutError:
            return _error(408, f"field 'body' was not there within {patience:g} s")
        asked = GetRateLimitsReq()
        for place, one in enumerate(requests_in(body)):
            if place and place % _SLICE == 0:
                await asyncio.sleep(0)
            add_request(asked, place, one)
        traceparent = request.headers.get("traceparent") if v1.traces else None
        answered = await v1.get_rate_limits(asked, None, traceparent)
        responses = []
        for place, response in enumerate(answered.responses):
            if place and place % _SLICE == 0:
                await asyncio.sleep(0)
            responses.append(plain(response))
        return _json(200, {"responses": responses})

    async def health_check(_: web.Request) -> web.Response:
        return _json(200, plain(v1.health_check()))

    async def live_check(_: web.Request) -> web.Response:
        return _json(200, plain(LiveCheckResp()))

    async def livez(_: web.Request) -> web.Response:
        return _json(200, {"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        unready = v1.standing().unready
        return _error(503, unready) if unready else _json(200, {"status": "ok"})

    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except TooManyRequests as error:
            return _error(400, str(error), _OUT_OF_RANGE)
        except BadBody as error:
            return _error(400, str(error))
        except web.HTTPRequestEntityTooLarge:
            return too_large()
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            answer = _error(405, f"{request.method} is no method of {request.path}; it has {allowed}")
            answer.headers["Allow"] = allowed
            return answer
        except web.HTTPNotFound:
            return _error(404, f"no such path: {request.path}")
        except web.HTTPException as error:
            return _error(error.status, error.reason or "")
        except web.RequestPayloadError as error:
            return _error(400, f"field 'body' cannot be read: {str(error)[:_TOLD]}")
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            report("internal_error", error=repr(error), exc_info=True)
            return _error(500, "internal error; the daemon's log tells more", _INTERNAL)

    app = web.Application(client_max_size=max_body, middlewares=[errors])
    app.router.add_post("/v1/GetRateLimits", get_rate_limits, expect_handler=expect)
    gets: dict[str, Handler] = {
        "/v1/HealthCheck": health_check,
        "/v1/LiveCheck": live_check,
        "/livez": livez,
        "/readyz": readyz,
    }
    if metrics is not None:
        exposition = metrics

        async def tell_metrics(_: web.Request) -> web.Response:
            return web.Response(body=exposition(), headers={"Content-Type": _METRICS_TYPE})

        gets["/metrics"] = tell_metrics
    for path, handler in gets.items():
        app.router.add_get(path, handler, expect_handler=expect)
    return app


class HttpDoor:
    """An app where it can be called.

    report: told of trouble.  grace: seconds that what is under way has at the end.  most: connections at a time.
    patience: seconds that a head may take to come whole, or answers to be read on.
    """

    def __init__(
        self, app: web.Application, report: Callable[..., None], *, grace: float, most: int, patience: float
    ) -> None:
        # What aiohttp itself has to say, of clients that speak no HTTP, goes the way of all our trouble.
        logger = logging.Logger("http")
        logger.addHandler(_Told(report))
        self._gate = Gate(self._serving, report, most, patience)
        app.middlewares.insert(0, self._time)
        # A caller that hangs up is waited for no longer.  Bodies are taken as they come: what one decompresses to would
        # have to be bounded too.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=logger,
            shutdown_timeout=grace,
            handler_cancellation=True,
            auto_decompress=False,
        )
        self._listener: asyncio.AbstractServer | None = None

    async def start(self, where: socket.socket | tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        """Serve on a listening Unix socket, or at (host, port), there in TLS if a context is given; raises OSError."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        if isinstance(where, socket.socket):
            self._listener = await loop.create_unix_server(self._gate.plain, sock=where, backlog=_BACKLOG)
        else:
            host, port = where
            if tls is None:
                self._listener = await loop.create_server(self._gate.plain, host, port, backlog=_BACKLOG)
            else:
                for listener in await _listeners(host, port):
                    self._gate.secure(listener, tls)

    def drop_stalled(self, now: float) -> None:
        """Hang up on callers that stand still; call it now and then with the loop's time."""
        self._gate.drop_stalled(now)

    async def stop(self) -> None:
        """Take no more; what is under way is given the grace to finish."""
        if self._listener is not None:
            self._listener.close()
        await self._gate.stop()
        await self._runner.cleanup()

    def _serving(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        return server()

    @web.middleware
    async def _time(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._gate.begun(request.protocol)
        try:
            return await handler(request)
        finally:
            self._gate.ended(request.protocol, request.content.is_eof())


async def _listeners(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of a host; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as stack:
        listeners = []
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            # Not both versions of IP by one socket, which another address of the host may be about to bind.
            listener = stack.enter_context(socket.create_server(address, family=family, backlog=_BACKLOG))
            listener.setblocking(False)
            listeners.append(listener)
        stack.pop_all()
    return listeners


class _Told(logging.Handler):
    """Log records of a library as events of ours."""

    def __init__(self, report: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):  # the caller's fault, and no traceback tells more of it
            self._report("bad_http", reason=" ".join(error.message.split())[:_TOLD])
            return
        self._report("loop_error", error=record.getMessage(), exc_info=error)


def _json(status: int, content: object) -> web.Response:
    return web.Response(
        status=status, text=json.dumps(content, separators=(",", ":")) + "\n", content_type="application/json"
    )


def _error(status: int, why: str, code: int = 0) -> web.Response:
    """An error as gRPC's JSON gateways write one: a code of google.rpc and a text."""
    return _json(status, {"code": code or _CODES.get(status, _INVALID), "message": why, "details": []})


def address_of(text: str) -> tuple[str, int]:
    """(host, port) of "host:port", an IPv6 host in brackets."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
