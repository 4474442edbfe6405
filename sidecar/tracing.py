"""Batches that carry traced requests, told as spans (docs/tracing.md).

Decides which batches have a span, what it says, and what its parent and its links are.  Knows no stream and not what
becomes of a span (exporters.py): of OpenTelemetry it uses the API alone.  Loaded only by a daemon that traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster_link.membership import Peer
from sidecar.forward import Asker
from sidecar.wire import Op

_HEADER = "traceparent"
_CHECK = int(Op.CHECK)
_NAMES = {int(op): f"sidegate.{op.name.lower()}" for op in Op}


class Tracing:
    """One node's spans.  trouble: told, as (event, **fields), of a tracer that fails; no request fails with it."""

    def __init__(self, tracer: trace.Tracer, trouble: Callable[..., None]) -> None:
        self._tracer = tracer
        self._trouble = trouble
        self._propagator = TraceContextTextMapPropagator()
        self._forwarded = self._answered = self._malformed = 0

    def asked(self, context: str, asker: Asker) -> Asker:
        """The asker, marked with the trace that a frame's context names; as it was, if that is not sampled or is no
        traceparent at all: the W3C has such ones ignored."""
        seen = self._read(context)
        return asker if seen is None else _Traced(asker, seen)

    def forwarded(self, peer: Peer, op: int, waiters: Sequence[object]) -> BatchSpan | None:
        """The span of a batch that leaves for `peer`; None if nobody who waits for it is traced.

        A child of its request's span.  Of several in one trace, the first one's, with links to the others; of several
        traces, a trace of its own with links to all.
        """
        marks = [mark for waiter in waiters if (mark := getattr(waiter, "trace", None)) is not None]
        if not marks:
            return None
        found = list({(mark.trace_id, mark.span_id): mark for mark in marks}.values())  # a frame's requests share one
        one = all(mark.trace_id == found[0].trace_id for mark in found)
        host, _, port = peer.address.rpartition(":")
        says: dict[str, str | int] = {
            "sidegate.peer": peer.name,
            "sidegate.requests": len(waiters),
            "server.address": host,
            "server.port": int(port),
        }
        span = self._start(op, trace.SpanKind.CLIENT, says, found[0] if one else None, found[1:] if one else found)
        if span is None or not span.context:
            return None
        self._forwarded += 1
        return span

    def answering(self, op: int, payload: Any, context: str) -> BatchSpan | None:
        """The span of a batch from a peer, a child of the one that the peer made of it."""
        seen = self._read(context)
        if seen is None:
            return None
        requests = len(payload) if op == _CHECK and type(payload) is tuple else 1
        span = self._start(op, trace.SpanKind.SERVER, {"sidegate.requests": requests}, seen, ())
        self._answered += span is not None
        return span

    def counts(self) -> Mapping[str, int]:
        """Spans of batches to peers and from them, and contexts that were no traceparent."""
        return {"forwarded": self._forwarded, "answered": self._answered, "malformed": self._malformed}

    def _read(self, context: str) -> trace.SpanContext | None:
        seen = trace.get_current_span(self._propagator.extract({_HEADER: context})).get_span_context()
        if not seen.is_valid:
            self._malformed += 1
            return None
        return seen if seen.trace_flags.sampled else None

    def _start(
        self,
        op: int,
        kind: trace.SpanKind,
        says: Mapping[str, str | int],
        parent: trace.SpanContext | None,
        links: Sequence[trace.SpanContext],
    ) -> BatchSpan | None:
        # An empty context: nothing that happens to be current on the loop is to become the parent.
        within = Context()
        if parent is not None:
            within = trace.set_span_in_context(trace.NonRecordingSpan(parent), within)
        try:
            span = self._tracer.start_span(
                _NAMES.get(op, "sidegate.unknown"), within, kind, says, [trace.Link(link) for link in links]
            )
            carrier: dict[str, str] = {}
            if span.get_span_context().trace_flags.sampled:
                self._propagator.inject(carrier, trace.set_span_in_context(span, Context()))
            return BatchSpan(span, carrier.get(_HEADER, ""), self._trouble)
        except Exception as error:  # a sampler's or a processor's, which may be anybody's
            self._trouble("tracing_failed", reason=repr(error))
            return None


class BatchSpan:
    """One batch's span while it is under way.  context: its traceparent, empty if it is not sampled."""

    __slots__ = ("_span", "_trouble", "context")

    def __init__(self, span: trace.Span, context: str, trouble: Callable[..., None]) -> None:
        self._span = span
        self._trouble = trouble
        self.context = context

    def end(self, why: str) -> None:
        """The batch was answered, if `why` is empty; else why it was not."""
        try:
            self._span.set_attribute("sidegate.outcome", "failed" if why else "answered")
            if why:
                self._span.set_status(trace.StatusCode.ERROR, why)
            self._span.end()
        except Exception as error:
            self._trouble("tracing_failed", reason=repr(error))


class _Traced:
    """Who asks, and within which trace."""

    __slots__ = ("_asker", "trace")

    def __init__(self, asker: Asker, seen: trace.SpanContext) -> None:
        self._asker = asker
        self.trace = seen

    @property
    def gone(self) -> bool:
        return self._asker.gone

    def send(self, data: bytes) -> None:
        self._asker.send(data)
