"""Where spans go: the tracer provider that the environment describes, and its end.

Decides what `tracing = on` does with what is installed.  The variables are OpenTelemetry's own (OTEL_*), read by its
SDK; this file only names the exporters and knows no span.  Of the SDK it uses what is public: its own configurator for
all signals is not, and would set up metrics and logs too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Set
from contextlib import suppress
from importlib.metadata import entry_points
from threading import Thread
from typing import Any

from opentelemetry import trace

from sidecar.config import ConfigError
from sidecar.tracing import Tracing

_GROUP = "opentelemetry_traces_exporter"
_VARIABLE = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def start(
    node: str, release: str, trouble: Callable[..., None], log: Any, environ: Mapping[str, str] = os.environ
) -> tuple[Tracing | None, Callable[[float], Awaitable[None]] | None]:
    """Tracing, and how to end it within so many seconds; each None if there is none.  To be called on the loop.

    trouble: told, as (event, **fields), of what may repeat.  Raises ConfigError if the variables ask for what is not
    there; if nobody takes spans at all, says so once and traces nothing.
    """
    logging.getLogger("opentelemetry").addHandler(_Lines(trouble))
    provider, stop, where = _provider(node, release, environ)
    if provider is None:
        log.warning("tracing_idle", reason=where)
        return None, None
    log.info("tracing_started", exporters=where)
    return Tracing(provider.get_tracer("sidegate", release), trouble), stop


def _provider(
    node: str, release: str, environ: Mapping[str, str]
) -> tuple[trace.TracerProvider | None, Callable[[float], Awaitable[None]] | None, str]:
    """A provider, how to stop it if it is ours, and the exporters' names; or None, and why there is none."""
    try:
        there = trace.get_tracer_provider()
    except Exception as error:  # whatever loading it raises
        raise ConfigError(f"tracing: OTEL_PYTHON_TRACER_PROVIDER cannot be used: {error!r}") from None
    if isinstance(there, trace.NoOpTracerProvider):
        return None, None, "OTEL_PYTHON_TRACER_PROVIDER names the one that does nothing"
    if not isinstance(there, trace.ProxyTracerProvider):
        return there, None, "as set up before the daemon"  # by opentelemetry-instrument, which also ends it
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None, None, "OTEL_SDK_DISABLED is true"
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        return None, None, "opentelemetry-sdk is not installed"
    names = exporter_names(environ, frozenset(entry_points(group=_GROUP).names))
    if not names:
        none = f"{_VARIABLE} is none" if environ.get(_VARIABLE) else "opentelemetry-exporter-otlp is not installed"
        return None, None, none
    try:
        known = {"service.name": "sidegate", "service.version": release, "service.instance.id": node}
        # What OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say goes before what is known here.
        resource = Resource.create({**known, **OTELResourceDetector().detect().attributes})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for name in names:
            (found,) = entry_points(group=_GROUP, name=name)
            provider.add_span_processor(BatchSpanProcessor(found.load()()))
    except Exception as error:  # an exporter's own, at an address or a certificate that it cannot use
        raise ConfigError(f"tracing: exporter {', '.join(names)} cannot be used: {error!r}") from None
    return provider, lambda seconds: _finish(provider.shutdown, seconds), ", ".join(names)


def exporter_names(environ: Mapping[str, str], installed: Set[str]) -> list[str]:
    """The entry points of the exporters that the variables ask for; none if they say so, or if they say nothing and
    none of OTLP is installed.  Raises ConfigError for what is not installed."""
    said = [name.strip() for name in environ.get(_VARIABLE, "").split(",") if name.strip()]
    if said == ["none"]:
        return []
    names: list[str] = []
    for name in said or ["otlp"]:
        wanted = [name] if name != "otlp" else _otlp(environ)
        there = [each for each in wanted if each in installed]
        if not there and not said:
            return []
        if not there:
            raise ConfigError(f"tracing: {_VARIABLE} names {name!r}, and no such exporter is installed")
        if there[0] not in names:
            names.append(there[0])
    return names


def _otlp(environ: Mapping[str, str]) -> list[str]:
    """The exporters of OTLP that would do, the better one first."""
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        said = environ.get(variable, "").strip()
        if said:
            if said not in _PROTOCOLS:
                raise ConfigError(f"tracing: {variable} must be one of {', '.join(_PROTOCOLS)}, not {said!r}")
            return [_PROTOCOLS[said]]
    return list(_PROTOCOLS.values())


async def _finish(shut_down: Callable[[], None], seconds: float) -> None:
    """Send what waits to be sent; a collector that is away holds a stopping daemon up no longer than this."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def work() -> None:
        try:
            shut_down()
        finally:
            with suppress(RuntimeError):  # the loop, if it came to its end first
                loop.call_soon_threadsafe(done.set)

    # A thread that the interpreter's end does not wait for, unlike the loop's own.
    Thread(target=work, daemon=True).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await done.wait()


class _Lines(logging.Handler):
    """Carries what OpenTelemetry logs, on whatever thread, to the daemon's own log."""

    def __init__(self, trouble: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._trouble = trouble
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        reason = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            reason += f": {record.exc_info[1]!r}"
        try:
            self._loop.call_soon_threadsafe(lambda: self._trouble("tracing_failed", reason=reason))
        except RuntimeError:
            pass  # the loop has ended, and the daemon with it
