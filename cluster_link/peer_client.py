"""One channel to one peer: runs batches, knows when the peer is away, settles every waiter exactly once.

Decides when to connect, when a silent peer counts as away and when it is back.  Knows no limit and no ring; what a
batch says is the codec's.  Nothing is sent twice: what may have reached a peer that then fell silent is failed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import grpc
import grpc.aio

from cluster_link.batch import Batcher
from cluster_link.handshakes import explain
from cluster_link.histogram import Histogram
from cluster_link.membership import Peer

if TYPE_CHECKING:
    from cluster_link.tls import Tls

METHOD = "/sidegate.Peer/Carry"
MAX_MESSAGE = 64 << 20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
_TURNS = 2
"""Turns of the loop that a batch of several still gathers: each reads what has come meanwhile."""
_TIMED = 500
"""Batches whose round trips are remembered: the last ones."""
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    # grpc's own back-off grows to two minutes; ours, below, decides.
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Despite its name, what a connection may take to be made: a peer that is far, or busy, needs its time.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_retries", 0),
]


class Waiter(Protocol):
    """Who waits for one answer; `waiting` turns false when it has stopped to.  A failure tells whether the request may
    have reached the peer (`sent`)."""

    @property
    def waiting(self) -> bool: ...

    def answered(self, answer: Any, node: str) -> None: ...

    def failed(self, why: str, sent: bool) -> None: ...


class Span(Protocol):
    """A batch under way whose journey is told to a tracer.  context: what the peer is told of it."""

    @property
    def context(self) -> str: ...

    def end(self, why: str) -> None: ...


Trace = Callable[[Peer, int, Sequence[Waiter]], Span | None]
"""(peer, op, who waits) -> the span of the batch that leaves now, None if nobody in it is traced.  Its `end` is called
once: with "" if the batch was answered, else with why it was not."""


class Codec(NamedTuple):
    """How a batch is written and read.

    many: the op whose payloads share batches; those of any other op come alone.
    pack: (batch id, op, payload) -> bytes; of op `many`, a list of payloads.
    unpack: bytes -> (batch id, the answer's payload, why there is none or "", node).
    ping: (batch id) -> bytes of a batch that asks for nothing but an answer.
    pack_traced: as pack, with a span's context behind; None in a version that has no place for one.
    """

    many: int
    pack: Callable[[int, int, Any], bytes]
    unpack: Callable[[bytes], tuple[int, Any, str, str]]
    ping: Callable[[int], bytes]
    pack_traced: Callable[[int, int, Any, str], bytes] | None = None


class Settings(NamedTuple):
    """limit: requests a batch; wait: seconds that a batch gathers at least; max_queue: requests waiting for a peer;
    timeout: seconds of silence after which a peer counts as away."""

    limit: int
    wait: float
    max_queue: int
    timeout: float


_Item = tuple[int, Any, Waiter]
"""(op, payload, waiter): a plain tuple, since one is made for each request."""


class _Sent(NamedTuple):
    items: list[_Item]
    together: bool
    at: float
    span: Span | None


class PeerClient:
    """The link to one peer.

    codecs: one for each version that this node speaks, newest first; the first that the peer takes is used.
    report: told of changes: (event, **fields).
    node: what the peer calls itself in its answers, where its name is not for people (a uid); "" before the first.
    seconds, sizes: round trips of answered batches, and the requests in them.
    trace: makes spans of batches; None while tracing is off.
    tls: None: the link is plain text.
    """

    def __init__(
        self,
        peer: Peer,
        codecs: Sequence[Codec],
        settings: Settings,
        report: Callable[..., None],
        trace: Trace | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.peer = peer
        self._codecs = codecs
        self._codec = codecs[0]
        self._settings = settings
        self._report = report
        self._trace = trace
        self._tls = tls
        self._renewing = False
        self._batcher: Batcher[_Item] = Batcher(settings.limit, max_queue=settings.max_queue)
        self._sent: dict[int, _Sent] = {}
        self._last_id = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure = ""
        self._greeted = False
        self._first_queued = 0.0
        self.node = ""
        self.batches = 0
        self.requests = 0
        self._round_trips: deque[float] = deque(maxlen=_TIMED)
        self.seconds = Histogram(_SECONDS)
        self.sizes = Histogram(_SIZES)

    @property
    def state(self) -> str:
        """idle (never asked), connected, or away."""
        return "away" if self._failure else "connected" if self._task else "idle"

    @property
    def failure(self) -> str:
        """Why the peer is away; "" while it is not."""
        return self._failure

    @property
    def queued(self) -> int:
        """Requests that have not left."""
        return len(self._batcher)

    def round_trip(self, percent: int) -> int | None:
        """What so many percent (1 to 100) of the last batches' round trips did not exceed, in microseconds; None before
        the first."""
        trips = sorted(self._round_trips)
        return round(trips[-(-len(trips) * percent // 100) - 1] * 1_000_000) if trips else None

    def ask(self, op: int, payload: Any, waiter: Waiter, alone: bool = False) -> None:
        """Send `payload` in a batch of `op`; the waiter is settled exactly once, at once if the peer is away."""
        if self._failure:
            waiter.failed(self._failure, False)
            return
        if self._settings.wait and not len(self._batcher):
            self._first_queued = time.monotonic()
        if not self._batcher.add((op, payload, waiter), alone):
            waiter.failed(f"over {self._settings.max_queue} requests wait for {self.peer.name}", False)
            return
        if not self._wake.is_set() and self._batcher.ready:
            self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self, grace: float = 0.0) -> None:
        """Let what is under way finish within `grace` seconds, then stop; nothing dials this peer any more."""
        end = time.monotonic() + grace
        while (self._sent or len(self._batcher)) and time.monotonic() < end and not self._failure:
            await asyncio.sleep(0.005)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._fail_all(f"{self.peer.name} is no peer any more")

    def renew(self) -> None:
        """Go on over a new channel, which uses the certificates now in force: what is under way is answered first,
        what comes meanwhile waits."""
        self._renewing = True
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._renewing = False
            async with self._channel() as channel:
                await self._use(channel)

    def _channel(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self.peer.address, options=_CHANNEL_OPTIONS)
        return self._tls.channel(self.peer.address, _CHANNEL_OPTIONS)

    async def _use(self, channel: grpc.aio.Channel) -> None:
        """Carry requests over this channel, stream after stream, until it is to be renewed."""
        pause = _FIRST_PAUSE
        while not self._renewing:
            call: Any = channel.stream_stream(METHOD)()
            try:
                async with asyncio.timeout(self._settings.timeout):
                    await self._greet(call)
                pause = _FIRST_PAUSE
                if self._failure:
                    self._failure = ""
                    self._report("peer_back", peer=self.peer.name, address=self.peer.address)
                await self._carry(call)
                continue
            except Exception as error:  # whatever a peer sends or a stream does, it is tried again
                if self._older(error):
                    continue
                self._away(self._reason(error))
            finally:
                call.cancel()
            # Each on its own moment, so that a peer that comes back is not met by all at once.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _reason(self, error: BaseException) -> str:
        why = _why(error)
        plain = "" if self._tls is None or self._greeted else explain(why)
        return f"{plain} ({why})" if plain else why

    def _older(self, error: Exception) -> bool:
        """Whether a greeting that was refused is to be made again in an older version."""
        refused = isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.INVALID_ARGUMENT
        older = self._codecs[self._codecs.index(self._codec) + 1 :]
        again = refused and not self._greeted and bool(older)
        # Elsewhere the newest again: a peer that went may come back renewed.
        self._codec = older[0] if again else self._codecs[0]
        return again

    async def _greet(self, call: Any) -> None:
        """One empty round trip: only a peer that answers is sent requests."""
        self._greeted = False
        self._last_id += 1
        await call.write(self._codec.ping(self._last_id))
        data = await call.read()
        if data is grpc.aio.EOF:
            raise _Broken("it closed the stream")
        _, _, why, _ = self._codec.unpack(data)
        if why:
            raise _Broken(why)
        self._greeted = True

    async def _carry(self, call: Any) -> None:
        """Send and receive until the link is to be renewed; raises if the stream breaks or the peer falls silent."""
        works = (self._write(call), self._read(call), self._watch())
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        if ends[0] is None:
            return
        # A new exception, not the task's own: that one would know this frame, and the frame the call, and while a
        # call is known gRPC goes on dialling, also for a channel that was closed.
        raise _Broken(next((_why(end) for end in ends if isinstance(end, Exception)), "the stream ended"))

    async def _write(self, call: Any) -> None:
        """Send what is asked; returns when the link is to be renewed and nothing is under way."""
        wait = self._settings.wait
        while True:
            if self._renewing:
                if not self._sent:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            if len(self._batcher) > 1 and not self._batcher.urgent:
                # Whoever has just been answered asks again within moments: what has come by then goes along.
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
            items = self._batcher.take() if not wait or self._gathered(wait) else []
            if not items:
                self._wake.clear()
                gathers = wait and self._batcher.ready
                left = max(0.001, self._first_queued + wait - time.monotonic()) if gathers else None
                try:
                    async with asyncio.timeout(left):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                continue
            wanted = [item for item in items if item[2].waiting]
            if not wanted:
                self._batcher.returned()
                continue
            self._last_id += 1
            op, payload, _ = wanted[0]
            together = op == self._codec.many
            if together:
                payload = [payload for _, payload, _ in wanted]
            span = None if self._trace is None else self._trace(self.peer, op, [waiter for _, _, waiter in wanted])
            self._sent[self._last_id] = _Sent(wanted, together, time.monotonic(), span)
            self.batches += 1
            self.requests += len(wanted)
            if span is None or self._codec.pack_traced is None:
                data = self._codec.pack(self._last_id, op, payload)
            else:
                data = self._codec.pack_traced(self._last_id, op, payload, span.context)
            await call.write(data)

    def _gathered(self, wait: float) -> bool:
        return (
            self._batcher.urgent
            or len(self._batcher) >= self._settings.limit
            or time.monotonic() - self._first_queued >= wait
        )

    async def _read(self, call: Any) -> None:
        while True:
            data = await call.read()
            if data is grpc.aio.EOF:
                raise _Broken("it closed the stream")
            batch_id, payload, why, node = self._codec.unpack(data)
            sent = self._sent.pop(batch_id, None)
            if sent is None:
                raise _Broken(f"it answered batch {batch_id}, which is not under way")
            took = time.monotonic() - sent.at
            self._round_trips.append(took)
            self.seconds.see(took)
            self.sizes.see(len(sent.items))
            self._batcher.returned()
            if self._batcher.ready or self._renewing:
                self._wake.set()
            answers = payload if sent.together else (payload,)
            if not why and (type(answers) is not tuple or len(answers) != len(sent.items)):
                why = f"{self.peer.name} sent what is no answer to {len(sent.items)} requests"
            if sent.span is not None:
                sent.span.end(why)
            self.node = node
            if why:
                for _, _, waiter in sent.items:
                    waiter.failed(why, True)
                continue
            for (_, _, waiter), answer in zip(sent.items, answers, strict=True):
                waiter.answered(answer, node)

    async def _watch(self) -> None:
        """Break when the oldest batch under way has gone unanswered for the time-out: one time-out for all."""
        timeout = self._settings.timeout
        while True:
            oldest = next(iter(self._sent.values()), None)
            left = timeout if oldest is None else oldest.at + timeout - time.monotonic()
            if left <= 0:
                raise _Broken(f"no answer for {timeout * 1000:.0f} ms")
            await asyncio.sleep(max(left, 0.005))

    def _away(self, why: str) -> None:
        news = not self._failure
        self._failure = f"{self.peer.name} is away: {why}"
        if news:
            self._report("peer_away", peer=self.peer.name, address=self.peer.address, reason=why)
        self._fail_all(self._failure)

    def _fail_all(self, why: str) -> None:
        sent, self._sent = self._sent, {}
        for batch in sent.values():
            if batch.span is not None:
                batch.span.end(why)
            for _, _, waiter in batch.items:
                waiter.failed(why, True)
        for _, _, waiter in self._batcher.clear():
            waiter.failed(why, False)


class _Broken(Exception):
    """The stream can be used no more."""


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or "no answer in time"
