"""Spans of batches, kept in memory: which batches have one, whose child it is, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from cluster_link.membership import Peer
from cluster_link.ring import Ring
from sidecar.clock import ManualClock
from sidecar.forward import FALLBACKS, Asker, Deadlines
from sidecar.router import Router
from sidecar.service import Service
from sidecar.sync import GlobalSync
from sidecar.table import Table
from sidecar.tracing import Tracing
from sidecar.wire import BadFrame, Op, Packer, frame
from tests.fakes import FakeAsker, FakeClock, FakeLink
from tests.helpers import T, fields

ME, OWNER = Peer("me", "h:1"), Peer("owner", "10.0.0.2:1051")
RING = Ring([ME, OWNER])
MINE, THEIRS = (next(f"k{n}" for n in range(99) if RING.owner("n", f"k{n}") == peer) for peer in (ME, OWNER))
TRACE, OTHER = "0af7651916cd43dd8448eb211c80319c", "1af7651916cd43dd8448eb211c80319c"
SPAN, SECOND = "b7ad6b7169203331", "c7ad6b7169203331"


def context(trace_id: str = TRACE, span_id: str = SPAN, flags: str = "01") -> str:
    """A traceparent."""
    return f"00-{trace_id}-{span_id}-{flags}"


class Traced:
    """A Tracing whose spans are kept; `trouble` is what it told."""

    def __init__(self, **more: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.trouble: list[tuple[str, dict[str, object]]] = []
        provider = TracerProvider(shutdown_on_exit=False, **more)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(
            provider.get_tracer("test"), lambda event, **fields: self.trouble.append((event, fields))
        )

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """The spans that have ended."""
        return self.exporter.get_finished_spans()

    def waiter(self, text: str | None) -> Asker:
        """Someone who waits within the trace that this context names, or within none."""
        return FakeAsker() if text is None else self.tracing.asked(text, FakeAsker())

    def leave(self, *contexts: str | None) -> ReadableSpan:
        """The span of a batch of requests with these contexts, after it was answered."""
        span = self.tracing.forwarded(OWNER, Op.CHECK, [self.waiter(text) for text in contexts])
        assert span is not None
        span.end("")
        return self.spans[-1]


def identity(span: ReadableSpan) -> tuple[str, str]:
    """A span's (trace id, span id), in hex."""
    of = span.get_span_context()
    assert of is not None
    return trace.format_trace_id(of.trace_id), trace.format_span_id(of.span_id)


def parent(span: ReadableSpan) -> str | None:
    """The parent's span id, in hex."""
    return None if span.parent is None else trace.format_span_id(span.parent.span_id)


def links(span: ReadableSpan) -> list[tuple[str, str]]:
    """The links' (trace id, span id), in hex."""
    return [
        (trace.format_trace_id(link.context.trace_id), trace.format_span_id(link.context.span_id))
        for link in span.links
    ]


@pytest.fixture
def traced() -> Traced:
    """Spans in memory."""
    return Traced()


# --- Who is traced


def test_a_sampled_caller_is_marked_and_reached_as_before(traced: Traced) -> None:
    """The mark changes nothing in how the asker is asked and answered."""
    asker = FakeAsker()
    marked = traced.tracing.asked(context(), asker)
    marked.send(b"answer")
    assert asker.sent == [b"answer"]
    assert not marked.gone
    asker.gone = True
    assert marked.gone
    assert traced.tracing.counts()["malformed"] == 0


def test_a_caller_that_is_not_sampled_is_left_alone(traced: Traced) -> None:
    """The flag decides, and this is no fault."""
    asker = FakeAsker()
    assert traced.tracing.asked(context(flags="00"), asker) is asker
    assert traced.tracing.asked(context(flags="02"), asker) is asker
    assert traced.tracing.counts()["malformed"] == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "traceparent",
        context(trace_id="0" * 32),
        context(span_id="0" * 16),
        context(trace_id=TRACE.upper()),
        context(trace_id=TRACE[1:]),
        context() + "-more",
        "ff" + context()[2:],
        context(flags="1"),
        "\udcff" * 55,
        context() * 100,
    ],
)
def test_what_is_no_traceparent_is_ignored_and_counted(traced: Traced, text: str) -> None:
    """As the W3C has it: the request is answered as if it had brought none."""
    asker = FakeAsker()
    assert traced.tracing.asked(text, asker) is asker
    assert traced.tracing.counts()["malformed"] == 1


def test_a_later_version_is_read_as_far_as_it_is_known(traced: Traced) -> None:
    """Version 01 may say more behind the flags."""
    assert identity(traced.leave("01" + context()[2:] + "-more"))[0] == TRACE


# --- A batch that leaves


def test_a_batch_without_a_traced_request_has_no_span(traced: Traced) -> None:
    """Nobody in a trace, nothing to tell."""
    assert traced.tracing.forwarded(OWNER, Op.CHECK, [traced.waiter(None), traced.waiter(context(flags="00"))]) is None
    assert not traced.spans


def test_a_batch_is_a_child_of_its_traced_request(traced: Traced) -> None:
    """One of three is traced: the span is its child, of kind CLIENT, and says where the batch of three went."""
    span = traced.leave(None, context(), None)
    assert (identity(span)[0], parent(span), links(span)) == (TRACE, SPAN, [])
    assert (span.name, span.kind) == ("sidegate.check", trace.SpanKind.CLIENT)
    assert dict(span.attributes or {}) == {
        "sidegate.peer": "owner",
        "sidegate.requests": 3,
        "sidegate.outcome": "answered",
        "server.address": "10.0.0.2",
        "server.port": 1051,
    }
    assert traced.tracing.counts() == {"forwarded": 1, "answered": 0, "malformed": 0}


def test_two_requests_of_one_trace(traced: Traced) -> None:
    """The first one's span is the parent, the second one's a link; a span that comes twice is told once."""
    span = traced.leave(context(), context(), context(span_id=SECOND), context(span_id=SECOND))
    assert (identity(span)[0], parent(span), links(span)) == (TRACE, SPAN, [(TRACE, SECOND)])


def test_requests_of_several_traces(traced: Traced) -> None:
    """None of them is the parent: a trace of its own, with a link to each."""
    span = traced.leave(context(), context(trace_id=OTHER))
    assert identity(span)[0] not in (TRACE, OTHER)
    assert (parent(span), links(span)) == (None, [(TRACE, SPAN), (OTHER, SPAN)])


def test_what_happens_to_be_current_is_no_parent(traced: Traced) -> None:
    """A span that is current where the batch leaves has nothing to do with the batch."""
    stranger = TracerProvider(shutdown_on_exit=False).get_tracer("stranger").start_span("stranger")
    with trace.use_span(stranger):
        assert parent(traced.leave(context(), context(trace_id=OTHER))) is None


def test_a_batch_that_was_not_answered(traced: Traced) -> None:
    """The span is an error and says why."""
    span = traced.tracing.forwarded(OWNER, Op.RESET, [traced.waiter(context())])
    assert span is not None
    assert not traced.spans
    span.end("owner is away")
    (told,) = traced.spans
    assert told.name == "sidegate.reset"
    assert (told.status.status_code, told.status.description) == (trace.StatusCode.ERROR, "owner is away")
    assert (told.attributes or {})["sidegate.outcome"] == "failed"


def test_a_sampler_that_takes_nothing() -> None:
    """The peer is sent no context, and nothing is told."""
    traced = Traced(sampler=ALWAYS_OFF)
    assert traced.tracing.forwarded(OWNER, Op.CHECK, [traced.waiter(context())]) is None
    assert not traced.spans
    assert traced.tracing.counts()["forwarded"] == 0


class Broken:
    """A tracer's part that fails."""

    def __getattr__(self, _: str) -> Any:
        raise RuntimeError("broken")


def test_a_tracer_that_fails_costs_no_request(traced: Traced) -> None:
    """The batch leaves without a span, and the trouble is told."""
    tracing = Tracing(cast(trace.Tracer, Broken()), lambda event, **fields: traced.trouble.append((event, fields)))
    assert tracing.forwarded(OWNER, Op.CHECK, [tracing.asked(context(), FakeAsker())]) is None
    assert tracing.answering(Op.CHECK, ((),), context()) is None
    assert traced.trouble == [("tracing_failed", {"reason": "RuntimeError('broken')"})] * 2


# --- A batch that comes


def test_the_owners_span_is_a_child_of_the_askers() -> None:
    """The context that leaves with a batch makes one trace of both ends: caller, asked daemon, owner."""
    asked, owner = Traced(), Traced()
    sent = asked.tracing.forwarded(OWNER, Op.CHECK, [asked.waiter(context())])
    assert sent is not None
    came = owner.tracing.answering(Op.CHECK, ((), ()), sent.context)
    assert came is not None
    came.end("")
    sent.end("")
    (client,), (server,) = asked.spans, owner.spans
    assert identity(server)[0] == identity(client)[0] == TRACE
    assert parent(server) == identity(client)[1]
    assert (server.name, server.kind) == ("sidegate.check", trace.SpanKind.SERVER)
    assert dict(server.attributes or {}) == {"sidegate.requests": 2, "sidegate.outcome": "answered"}
    assert owner.tracing.counts() == {"forwarded": 0, "answered": 1, "malformed": 0}


@pytest.mark.parametrize("text", ["nonsense", context(flags="00")])
def test_a_batch_with_nothing_to_follow(traced: Traced, text: str) -> None:
    """A context that is none, or that is not sampled, has no span."""
    assert traced.tracing.answering(Op.CHECK, ((),), text) is None
    assert traced.tracing.answering(99, None, text) is None
    assert not traced.spans


# --- Through a node


class Node:
    """A service that routes to a fake link, with or without tracing."""

    def __init__(self, traced: Traced | None) -> None:
        self.service = Service(Table(), ManualClock(T), "me", dict)
        self.service.tracing = None if traced is None else traced.tracing
        self.link = FakeLink()
        clock = FakeClock()
        router = Router(
            me=ME,
            ring=RING,
            link=lambda _: self.link,
            replicas=cast(GlobalSync, _Cold(self.link)),
            deadlines=Deadlines(clock.later, clock.now),
            decide=self.service.decide_here,
            decide_alone=lambda _: None,
            fallback=FALLBACKS["error"],
            timeout=0.5,
        )
        self.service.route_by(router)

    def ask(self, op: int, payload: object, text: str | None) -> bytes | None:
        """What comes at once for a frame with this context."""
        return self.service.answer(Packer().request_body(7, op, payload, None, text), T, FakeAsker())

    def marks(self) -> list[object]:
        """The trace of each waiter at the link."""
        return [getattr(waiter, "trace", None) for waiter in self.link.waiters]


class _Cold:
    """GLOBAL without replicas: every request goes to its owner."""

    def __init__(self, link: FakeLink) -> None:
        self._sync = GlobalSync(
            cast(Any, None), lambda: T, Table(), lambda *_: None, lambda _: link, lambda *_, **__: None
        )
        self.ask = self._sync.ask

    def decide(self, *_: object) -> None:
        return None


@pytest.mark.parametrize(
    ("op", "payload"),
    [
        (Op.CHECK, [fields("n", THEIRS)]),
        (Op.CHECK, [fields("n", MINE), fields("n", THEIRS)]),
        (Op.CHECK, [fields("n", THEIRS, behavior=2)]),
        (Op.RESET, ("n", THEIRS)),
    ],
    ids=["check", "check of two", "GLOBAL", "reset"],
)
def test_a_forwarded_request_waits_within_its_callers_trace(traced: Traced, op: int, payload: object) -> None:
    """Whatever goes to an owner, the batch that carries it becomes the caller's child."""
    node = Node(traced)
    assert node.ask(op, payload, context()) is None
    span = traced.tracing.forwarded(OWNER, op, node.link.waiters)
    assert span is not None
    span.end("")
    assert parent(traced.spans[0]) == SPAN


@pytest.mark.parametrize("text", [None, context(flags="00"), "nonsense"])
def test_a_request_that_is_not_traced_waits_as_ever(traced: Traced, text: str | None) -> None:
    """No context, one that is not sampled, one that is none."""
    node = Node(traced)
    assert node.ask(Op.CHECK, [fields("n", THEIRS)], text) is None
    assert node.marks() == [None]


def test_with_tracing_off_a_context_changes_nothing() -> None:
    """It is read over: the answer is the same, and nobody is marked."""
    node = Node(None)
    plain = node.ask(Op.CHECK, [fields("n", MINE, hits=0)], None)
    assert node.ask(Op.CHECK, [fields("n", MINE, hits=0)], context()) == plain
    assert plain is not None
    node.ask(Op.CHECK, [fields("n", THEIRS)], context())
    assert node.marks() == [None]


@pytest.mark.parametrize("key", [MINE, THEIRS])
def test_frames_with_a_context_are_not_remembered(traced: Traced, key: str) -> None:
    """The next one's bytes differ, so that it would only push out others; the same frame without one is."""
    node = Node(traced)
    for text, known in ((context(), False), (None, True)):
        data = frame(Packer().request_body(7, Op.CHECK, [fields("n", key)], None, text))
        node.ask(Op.CHECK, [fields("n", key)], text)
        assert (node.service.answer_again(data, T, FakeAsker()) is not None) == known
    # What follows a remembered frame waits within no trace.
    assert node.marks()[1:] == [None] * (len(node.marks()) - 1)


def test_a_batch_from_a_peer_is_a_span(traced: Traced) -> None:
    """Answered as ever, and told; without a context, or with tracing off, it is answered and not told."""
    node, quiet = Node(traced), Node(None)
    bodies = [Packer().request_body(7, Op.CHECK, [fields("n", "k", hits=0)], None, text) for text in (context(), None)]
    answers = {each.service.answer_peer(body, T) for each in (node, quiet) for body in bodies}
    assert len(answers) == 1
    (span,) = traced.spans
    assert (parent(span), (span.attributes or {})["sidegate.outcome"]) == (SPAN, "answered")


def test_a_batch_that_is_none_ends_its_span(traced: Traced) -> None:
    """The stream breaks as ever; the span says why."""
    with pytest.raises(BadFrame, match="op 99"):
        Node(traced).service.answer_peer(Packer().request_body(7, 99, None, None, context()), T)
    (span,) = traced.spans
    assert (span.name, span.status.description) == ("sidegate.unknown", "op 99 is none of a peer's")


def test_info_tells_of_tracing_where_it_is_on(traced: Traced) -> None:
    """The counts, and no such key on a daemon that traces nothing."""
    node = Node(traced)
    node.ask(Op.CHECK, [fields("n", THEIRS)], "nonsense")
    assert node.service._info(T)["tracing"] == {"forwarded": 0, "answered": 0, "malformed": 1}
    assert "tracing" not in Node(None).service._info(T)
