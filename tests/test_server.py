"""The daemon under clients that misbehave, at its bounds, and at its end; its log lines as data."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar import DaemonUnreachable, Limit
from tests.clusters import free_port
from tests.daemons import DaemonProcess, clean_environment, wait_until
from tests.sockets import Raw, frame, packed

CHECK, PING, INFO = 1, 3, 4
FATAL = 2
LIMIT = Limit("server", 1_000_000, per="1d")
PINGS = packed(1, 1, PING, None) * 1000
CHECKS = packed(1, 1, CHECK, [["server", "deaf", 1, 1000, 1000]] * 1000)
INFOS = packed(1, 1, INFO, None) * 1000
NILS = packed(1, 1, CHECK, [None] * 1000) * 4

Start = Callable[..., DaemonProcess]


class Deaf:
    """A client that sends as much as it may and reads nothing."""

    def __init__(self, daemon: DaemonProcess, data: bytes) -> None:
        self.raw = Raw(daemon.socket)
        self.raw.socket.setblocking(False)
        self.sent = 0
        self.dropped = False
        self._data = data

    def push(self) -> bool:
        """Send once; whether anything could be sent."""
        at = self.sent % len(self._data)
        try:
            count = self.raw.socket.send(self._data[at:])
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self.dropped = True
            return False
        self.sent += count
        return True

    def push_until_paused(self) -> None:
        """Send until nothing is taken for half a second."""
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 0.5:
            if self.push():
                quiet_since = time.monotonic()
            else:
                time.sleep(0.01)


def gone(daemon: DaemonProcess, count: int = 1) -> Callable[[], bool]:
    """A condition: only `count` connections are left, the one that asks included."""
    return lambda: daemon.connections()["open"] == count


@pytest.mark.parametrize("data", [PINGS, CHECKS, INFOS], ids=["pings", "checks", "infos"])
def test_a_client_that_never_reads(start_daemon: Start, data: bytes) -> None:
    """A client that never reads is paused, costs bounded memory and is dropped; others are served all along."""
    daemon = start_daemon("--stall-timeout", "3000")
    before = most = daemon.memory()
    deaf = [Deaf(daemon, data) for _ in range(5)]
    with daemon.client() as other:
        served = 0
        end = time.monotonic() + 60
        while not all(client.dropped for client in deaf):
            assert time.monotonic() < end, "never dropped"
            for client in deaf:
                if not client.dropped:
                    client.push()
            assert other.hit(LIMIT, "another").remaining == LIMIT.limit - served - 1
            served += 1
            most = max(most, daemon.memory())
    # Paused: what a connection took is no more than the kernel's buffers and a few reads hold.
    assert max(client.sent for client in deaf) < 8 << 20
    assert most - before < 128 << 20
    assert served > 100
    assert gone(daemon)()
    assert {line["reason"] for line in daemon.events("client_dropped")} == {"answers left unread"}
    assert daemon.connections()["dropped"] == 5


@pytest.mark.parametrize("data", [PINGS, CHECKS, INFOS, NILS], ids=["pings", "checks", "infos", "nils"])
def test_others_wait_for_a_read_at_most(daemon: DaemonProcess, data: bytes) -> None:
    """A client that sends as much as a socket holds delays another one's call by a moment, whatever it asks for."""
    deaf = Deaf(daemon, data * 40)
    longest = 0.0
    with daemon.client(timeout=60.0) as other:
        other.ping()
        for _ in range(20):
            deaf.push()
            began = time.monotonic()
            other.ping()
            longest = max(longest, time.monotonic() - began)
    assert deaf.sent > 100_000
    assert longest < 2.0


def test_a_paused_client_that_reads_again(start_daemon: Start) -> None:
    """A client that was paused and then reads gets every answer, in order, and goes on."""
    daemon = start_daemon()
    stream = b"".join(packed(1, number, PING, None) for number in range(1, 100_001))
    with Raw(daemon.socket) as raw:
        sender = threading.Thread(target=raw.send, args=(stream,), daemon=True)
        sender.start()
        sender.join(0.5)
        assert sender.is_alive(), "never paused"
        for number in range(1, 100_001):
            assert raw.answer()[1] == number
        sender.join()
        raw.send(packed(1, 7, PING, None))
        assert raw.answer()[1] == 7


@pytest.mark.parametrize("part", [b"\x00", b"\x00\x00\x00\x05", b"\x00\x00\x00\x05\x94\x01"])
def test_an_unfinished_frame(start_daemon: Start, part: bytes) -> None:
    """A frame left unfinished for the stall time-out costs its client the connection; an idle client keeps its own."""
    daemon = start_daemon("--stall-timeout", "500")
    with Raw(daemon.socket) as idle, Raw(daemon.socket) as raw:
        raw.send(packed(1, 1, PING, None) + part)
        assert raw.answer()[1] == 1
        assert raw.ended()
        idle.send(packed(1, 2, PING, None))
        assert idle.answer()[1] == 2
    assert [line["reason"] for line in daemon.events("client_dropped")] == ["frame left unfinished"]


def test_a_frame_sent_drop_by_drop(start_daemon: Start) -> None:
    """Sending a byte now and then does not keep an unfinished frame alive."""
    daemon = start_daemon("--stall-timeout", "500")
    with Raw(daemon.socket) as raw:
        raw.send(b"\x00\x0f\xff\xff")

        def refused() -> bool:
            try:
                raw.send(b"\x94")
            except (BrokenPipeError, ConnectionResetError):
                return True
            return False

        wait_until(refused, "the connection is dropped")


def test_reads_that_end_inside_a_frame(start_daemon: Start) -> None:
    """A client whose every frame is finished in good time is not dropped, wherever the daemon's reads end."""
    daemon = start_daemon("--stall-timeout", "1000")
    ping = packed(1, 5, PING, None)
    with Raw(daemon.socket) as raw:
        raw.send(ping[:6])
        # Each write finishes a frame and begins the next one, for much longer than the stall time-out.
        for _ in range(40):
            time.sleep(0.1)
            try:
                raw.send(ping[6:] + ping[:6])
                answer = raw.answer()
            except BrokenPipeError:
                answer = None
            assert answer, "dropped, although no frame was left unfinished for long"
            assert answer[1] == 5
    assert not daemon.events("client_dropped")


def test_an_unfinished_frame_after_a_pause(start_daemon: Start) -> None:
    """A frame left unfinished by a client that had been paused, and then read, is dropped like any other."""
    daemon = start_daemon("--stall-timeout", "2000")
    # One write of many frames, the last one unfinished, small enough for one read of the daemon's and with
    # answers too large for the kernel: the client is paused while the unfinished frame is already there.
    stream = packed(1, 1, INFO, None) * 2000
    with Raw(daemon.socket) as raw:
        raw.send(stream + packed(1, 2, PING, None)[:6])
        time.sleep(0.5)
        for _ in range(2000):
            assert raw.answer()[1] == 1
        # All answers are read, so that nothing but the unfinished frame is held against this client.
        raw.socket.settimeout(15)
        assert raw.ended()
    assert [line["reason"] for line in daemon.events("client_dropped")] == ["frame left unfinished"]


@pytest.mark.parametrize(("hard", "soft"), [(9_000, 5_064), (3_000, 3_000)])
def test_descriptors_for_links_are_taken_where_they_are(short_path: Path, hard: int, soft: int) -> None:
    """A soft limit is raised for clients of two doors and for links to peers, as far as the hard one lets it; less for
    links alone is no shortage."""
    words = [sys.executable, "-m", "sidecar", "serve", "--socket", f"{short_path}/s", "--max-connections", "500"]
    words += ["--listen", f"127.0.0.1:{free_port()}", "--http", "off"]
    limits = f'ulimit -Sn 100 && ulimit -Hn {hard} && exec "$@"'
    process = subprocess.Popen(["sh", "-c", limits, "sh", *words], stderr=subprocess.PIPE, env=clean_environment())
    try:
        assert process.stderr is not None
        with process.stderr:
            assert json.loads(process.stderr.readline())["event"] == "daemon_ready"
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (soft, hard)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("doors", "each"), [(1, 136), (2, 68), (3, 45)])
def test_places_are_shared_among_the_doors_where_descriptors_are_short(short_path: Path, doors: int, each: int) -> None:
    """Of a hard limit of 200, 64 are kept for the rest; what is left is told, and the daemon starts."""
    listen, http = (f"127.0.0.1:{free_port()}" if door < doors else "off" for door in (1, 2))
    words = [
        sys.executable,
        "-m",
        "sidecar",
        "serve",
        "--socket",
        f"{short_path}/s",
        "--listen",
        listen,
        "--http",
        http,
    ]
    process = subprocess.Popen(
        ["sh", "-c", 'ulimit -n 200 && exec "$@"', "sh", *words], stderr=subprocess.PIPE, env=clean_environment()
    )
    try:
        assert process.stderr is not None
        with process.stderr:
            short, ready = (json.loads(process.stderr.readline()) for _ in range(2))
        assert (short["event"], short["limit"], short["max_connections"]) == ("descriptors_short", 200, each)
        assert ready["event"] == "daemon_ready"
    finally:
        process.kill()
        process.wait()


def test_too_many_connections(start_daemon: Start) -> None:
    """Past max_connections a client is told so and closed; a slot that is freed is usable again."""
    daemon = start_daemon("--max-connections", "3")
    wait_until(lambda: daemon.connections()["open"] == 1, "the start's own connection has closed")
    first, second, third = Raw(daemon.socket), Raw(daemon.socket), Raw(daemon.socket)
    for raw in (first, second, third):
        raw.send(packed(1, 1, PING, None))
        assert raw.answer()[1] == 1
    with Raw(daemon.socket) as fourth:
        version, request_id, outcome, why = fourth.answer()[:4]
        assert (version, request_id, outcome) == (1, 0, FATAL)
        assert "max_connections" in why
        assert "3" in why
        assert fourth.ended()
    # The client tells an application the same.
    with daemon.client() as client, pytest.raises(DaemonUnreachable, match="max_connections"):
        client.ping()
    assert daemon.events("connection_refused")[0]["max_connections"] == 3
    second.close()

    def served() -> bool:
        with Raw(daemon.socket) as raw:
            try:
                raw.send(packed(1, 1, PING, None))
            except BrokenPipeError:
                pass  # refused before it could ask; the reason is there to be read
            answer = raw.answer()
            return bool(answer) and answer[1] == 1

    wait_until(served, "the freed slot serves")
    first.close()
    third.close()


def test_term_answers_what_was_sent(daemon: DaemonProcess) -> None:
    """At SIGTERM the daemon answers what has reached it, closes, removes its socket and exits 0."""
    with Raw(daemon.socket) as busy, Raw(daemon.socket) as idle:
        for raw in (busy, idle):
            raw.send(packed(1, 1, PING, None))
            assert raw.answer()[1] == 1
        # Stopped, so that the requests and the signal are all there when it goes on.
        daemon.process.send_signal(signal.SIGSTOP)
        busy.send(b"".join(packed(1, number, CHECK, [["server", "term", 1, 500, 1000]]) for number in range(1, 301)))
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.send_signal(signal.SIGCONT)
        answers = busy.answers()
        assert [answer[1] for answer in answers] == list(range(1, 301))
        assert answers[-1][3][0][2] == 200
        assert idle.ended()
    assert daemon.process.wait(30) == 0
    with pytest.raises(FileNotFoundError), Raw(daemon.socket):
        pass
    events = [line["event"] for line in daemon.events()]
    assert events[-2:] == ["daemon_draining", "daemon_stopped"]
    assert daemon.events("daemon_stopped")[0]["created"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_stops_at_once(start_daemon: Start, number: int) -> None:
    """SIGTERM and SIGINT end an idle daemon long before its grace period is over, with status 0."""
    daemon = start_daemon("--grace", "60000")
    with Raw(daemon.socket) as idle:
        assert daemon.stop(number, timeout=30) == 0
        assert idle.ended()


def test_term_with_a_client_that_never_reads(start_daemon: Start) -> None:
    """A client that never reads holds a stopping daemon up for the grace period and no longer."""
    daemon = start_daemon("--grace", "1000", "--stall-timeout", "600000")
    deaf = Deaf(daemon, CHECKS)
    deaf.push_until_paused()
    began = time.monotonic()
    assert daemon.stop(timeout=30) == 0
    assert 0.9 < time.monotonic() - began < 10
    assert daemon.events("daemon_draining")[0]["grace_ms"] == 1000


def test_a_second_signal_ends_at_once(start_daemon: Start) -> None:
    """A second signal does not wait for the grace period; the status names the signal and the socket is gone."""
    daemon = start_daemon("--grace", "600000", "--stall-timeout", "600000")
    deaf = Deaf(daemon, CHECKS)
    deaf.push_until_paused()
    daemon.process.send_signal(signal.SIGTERM)
    wait_until(lambda: daemon.events("daemon_draining"), "the daemon drains")
    assert daemon.process.poll() is None
    assert daemon.stop(signal.SIGTERM, timeout=30) == 128 + signal.SIGTERM
    assert daemon.events("daemon_cut_short")[0]["signal"] == "SIGTERM"
    with pytest.raises(FileNotFoundError), Raw(daemon.socket):
        pass


def test_the_log_of_a_quiet_day(start_daemon: Start) -> None:
    """A daemon tells when it is ready, drains and stops, as JSON with stable fields, and not a line a hit."""
    daemon = start_daemon("--time-zone", "Europe/Rome", "--max-buckets", "1000")
    with daemon.client() as client:
        for _ in range(300):
            client.hit(LIMIT, "quiet")
    daemon.stop()
    ready, draining, stopped = daemon.events()
    assert ready["event"] == "daemon_ready"
    assert ready["level"] == "info"
    assert ready["timestamp"].endswith("Z")
    assert ready["pid"] == daemon.process.pid
    assert ready["socket"] == daemon.socket
    assert ready["node"] == "test-node"
    assert ready["max_buckets"] == 1000
    assert ready["time_zone"] == "Europe/Rome"
    assert ready["clock"].startswith("manual:")
    assert draining["event"] == "daemon_draining"
    assert stopped["event"] == "daemon_stopped"
    assert (stopped["buckets"], stopped["created"], stopped["evicted"]) == (1, 1, 0)


def test_log_level_and_format(start_daemon: Start) -> None:
    """At level error a quiet daemon says nothing; the console format is for people."""
    silent = start_daemon("--log-level", "error")
    silent.stop()
    assert silent.events() == []
    console = start_daemon("--log-format", "console")
    console.stop()
    text = console.log.read_text()
    assert "daemon_ready" in text
    assert not text.startswith("{")


def test_bad_frames_are_logged_and_held_back(daemon: DaemonProcess) -> None:
    """The first bad frame is logged with its reason at once, further ones as one line with their count."""
    for _ in range(50):
        with Raw(daemon.socket) as raw:
            raw.send(frame(b"\xc1"))
            assert raw.answer()[2] == FATAL
    (line,) = daemon.events("bad_frame")
    assert line["level"] == "warning"
    assert "msgpack" in line["why"]
    assert "held_back" not in line
    wait_until(lambda: len(daemon.events("bad_frame")) > 1, "the ones held back are told", 60)
    assert daemon.events("bad_frame")[1]["held_back"] == 49
    assert daemon.connections()["bad_frames"] == 50


def test_a_full_table_is_logged(start_daemon: Start) -> None:
    """A table that loses live buckets says so, with counts."""
    daemon = start_daemon("--max-buckets", "10")
    with daemon.client() as client:
        for number in range(30):
            assert client.hit(LIMIT, f"full:{number}").remaining == LIMIT.limit - 1
        counters = client.info()["counters"]
    assert (counters["buckets"], counters["created"], counters["evicted"]) == (10, 30, 20)
    wait_until(lambda: daemon.events("table_full"), "the loss is told")
    line = daemon.events("table_full")[0]
    assert line["max_buckets"] == 10
    assert line["evicted"] > 0


def test_a_daemon_whose_log_reader_is_gone(start_daemon: Start) -> None:
    """A log that can no longer be written does not stop the daemon from answering."""
    daemon = start_daemon()
    with daemon.client() as client:
        with open(daemon.log, "rb"):
            pass
        daemon.log.unlink()
        for _ in range(3):
            with Raw(daemon.socket) as raw:
                raw.send(frame(b"\xc1"))
                assert raw.answer()[2] == FATAL
        assert client.ping() == "test-node"


def test_a_thousand_clients_at_once(daemon: DaemonProcess) -> None:
    """A thousand connections at a time are all answered."""
    streams = [Raw(daemon.socket) for _ in range(1000)]
    for number, raw in enumerate(streams, 1):
        raw.send(packed(1, number, PING, None))
    for number, raw in enumerate(streams, 1):
        assert raw.answer()[1] == number
    for raw in streams:
        raw.close()
    wait_until(gone(daemon), "all of them have gone")
