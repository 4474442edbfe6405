"""A link to one peer, by itself, on a loop of its own: what it settles and how, versions, silence, closing."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc.aio
import pytest

from cluster_link.membership import Peer
from cluster_link.peer_client import PeerClient, Settings, Trace
from cluster_link.peer_server import PeerServer
from sidecar.cluster import _codec
from sidecar.wire import Op, Outcome, Packer, open_request
from tests.clusters import SlowProxy, Watch, free_port


class FakeWaiter:
    """Who waits for one answer; `outcomes` is what came."""

    waiting = True

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def answered(self, answer: Any, node: str) -> None:
        self.outcomes.append("answered")

    def failed(self, why: str, sent: bool) -> None:
        self.outcomes.append("failed")


def link(port: int) -> PeerClient:
    """A link that is told to dial this port by the first `ask`."""
    peer = Peer("peer", f"127.0.0.1:{port}")
    return PeerClient(peer, [_codec(Packer("me"))], Settings(1_000, 0.0, 20_000, 0.5), lambda *_, **__: None)


def test_closing_a_link_returns_at_whatever_moment() -> None:
    """Six hundred links to a port where nobody is, closed within half a second: each close returns, each task is
    over, and each waiter was settled once.  (A daemon that stops closes its links, and must end.)"""

    async def close_one() -> tuple[bool, list[str]]:
        client, waiter = link(port), FakeWaiter()
        client.ask(Op.CHECK, ("n", "k", 1, 1, 1), waiter)
        await asyncio.sleep(random.uniform(0.0, 0.5))
        closing = asyncio.ensure_future(client.close())
        done, _ = await asyncio.wait([closing], timeout=20)
        closing.cancel()
        return bool(done), waiter.outcomes

    async def close_all() -> list[tuple[bool, list[str]]]:
        found = []
        for _ in range(6):
            found += await asyncio.gather(*(close_one() for _ in range(100)))
        return found

    port = free_port()
    found = asyncio.run(close_all())
    assert [done for done, _ in found].count(False) == 0
    assert all(outcomes == ["failed"] for _, outcomes in found)


def test_a_closed_link_dials_no_more() -> None:
    """Not even before the collector runs: the daemon's never looks at what has grown old."""

    async def close_and_listen() -> int:
        port = free_port()
        client = link(port)
        client.ask(Op.CHECK, ("n", "k", 1, 1, 1), FakeWaiter())
        await asyncio.sleep(1.0)
        await client.close()
        with Watch(port) as watch:
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                await asyncio.sleep(0.05)
            return watch.connections

    gc.disable()
    try:
        assert asyncio.run(close_and_listen()) == 0
    finally:
        gc.enable()


# --- With a peer that answers

ANSWERS = Packer("owner")


class Listener:
    """A peer's end: answers each request with its key, keeps what it was sent, and can be told to answer oddly."""

    def __init__(self, odd: Callable[[int, Any], bytes] | None = None) -> None:
        self.batches: list[tuple[int, Any]] = []
        self.contexts: list[str | None] = []
        self.odd = odd

    def answer(self, body: bytes) -> bytes:
        """The answer to one batch."""
        batch_id, op, payload, _, context = open_request(body)
        if op == Op.PING:
            return ANSWERS.answer_body(batch_id, Outcome.ANSWERED, None)
        self.batches.append((op, payload))
        self.contexts.append(context)
        if self.odd is not None:
            return self.odd(batch_id, payload)
        answer = [request[1] for request in payload] if op == Op.CHECK else payload
        return ANSWERS.answer_body(batch_id, Outcome.ANSWERED, answer)


class Kept(FakeWaiter):
    """A waiter that keeps what came."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[Any] = []
        self.over = asyncio.Event()

    def answered(self, answer: Any, node: str) -> None:
        self.came.append((answer, node))
        self.over.set()

    def failed(self, why: str, sent: bool) -> None:
        self.came.append((why, sent))
        self.over.set()


@asynccontextmanager
async def linked(
    listener: Listener,
    versions: tuple[int, ...] = (1,),
    timeout: float = 0.5,
    limit: int = 1_000,
    queue: int = 20_000,
    trace: Trace | None = None,
) -> AsyncIterator[tuple[PeerClient, PeerServer, list[tuple[str, dict[str, Any]]]]]:
    """A client and a server that it dials, and what the client reports."""
    server = PeerServer(listener.answer)
    port = await server.start("127.0.0.1:0")
    told: list[tuple[str, dict[str, Any]]] = []
    codecs = [_codec(Packer("me", version)) for version in versions]
    client = PeerClient(
        Peer("owner", f"127.0.0.1:{port}"),
        codecs,
        Settings(limit, 0.0, queue, timeout),
        lambda event, **fields: told.append((event, fields)),
        trace,
    )
    try:
        yield client, server, told
    finally:
        await client.close()
        await server.stop(0)


def request(key: str) -> tuple[Any, ...]:
    """One request of that key."""
    return ("n", key, 1, 10, 1_000)


async def ask(client: PeerClient, *keys: str, op: int = Op.CHECK, alone: bool = False) -> list[Kept]:
    """Ask of these keys in one moment; the waiters, when all are settled."""
    waiters = [Kept() for _ in keys]
    for key, waiter in zip(keys, waiters, strict=True):
        client.ask(op, request(key), waiter, alone)
    async with asyncio.timeout(10):
        for waiter in waiters:
            await waiter.over.wait()
    return waiters


def test_requests_of_a_moment_share_a_batch_and_keep_their_order() -> None:
    """Fifty requests at once: one batch, each waiter its own key's answer and the owner's name, once."""

    async def work() -> None:
        listener = Listener()
        async with linked(listener) as (client, _, _):
            keys = [str(number) for number in range(50)]
            waiters = await ask(client, *keys)
            assert [waiter.came for waiter in waiters] == [[(key, "owner")] for key in keys]
            assert [len(payload) for _, payload in listener.batches] == [50]
            assert (client.batches, client.requests, client.queued, client.state) == (1, 50, 0, "connected")

    asyncio.run(work())


def test_a_peer_that_takes_its_time_to_connect_is_reached() -> None:
    """Whose handshakes are 0.7 s late, as a far or busy one's are, within a time-out that allows it."""

    async def work() -> None:
        listener = Listener()
        server = PeerServer(listener.answer)
        proxy = SlowProxy(await server.start("127.0.0.1:0"))
        proxy.back = 0.7
        peer = Peer("owner", f"127.0.0.1:{proxy.port}")
        client = PeerClient(peer, [_codec(Packer("me", 1))], Settings(1_000, 0.0, 20_000, 5.0), lambda *_, **__: None)
        try:
            (waiter,) = await ask(client, "a")
            assert waiter.came == [("a", "owner")]
        finally:
            await client.close()
            await server.stop(0)
            proxy.close()

    asyncio.run(work())


def test_a_batch_holds_no_more_than_its_limit() -> None:
    """Twenty-five requests with a limit of ten: batches of 10, 10 and 5."""

    async def work() -> None:
        listener = Listener()
        async with linked(listener, limit=10) as (client, _, _):
            await ask(client, *map(str, range(25)))
            assert [len(payload) for _, payload in listener.batches] == [10, 10, 5]

    asyncio.run(work())


def test_alone_is_alone() -> None:
    """Requests that are to leave alone leave in batches of one."""

    async def work() -> None:
        listener = Listener()
        async with linked(listener) as (client, _, _):
            await ask(client, "a", "b", "c", alone=True)
            assert [[key for _, key, *_ in payload] for _, payload in listener.batches] == [["a"], ["b"], ["c"]]

    asyncio.run(work())


def test_a_full_queue_refuses_at_once() -> None:
    """The request past `max_queue` is failed, as one that was never sent; the others are answered."""

    async def work() -> None:
        async with linked(Listener(), queue=3) as (client, _, _):
            waiters = await ask(client, "a", "b", "c", "d")
            assert waiters[3].came == [("over 3 requests wait for owner", False)]
            assert [waiter.came for waiter in waiters[:3]] == [[(key, "owner")] for key in "abc"]

    asyncio.run(work())


@pytest.mark.parametrize("answers", [[], ["a"], ["a", "b", "c"], None, "ab", 7])
def test_what_is_no_answer_to_a_batch_fails_it_as_sent(answers: Any) -> None:
    """Too few, too many, or no array at all: each waiter is failed once, and the link goes on."""

    async def work() -> None:
        listener = Listener(lambda batch_id, _: ANSWERS.answer_body(batch_id, Outcome.ANSWERED, answers))
        async with linked(listener) as (client, _, told):
            waiters = await ask(client, "a", "b")
            assert [waiter.came for waiter in waiters] == [[("owner sent what is no answer to 2 requests", True)]] * 2
            listener.odd = None
            (again,) = await ask(client, "c")
            assert again.came == [("c", "owner")]
            assert told == []

    asyncio.run(work())


def test_a_batch_that_was_never_sent_and_is_answered_breaks_the_stream() -> None:
    """A peer that answers another id is not believed: it counts as away, and what was under way as sent."""

    async def work() -> None:
        listener = Listener(lambda batch_id, _: ANSWERS.answer_body(batch_id + 99, Outcome.ANSWERED, []))
        async with linked(listener) as (client, _, told):
            (waiter,) = await ask(client, "a")
            ((why, sent),) = waiter.came
            assert sent
            assert "which is not under way" in why
            assert [event for event, _ in told] == ["peer_away"]

    asyncio.run(work())


def test_a_refused_version_is_followed_by_the_one_before() -> None:
    """A daemon of the next release greets this one in version 2, is refused, and carries its requests in version 1."""

    async def work() -> None:
        listener = Listener()
        async with linked(listener, versions=(2, 1)) as (client, _, told):
            (waiter,) = await ask(client, "a")
            assert waiter.came == [("a", "owner")]
            assert told == []

    asyncio.run(work())


def test_a_peer_that_takes_no_version_is_away_and_tells_why() -> None:
    """Nothing in common: one report with the peer's own words, and no request is sent."""

    async def work() -> None:
        listener = Listener()
        async with linked(listener, versions=(3, 2)) as (client, _, told):
            (waiter,) = await ask(client, "a")
            ((why, sent),) = waiter.came
            assert not sent
            assert "unknown protocol version 2; this daemon speaks 1" in why
            assert [event for event, _ in told] == ["peer_away"]
            assert listener.batches == []

    asyncio.run(work())


def test_an_idle_stream_does_not_hold_up_the_end() -> None:
    """A server that stops with 10 seconds of grace ends a silent peer's stream in far less, and the peer knows."""

    async def work() -> None:
        async with linked(Listener()) as (client, server, told):
            await ask(client, "a")
            began = time.monotonic()
            await server.stop(10)
            assert time.monotonic() - began < 3
            async with asyncio.timeout(5):
                while client.state != "away":
                    await asyncio.sleep(0.01)
            assert [event for event, _ in told] == ["peer_away"]

    asyncio.run(work())


def test_a_stopping_server_still_answers_peers_that_ask() -> None:
    """While a peer goes on asking, it is answered until the grace is over; then it falls away, settled once each."""

    async def work() -> None:
        async with linked(Listener()) as (client, server, _):
            await ask(client, "first")
            stopping = asyncio.create_task(server.stop(0.6))
            began = time.monotonic()
            answered_at = []
            while client.state == "connected":
                (waiter,) = await ask(client, "k")
                assert len(waiter.came) == 1
                if waiter.came[0] == ("k", "owner"):
                    answered_at.append(time.monotonic() - began)
                await asyncio.sleep(0.01)
            await stopping
            assert 0.4 < answered_at[-1] < 3

    asyncio.run(work())


# --- Traced


class FakeSpan:
    """A span that keeps how it ended."""

    context = "told-to-the-peer"

    def __init__(self) -> None:
        self.ends: list[str] = []

    def end(self, why: str) -> None:
        self.ends.append(why)


def test_a_span_goes_with_its_batch_and_ends_with_its_answer() -> None:
    """Only the batch that the tracer takes up carries a context; its span ends once, with nothing to tell."""
    spans: list[FakeSpan] = []
    asked: list[tuple[str, int, list[object]]] = []

    def trace(peer: Peer, op: int, waiters: Sequence[object]) -> FakeSpan | None:
        asked.append((peer.name, op, list(waiters)))
        if len(asked) == 2:
            return None
        spans.append(FakeSpan())
        return spans[-1]

    async def work() -> None:
        listener = Listener()
        async with linked(listener, trace=trace) as (client, _, _):
            first = await ask(client, "a", "b")
            second = await ask(client, "c")
            assert listener.contexts == ["told-to-the-peer", None]
            assert [waiter.came for waiter in (*first, *second)] == [[(key, "owner")] for key in "abc"]
            assert asked == [("owner", Op.CHECK, first), ("owner", Op.CHECK, second)]
        assert [span.ends for span in spans] == [[""]]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (lambda batch_id, _: ANSWERS.answer_body(batch_id, Outcome.ANSWERED, []), "no answer to 1 requests"),
        (lambda batch_id, _: ANSWERS.answer_body(batch_id, Outcome.REFUSED, "will not"), "will not"),
        (lambda _, __: b"\xc1", "owner is away"),
    ],
    ids=["no answer", "refused", "nonsense"],
)
def test_a_span_ends_with_why_its_batch_was_not_answered(odd: Callable[[int, Any], bytes], why: str) -> None:
    """An answer that is none, a refusal, a stream that breaks: one end each, with the reason."""
    span = FakeSpan()

    async def work() -> None:
        async with linked(Listener(odd), trace=lambda *_: span) as (client, _, _):
            await ask(client, "a")

    asyncio.run(work())
    (end,) = span.ends
    assert why in end


def test_a_version_without_a_place_for_contexts_gets_none() -> None:
    """A peer that is spoken to in such a version is sent plain batches; the span is made all the same."""
    span = FakeSpan()

    async def work() -> None:
        listener = Listener()
        async with linked(listener, trace=lambda *_: span) as (client, _, _):
            client._codec = client._codec._replace(pack_traced=None)
            client._codecs = [client._codec]
            await ask(client, "a")
            assert listener.contexts == [None]

    asyncio.run(work())
    assert span.ends == [""]


# --- Renewed


class Channels:
    """In the place of Tls: plain channels, counted."""

    def __init__(self) -> None:
        self.opened = 0

    def channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        self.opened += 1
        return grpc.aio.insecure_channel(address, options=options)


@asynccontextmanager
async def renewable(
    answer: Callable[[bytes], bytes], timeout: float = 5.0
) -> AsyncIterator[tuple[PeerClient, Channels, list[str]]]:
    """A client whose channels are counted, a server that it dials, and the events that the client reports."""
    server = PeerServer(answer)
    port = await server.start("127.0.0.1:0")
    told: list[str] = []
    channels = Channels()
    client = PeerClient(
        Peer("owner", f"127.0.0.1:{port}"),
        [_codec(Packer("me"))],
        Settings(1_000, 0.0, 20_000, timeout),
        lambda event, **_: told.append(event),
        tls=cast(Any, channels),
    )
    try:
        yield client, channels, told
    finally:
        await client.close()
        await server.stop(0)


def test_what_is_under_way_is_answered_before_a_link_is_renewed() -> None:
    """Renewed while batches are under way and more are asked for: all are answered once, over two channels, and the
    peer never counts as away."""

    async def work() -> None:
        async with renewable(Listener().answer) as (client, channels, told):
            await ask(client, "first")
            waiters = [Kept() for _ in range(200)]
            for number, waiter in enumerate(waiters):
                client.ask(Op.CHECK, request(str(number)), waiter)
                if number % 20 == 0:
                    await asyncio.sleep(0)
                if number == 100:
                    client.renew()
            async with asyncio.timeout(10):
                for waiter in waiters:
                    await waiter.over.wait()
            assert [waiter.came for waiter in waiters] == [[(str(number), "owner")] for number in range(200)]
            await ask(client, "last")
            assert (channels.opened, told, client.state) == (2, [], "connected")

    asyncio.run(work())


def test_renewing_again_and_again_loses_nothing() -> None:
    """A hundred renewals while requests keep coming, each at whatever moment: the last channel is newer than the last
    renewal, and every request is answered once."""

    async def work() -> None:
        async with renewable(Listener().answer) as (client, channels, told):
            waiters: list[Kept] = []

            async def keep_asking() -> None:
                while True:
                    waiters.append(Kept())
                    client.ask(Op.CHECK, request(str(len(waiters) - 1)), waiters[-1])
                    await asyncio.sleep(random.uniform(0.0, 0.002))

            asking = asyncio.create_task(keep_asking())
            for _ in range(100):
                await asyncio.sleep(random.uniform(0.0, 0.02))
                client.renew()
            opened = channels.opened
            async with asyncio.timeout(10):
                while channels.opened == opened:
                    await asyncio.sleep(0.01)
                asking.cancel()
                for waiter in waiters:
                    await waiter.over.wait()
            assert [waiter.came for waiter in waiters] == [[(str(number), "owner")] for number in range(len(waiters))]
            assert told == []

    asyncio.run(work())


def test_an_idle_link_is_renewed_too() -> None:
    """Nobody asks: the stream that is open is opened anew all the same."""

    async def work() -> None:
        async with renewable(Listener().answer) as (client, channels, _):
            await ask(client, "a")
            client.renew()
            async with asyncio.timeout(5):
                while channels.opened < 2:
                    await asyncio.sleep(0.01)
            (waiter,) = await ask(client, "b")
            assert waiter.came == [("b", "owner")]

    asyncio.run(work())


def test_a_link_that_was_never_asked_for_is_not_opened_by_a_renewal() -> None:
    """The first request opens it, once."""

    async def work() -> None:
        async with renewable(Listener().answer) as (client, channels, _):
            client.renew()
            await asyncio.sleep(0)
            assert (channels.opened, client.state) == (0, "idle")
            await ask(client, "a")
            await ask(client, "b")
            assert channels.opened == 1

    asyncio.run(work())


def test_a_link_that_is_away_tries_again_over_a_new_channel() -> None:
    """New certificates may be what it takes."""

    async def work() -> None:
        channels = Channels()
        client = PeerClient(
            Peer("owner", f"127.0.0.1:{free_port()}"),
            [_codec(Packer("me"))],
            Settings(1_000, 0.0, 20_000, 0.5),
            lambda *_, **__: None,
            tls=cast(Any, channels),
        )
        await ask(client, "a")
        assert client.state == "away"
        opened = channels.opened
        client.renew()
        async with asyncio.timeout(5):
            while channels.opened == opened:
                await asyncio.sleep(0.01)
        await client.close()

    asyncio.run(work())


def test_a_peer_that_falls_silent_does_not_hold_up_a_renewal() -> None:
    """What is under way to it fails in its time, as sent; then the link is opened anew."""

    async def carry(batches: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for batch in batches:
            batch_id, op, *_rest = open_request(batch)
            if op == Op.PING:
                yield ANSWERS.answer_body(batch_id, Outcome.ANSWERED, None)

    async def work() -> None:
        server = grpc.aio.server()
        handler: Any = grpc.stream_stream_rpc_method_handler(carry)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("sidegate.Peer", {"Carry": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channels = Channels()
        peer, told = Peer("owner", f"127.0.0.1:{port}"), list[str]()
        settings = Settings(1_000, 0.0, 20_000, 0.5)
        client = PeerClient(
            peer, [_codec(Packer("me"))], settings, lambda event, **_: told.append(event), tls=cast(Any, channels)
        )
        waiter, late = Kept(), Kept()
        client.ask(Op.CHECK, request("a"), waiter)
        async with asyncio.timeout(10):
            while not client.batches:
                await asyncio.sleep(0.01)
        client.renew()
        client.ask(Op.CHECK, request("b"), late)
        async with asyncio.timeout(10):
            await waiter.over.wait()
            while channels.opened < 2:
                await asyncio.sleep(0.01)
        assert [sent for _, sent in (*waiter.came, *late.came)] == [True, False]
        assert told[:1] == ["peer_away"]
        await client.close()
        await server.stop(0)

    asyncio.run(work())
