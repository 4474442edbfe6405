"""The client against real daemons and against fake ones that misbehave."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar import (
    Client,
    DaemonTimeout,
    DaemonUnreachable,
    Decision,
    InvalidRequest,
    Limit,
    ProtocolError,
    RateLimit,
    RequestRefused,
    SidegateError,
    Status,
)
from tests.daemons import EPOCH, DaemonProcess, wait_until
from tests.sockets import FakeServer, Serve, accept_and_answer, answering, frame, packed, ping_answer, silent

LIMIT = Limit("client", 10, per="1m")
LEAKY = Limit("client-leaky", 10, per="1m", algorithm="leaky")
GENEROUS = 2.0
"""Seconds within which a call of timeout 0.2 must be over, on a busy machine."""

Fake = Callable[[Serve], FakeServer]


@pytest.fixture
def path(short_path: Path) -> str:
    """Where a fake daemon may listen."""
    return str(short_path / "fake.sock")


@pytest.fixture
def fake(path: str) -> Iterator[Fake]:
    """Starts a fake daemon at `path` and ends it after the test."""
    servers: list[FakeServer] = []

    def start(serve: Serve) -> FakeServer:
        servers.append(FakeServer(path, serve))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def lasted(call: Callable[[], object], error: type[BaseException]) -> float:
    """Seconds that `call` took to raise `error`."""
    began = time.monotonic()
    with pytest.raises(error):
        call()
    return time.monotonic() - began


# What it asks for


def test_hit_peek_refund_reset(daemon: DaemonProcess) -> None:
    """A hit consumes, a peek does not, a refund gives back, a reset forgets; every field says what it should."""
    end = EPOCH + 60_000
    with daemon.client() as client:
        assert client.hit(LIMIT, "a") == Decision(Status.UNDER_LIMIT, 10, 9, end, 0, "test-node")
        assert client.hit(LIMIT, "a", hits=9) == Decision(Status.UNDER_LIMIT, 10, 0, end, 0, "test-node")
        assert client.peek(LIMIT, "a").allowed
        refused = client.hit(LIMIT, "a")
        assert refused == Decision(Status.OVER_LIMIT, 10, 0, end, 60_000, "test-node")
        assert not refused.allowed
        assert not refused
        assert not client.peek(LIMIT, "a").allowed
        assert client.refund(LIMIT, "a", 3).remaining == 3
        assert client.peek(LIMIT, "a").remaining == 3
        assert client.hit(LIMIT, "b").remaining == 9
        assert client.reset(LIMIT, "a") is True
        assert client.reset("client", "a") is False
        assert client.peek(LIMIT, "a").remaining == 10
        assert client.hit(LIMIT, "a", hits=0).remaining == 10


def test_a_leaky_limit(daemon: DaemonProcess) -> None:
    """A leaky limit lets tokens come back bit by bit as the clock advances."""
    with daemon.client() as client:
        assert client.hit(LEAKY, "a", 10).remaining == 0
        assert client.hit(LEAKY, "a").retry_after == 6000
        assert client.advance_clock(5999) == EPOCH + 5999
        assert not client.hit(LEAKY, "a").allowed
        client.advance_clock(1)
        assert client.hit(LEAKY, "a").allowed


def test_check_many(daemon: DaemonProcess) -> None:
    """Many requests go in one call and come back in order, one that fails in its place and by itself."""
    with daemon.client() as client:
        decisions = client.check([RateLimit("client", f"many:{number}", number, 500, 1000) for number in range(1000)])
        assert [decision.status for decision in decisions] == [Status.UNDER_LIMIT] * 501 + [Status.OVER_LIMIT] * 499
        assert [decision.remaining for decision in decisions[:501]] == list(range(500, -1, -1))
        assert client.check(iter([RateLimit("client", "one", 1, 5, 1000)]))[0].remaining == 4
        for count in (0, 1001):
            with pytest.raises(InvalidRequest):
                client.check([RateLimit("client", "many", 1, 5, 1000)] * count)
        assert client.info()["counters"]["created"] == 1001


def test_check_many_with_the_longest_keys(daemon: DaemonProcess) -> None:
    """A call that is right in every request is answered, or refused as the caller's mistake, whatever its bytes."""
    with daemon.client() as client:
        client.ping()
        batch = [RateLimit("n" * 1024, f"{number:01024}", 1, 5, 1000) for number in range(1000)]
        try:
            decisions = client.check(batch)
        except InvalidRequest:
            pass  # told as what it is: too much for one frame
        else:
            assert [decision.remaining for decision in decisions] == [4] * 1000
        # Either way it is no trouble of the daemon's, so that others' calls go on.
        assert client.hit(LIMIT, "others").allowed


def test_ping_info_clock(daemon: DaemonProcess) -> None:
    """Ping names the node, info tells of it, and a manual clock can be moved, also back."""
    with daemon.client() as client:
        assert client.ping() == "test-node"
        info = client.info()
        assert info["node"] == "test-node"
        assert info["clock"] == "manual"
        assert info["uptime_ms"] >= 0
        assert client.advance_clock(0) == EPOCH
        assert client.set_clock(1_000) == 1_000
        assert client.advance_clock(5) == 1_005
        with pytest.raises(InvalidRequest):
            client.advance_clock(-1)
        with pytest.raises(RequestRefused):
            client.set_clock(2**62)
        assert client.ping() == "test-node"


def test_the_real_clock_cannot_be_moved(start_daemon: Callable[..., DaemonProcess]) -> None:
    """Moving a real clock raises RequestRefused, which says what to do, and the connection goes on."""
    with start_daemon(clock="system").client() as client:
        for move in (client.advance_clock, client.set_clock):
            with pytest.raises(RequestRefused, match="--clock manual"):
                move(1)
        assert abs(client.hit(LIMIT, "a").reset_time - 60_000 - time.time() * 1000) < 30_000
        assert client.info()["connections"]["accepted"] == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.hit(LIMIT, ""),
        lambda client: client.hit(LIMIT, "k" * 1025),
        lambda client: client.hit(LIMIT, "\ud800"),
        lambda client: client.hit(LIMIT, 7),
        lambda client: client.hit(LIMIT, "a", hits=-1),
        lambda client: client.hit(LIMIT, "a", hits=2**63),
        lambda client: client.refund(LIMIT, "a", 0),
        lambda client: client.refund(LIMIT, "a", -1),
        lambda client: client.reset("", "a"),
        lambda client: client.reset(LIMIT, ""),
        lambda client: client.check([]),
    ],
)
@pytest.mark.parametrize("policy", ["raise", "allow", "deny"])
def test_mistakes_of_the_caller(path: str, policy: str, call: Callable[[Client], object]) -> None:
    """A caller's mistake raises InvalidRequest, a ValueError, whatever on_error says and without a daemon."""
    with pytest.raises(InvalidRequest) as caught:
        call(Client(path, on_error=policy))
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, SidegateError)


# When there is no answer


def test_a_dead_daemon_raises(path: str) -> None:
    """Without a daemon a call raises DaemonUnreachable, a ConnectionError, that names the path."""
    client = Client(path)
    with pytest.raises(DaemonUnreachable, match=re.escape(path)) as caught:
        client.hit(LIMIT, "a")
    assert isinstance(caught.value, ConnectionError)
    assert isinstance(caught.value, SidegateError)
    for call in (client.ping, client.info, lambda: client.reset(LIMIT, "a"), lambda: client.advance_clock(1)):
        with pytest.raises(DaemonUnreachable):
            call()


@pytest.mark.parametrize(("policy", "status"), [("allow", Status.UNDER_LIMIT), ("deny", Status.OVER_LIMIT)])
def test_a_dead_daemon_with_a_policy(path: str, policy: str, status: Status) -> None:
    """With on_error a made-up decision says that it is: degraded, the reason as its error, no owner."""
    client = Client(path, on_error=policy)
    decisions = [client.hit(LIMIT, "a"), client.peek(LIMIT, "a"), client.refund(LIMIT, "a")]
    decisions += client.check([RateLimit("client", "a", 1, 10, 1000)] * 2)
    for decision in decisions:
        assert decision.status == status
        assert decision.allowed is (policy == "allow")
        assert decision.degraded
        assert path in decision.error
        assert (decision.limit, decision.remaining, decision.owner) == (10, 0, "")
    # What has no decision to make up raises all the same.
    with pytest.raises(DaemonUnreachable):
        client.reset(LIMIT, "a")


def test_a_real_answer_is_not_degraded(daemon: DaemonProcess) -> None:
    """With a daemon that answers, on_error changes nothing."""
    with daemon.client(on_error="allow") as client:
        assert client.hit(LIMIT, "a", 10) == Decision(Status.UNDER_LIMIT, 10, 0, EPOCH + 60_000, 0, "test-node")
        assert client.hit(LIMIT, "a").status == Status.OVER_LIMIT


def test_a_stopped_daemon(daemon: DaemonProcess) -> None:
    """A daemon that hangs costs one deadline a call, connecting included, raised as a TimeoutError."""
    with daemon.client(timeout=0.2) as used, daemon.client(timeout=0.2, on_error="deny") as fresh:
        used.ping()
        daemon.process.send_signal(signal.SIGSTOP)
        assert 0.15 < lasted(used.ping, TimeoutError) < GENEROUS
        began = time.monotonic()
        decision = fresh.hit(LIMIT, "a")
        assert time.monotonic() - began < GENEROUS
        assert decision.degraded
        assert not decision.allowed
        daemon.process.send_signal(signal.SIGCONT)
        # The late answer is nobody's: the next one is this call's own.
        wait_until(lambda: answers(used), "the daemon answers again")
        assert used.hit(LIMIT, "b", 4).remaining == 6


def answers(client: Client) -> bool:
    """Whether the daemon answers this client."""
    try:
        client.ping()
    except SidegateError:
        return False
    return True


def test_a_daemon_that_accepts_and_never_answers(path: str, fake: Fake) -> None:
    """One total deadline holds while a connection is accepted and nothing comes."""
    fake(silent)
    assert 0.15 < lasted(Client(path, timeout=0.2).ping, DaemonTimeout) < GENEROUS


def test_a_daemon_that_answers_byte_by_byte(path: str, fake: Fake) -> None:
    """One total deadline holds although bytes keep coming."""

    def serve(server: FakeServer, stream: socket.socket) -> None:
        server.read_request(stream)
        for byte in packed(1, 1, 0, None, "n" * 5000):
            stream.sendall(bytes([byte]))
            time.sleep(0.01)

    fake(serve)
    assert 0.15 < lasted(Client(path, timeout=0.2).ping, DaemonTimeout) < GENEROUS


def test_a_slow_answer_takes_nothing_from_the_next_call(path: str, fake: Fake) -> None:
    """A call that an answer in pieces has left little time is followed by one that has all of its own again."""

    def serve(server: FakeServer, stream: socket.socket) -> None:
        first = ping_answer(server.read_request(stream))
        stream.sendall(first[:5])
        time.sleep(0.3)
        stream.sendall(first[5:])
        second = ping_answer(server.read_request(stream))
        time.sleep(0.3)
        stream.sendall(second)
        server.over.wait()

    server = fake(serve)
    with Client(path, timeout=0.5) as client:
        assert [client.ping(), client.ping()] == ["fake", "fake"]
        assert 0.45 < lasted(client.ping, DaemonTimeout) < GENEROUS
    assert server.accepted == 1


def test_a_hit_is_sent_in_the_same_bytes_each_time(path: str, fake: Fake) -> None:
    """But for its id, which starts anew behind the last of four bytes: so a daemon knows it again."""
    server = fake(answering(lambda request: packed(1, request[1], 0, [[0, 10, 9, 1, 0]], "fake")))
    with Client(path, timeout=GENEROUS) as client:
        client.hit(LIMIT, "a")
        (connection,) = client._pools[os.getpid()]._idle
        connection._request_id = 2**32 - 3
        for _ in range(4):
            client.hit(LIMIT, "a")
    first, *others = server.requests
    assert [request[1] for request in others] == [2**32 - 2, 2**32 - 1, 1, 2]
    assert [request[2:] for request in others] == [[*first[2:4], 2000]] * 4


def test_a_daemon_that_only_speaks_unasked(path: str, fake: Fake) -> None:
    """One total deadline holds although whole frames of id 0 keep coming."""

    def serve(server: FakeServer, stream: socket.socket) -> None:
        server.read_request(stream)
        while not server.over.is_set():
            stream.sendall(packed(1, 0, 0, "news", "fake"))
            time.sleep(0.01)

    fake(serve)
    assert 0.15 < lasted(Client(path, timeout=0.2).ping, DaemonTimeout) < GENEROUS


def test_a_daemon_that_never_reads(path: str, fake: Fake) -> None:
    """One total deadline holds while a large request cannot be sent to its end."""
    fake(silent)
    batch = [RateLimit("n" * 500, "k" * 500, 1, 5, 1000)] * 1000
    assert 0.15 < lasted(lambda: Client(path, timeout=0.2).check(batch), DaemonTimeout) < GENEROUS


@pytest.mark.parametrize("backlog", [0, 1])
def test_a_full_backlog(path: str, backlog: int) -> None:
    """One total deadline holds while the daemon's backlog has no room."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(backlog)
        waiting = []
        full = False
        while not full:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            waiting.append(client)
            client.setblocking(False)
            try:
                client.connect(path)
            except BlockingIOError:
                full = True
        assert 0.15 < lasted(Client(path, timeout=0.2).ping, DaemonTimeout) < GENEROUS
        # Room that appears in time is used: the call waits on and is answered.
        answerer = threading.Thread(target=accept_and_answer, args=(listener, len(waiting)), daemon=True)
        threading.Timer(0.3, answerer.start).start()
        assert Client(path, timeout=30).ping() == "fake"
        for client in waiting:
            client.close()


def test_more_threads_than_connections_wait_within_the_deadline(path: str, fake: Fake) -> None:
    """A thread that waits for a connection in vain raises DaemonTimeout after its one deadline."""
    server = fake(silent)
    client = Client(path, timeout=0.3, max_connections=1)
    times: list[float] = []
    threads = [threading.Thread(target=lambda: times.append(lasted(client.ping, SidegateError))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(times) == 4
    assert max(times) < GENEROUS
    assert server.accepted <= 4


# Connections


def test_nothing_is_opened_until_first_use(path: str, fake: Fake) -> None:
    """Making a client connects to nothing; its calls share one connection, and close closes it."""
    closed = threading.Event()

    def serve(server: FakeServer, stream: socket.socket) -> None:
        answering(ping_answer)(server, stream)
        closed.set()

    server = fake(serve)
    client = Client(path, timeout=30)
    assert server.accepted == 0
    for _ in range(20):
        client.ping()
    assert server.accepted == 1
    client.close()
    assert closed.wait(30)
    # A closed client may be used again.
    assert client.ping() == "fake"
    assert server.accepted == 2
    client.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_while_idle_costs_no_call(daemon: DaemonProcess, number: int) -> None:
    """After a restart a client whose connections were idle goes on by the path, without a failing call."""
    with daemon.client(max_connections=4) as client:
        threads = [threading.Thread(target=lambda: [client.ping() for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.hit(LIMIT, "a")
        for _ in range(2):
            daemon.stop(number)
            daemon.start()
            assert client.hit(LIMIT, "a").remaining == 9


def test_never_sent_twice(path: str, fake: Fake) -> None:
    """A request that was sent is never sent again, on no connection: its hits may have been counted."""

    def serve(server: FakeServer, stream: socket.socket) -> None:
        server.read_request(stream)

    server = fake(serve)
    client = Client(path, timeout=30)
    with pytest.raises(DaemonUnreachable):
        client.hit(LIMIT, "a")
    assert len(server.requests) == 1
    assert server.accepted == 1


def test_never_sent_twice_on_a_used_connection(path: str, fake: Fake) -> None:
    """The same holds on a connection that has served calls before."""

    def serve(server: FakeServer, stream: socket.socket) -> None:
        stream.sendall(ping_answer(server.read_request(stream)))
        server.read_request(stream)

    server = fake(serve)
    client = Client(path, timeout=30)
    client.ping()
    with pytest.raises(DaemonUnreachable):
        client.hit(LIMIT, "a")
    assert len(server.requests) == 2
    assert server.accepted == 1


def test_never_sent_twice_in_part(path: str, fake: Fake) -> None:
    """A request of which a part was sent is not sent again either."""

    def serve(server: FakeServer, stream: socket.socket) -> None:
        stream.sendall(ping_answer(server.read_request(stream)))
        stream.recv(1)

    server = fake(serve)
    client = Client(path, timeout=30)
    client.ping()
    with pytest.raises(DaemonUnreachable):
        client.check([RateLimit("n" * 500, "k" * 500, 1, 5, 1000)] * 1000)
    assert server.accepted == 1


def test_an_open_circuit(path: str, fake: Fake) -> None:
    """A thousand calls with a daemon that is away cost a handful of connections and almost no time."""
    server = fake(lambda server, stream: None)
    client = Client(path, on_error="allow")
    began = time.monotonic()
    decisions = [client.hit(LIMIT, "a") for _ in range(1000)]
    assert time.monotonic() - began < GENEROUS
    assert server.accepted <= 10
    assert all(decision.degraded and decision.allowed and decision.error for decision in decisions)


def test_an_open_circuit_without_a_socket(path: str) -> None:
    """The same holds where there is no socket at all, also for a call that raises."""
    client = Client(path)
    began = time.monotonic()
    for _ in range(1000):
        with pytest.raises(DaemonUnreachable):
            client.ping()
    assert time.monotonic() - began < GENEROUS


def test_a_hanging_daemon_opens_the_circuit(path: str, fake: Fake) -> None:
    """A daemon that hangs is left alone after a few calls, so that a thousand do not each wait for the deadline."""
    server = fake(silent)
    client = Client(path, on_error="allow", timeout=0.02)
    began = time.monotonic()
    assert all(client.hit(LIMIT, "a").degraded for _ in range(1000))
    assert time.monotonic() - began < GENEROUS
    assert server.accepted <= 10


def test_the_circuit_closes_again(daemon: DaemonProcess) -> None:
    """When the daemon is back, calls reach it again within moments and every one after."""
    with daemon.client() as client:
        client.ping()
        daemon.stop()
        for _ in range(100):
            with pytest.raises(DaemonUnreachable):
                client.ping()
        daemon.start()
        wait_until(lambda: answers(client), "the circuit closes", 10)
        for _ in range(100):
            assert client.ping() == "test-node"


# Answers that are none


GARBAGE: dict[str, Callable[[Any], bytes]] = {
    "another id": lambda request: packed(1, request[1] + 1, 0, None, "fake"),
    "a negative id": lambda request: packed(1, -request[1], 0, None, "fake"),
    "a text as id": lambda request: packed(1, "id", 0, None, "fake"),
    "another version": lambda request: packed(2, request[1], 0, None, "fake"),
    "an unknown outcome": lambda request: packed(1, request[1], 7, [[0, 10, 9, 0, 0]], "fake"),
    "nil as outcome": lambda request: packed(1, request[1], None, [[0, 10, 9, 0, 0]], "fake"),
    "two elements": lambda request: packed(1, request[1]),
    "no msgpack": lambda request: frame(b"\xc1"),
    "an empty frame": lambda request: frame(b""),
    "a text": lambda request: frame(b"\xa3abc"),
    "another protocol": lambda request: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "an endless frame": lambda request: b"\xff\xff\xff\xff" + b"x" * 100,
    "the daemon's word that it cannot read": lambda request: packed(1, request[1], 2, "no sense", "fake"),
    # Answers in form, whose payload is none for a check of one request.
    "nil as payload": lambda request: packed(1, request[1], 0, None, "fake"),
    "a text as payload": lambda request: packed(1, request[1], 0, "text", "fake"),
    "no decision": lambda request: packed(1, request[1], 0, [], "fake"),
    "two decisions": lambda request: packed(1, request[1], 0, [[0, 10, 9, 0, 0]] * 2, "fake"),
    "a number as decision": lambda request: packed(1, request[1], 0, [7], "fake"),
    "a short decision": lambda request: packed(1, request[1], 0, [[0, 10, 9]], "fake"),
    "an unknown status": lambda request: packed(1, request[1], 0, [[9, 10, 9, 0, 0]], "fake"),
    "a negative status": lambda request: packed(1, request[1], 0, [[-3, 10, 9, 0, 0]], "fake"),
    "a text as status": lambda request: packed(1, request[1], 0, [["a", 10, 9, 0, 0]], "fake"),
}


@pytest.mark.parametrize("reply", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage(path: str, fake: Fake, reply: Callable[[Any], bytes]) -> None:
    """An answer that is none raises ProtocolError, a ConnectionError, and its connection is not used again."""
    server = fake(answering(reply))
    client = Client(path, timeout=5)
    with pytest.raises(ProtocolError) as caught:
        client.hit(LIMIT, "a")
    assert isinstance(caught.value, ConnectionError)
    with pytest.raises(SidegateError):
        client.hit(LIMIT, "a")
    assert len(server.requests) == server.accepted
    # A policy holds for such a daemon as for one that is away.
    decision = Client(path, timeout=5, on_error="allow").hit(LIMIT, "a")
    assert decision.allowed
    assert decision.degraded


def test_what_the_daemon_says_unasked_is_skipped(path: str, fake: Fake) -> None:
    """Frames of id 0 before an answer, behind it or in its midst of bytes change no call."""

    def serve(server: FakeServer, stream: socket.socket) -> None:
        news = packed(1, 0, 0, {"revoked": ["lease"]}, "fake")
        stream.sendall(news)
        while (request := server.read_request(stream)) is not None:
            stream.sendall(news * 3 + ping_answer(request) + news + news[:7])
            time.sleep(0.01)
            stream.sendall(news[7:])

    server = fake(serve)
    with Client(path, timeout=30) as client:
        for _ in range(20):
            assert client.ping() == "fake"
    assert server.accepted == 1


def test_urls(path: str, fake: Fake) -> None:
    """A URL holds the path and options; a keyword wins over the URL's."""
    fake(silent)
    for client in (
        Client(f"unix://{path}?timeout=0.2&on_error=deny&max_connections=1"),
        Client(f"unix://{path}?timeout=20&on_error=allow", timeout=0.2, on_error="deny"),
    ):
        began = time.monotonic()
        decision = client.hit(LIMIT, "a")
        assert 0.15 < time.monotonic() - began < GENEROUS
        assert decision.degraded
        assert not decision.allowed


@pytest.mark.parametrize(
    "address",
    [
        "tcp:///run/x.sock",
        "http://localhost",
        "unix://relative/x.sock",
        "unix://",
        "unix:///x.sock?timeout=0",
        "unix:///x.sock?timeout=-1",
        "unix:///x.sock?timeout=soon",
        "unix:///x.sock?timeout=nan",
        "unix:///x.sock?timeout=inf",
        "unix:///x.sock?timeout",
        "unix:///x.sock?on_error=maybe",
        "unix:///x.sock?max_connections=0",
        "unix:///x.sock?max_connections=-1",
        "unix:///x.sock?max_connections=0.5",
        "unix:///x.sock?max_connections=many",
        "unix:///x.sock?tiemout=1",
    ],
)
def test_bad_urls(address: str) -> None:
    """A URL that cannot be used is refused when the client is made."""
    with pytest.raises(InvalidRequest):
        Client(address)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": -0.1},
        {"timeout": "soon"},
        {"max_connections": 0},
        {"max_connections": 0.5},
        {"on_error": "ignore"},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    """So is a bad option."""
    with pytest.raises(InvalidRequest):
        Client("/x.sock", **options)


def test_the_socket_is_found_by_the_rule(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address a client asks the daemon that SIDEGATE_SOCKET names, as a path or a URL."""
    for named in (daemon.socket, f"unix://{daemon.socket}"):
        monkeypatch.setenv("SIDEGATE_SOCKET", named)
        with Client(timeout=5) as client:
            assert client.ping() == "test-node"


def test_a_client_leaves_no_descriptors(path: str) -> None:
    """Calls that fail and clients that are closed leave no descriptors behind."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with Client(path) as client, pytest.raises(DaemonUnreachable):
            client.ping()
    assert len(os.listdir("/proc/self/fd")) <= before


# Traced

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("current", "sent"),
    [
        (SAMPLED, SAMPLED),
        (SAMPLED[:-2] + "03", SAMPLED[:-2] + "03"),
        ("01" + SAMPLED[2:] + "-more", "01" + SAMPLED[2:] + "-more"),
        (SAMPLED[:-2] + "00", None),
        (SAMPLED[:-2] + "02", None),
        (SAMPLED[:-1], None),
        (SAMPLED[:20] + "\udcff" + SAMPLED[21:], None),
        ("", None),
        (None, None),
    ],
)
def test_only_a_sampled_traceparent_is_sent(fake: Fake, path: str, current: str | None, sent: str | None) -> None:
    """It is the frame's sixth element; with any other the frame has five, as it has without the option."""
    server = fake(answering(lambda request: packed(1, request[1], 0, [[0, 10, 9, 1, 0]], "fake")))
    with Client(path, timeout=GENEROUS, traceparent=lambda: current) as client:
        client.hit(LIMIT, "a")
        client.peek(LIMIT, "a")
        client.refund(LIMIT, "a")
        client.check([LIMIT.request("a")])
        client.reset(LIMIT, "a")
        client.ping()
    *asked, ping = server.requests
    assert [request[5:] for request in asked] == [[] if sent is None else [sent]] * 5
    assert len(ping) == 5


def test_the_traceparent_of_each_call_is_asked_anew(fake: Fake, path: str) -> None:
    """Two calls, two spans."""
    server = fake(answering(lambda request: packed(1, request[1], 0, [[0, 10, 9, 1, 0]], "fake")))
    spans = iter([SAMPLED, SAMPLED.replace("b7", "c7")])
    with Client(path, timeout=GENEROUS, traceparent=lambda: next(spans)) as client:
        client.hit(LIMIT, "a")
        client.hit(LIMIT, "a")
    assert [request[5] for request in server.requests] == [SAMPLED, SAMPLED.replace("b7", "c7")]


def test_a_traceparent_that_is_none_of_the_kind(path: str) -> None:
    """No callable, a value that is no text, a callable that raises: the caller's mistake, and nothing is sent."""
    with pytest.raises(InvalidRequest, match="traceparent is a callable, not str"):
        Client(path, traceparent=SAMPLED)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="a traceparent is text or None, not bytes"):
        Client(path, on_error="allow", traceparent=lambda: b"00").hit(LIMIT, "a")  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        Client(path, on_error="allow", traceparent=lambda: str(1 // 0)).hit(LIMIT, "a")
