"""The HTTP door on real daemons, asked by a plain client: routes, status codes, and what each mistake is answered."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sidecar import Limit
from tests.clusters import Cluster, free_port
from tests.daemons import EPOCH, DaemonProcess, running_daemon, wait_until
from tests.sockets import PATIENCE, Raw, leave_unread

MAX_BODY = 65_536


class Answered(NamedTuple):
    """An HTTP answer; content: its JSON."""

    status: int
    content: Any
    headers: http.client.HTTPMessage


class _UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self.host)


def connect(where: str) -> http.client.HTTPConnection:
    """A connection to "host:port" or "unix:/path"."""
    if where.startswith("unix:"):
        return _UnixConnection(where.removeprefix("unix:"))
    return http.client.HTTPConnection(where, timeout=PATIENCE)


def call(where: str, method: str, path: str, body: Any = None) -> Answered:
    """One request; a body that is not bytes is sent as JSON."""
    connection = connect(where)
    try:
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        return Answered(response.status, json.loads(response.read()), response.headers)
    finally:
        connection.close()


def ask(where: str, body: Any) -> Answered:
    """POST /v1/GetRateLimits."""
    return call(where, "POST", "/v1/GetRateLimits", body)


def hit(key: str, **fields: Any) -> dict[str, Any]:
    """One hit, but for what a test sets."""
    return {"name": "n", "unique_key": key, "hits": 1, "limit": 5, "duration": 1000, **fields}


@pytest.fixture(scope="module")
def where() -> Iterator[str]:
    """The HTTP door of one daemon with a manual clock and small bodies; its other doors are off."""
    address = f"127.0.0.1:{free_port()}"
    with running_daemon("--http", address, "--max-frame", str(MAX_BODY)):
        yield address


# --- Answers


def test_fields_are_written_out_by_the_protos_own_names(where: str) -> None:
    """Defaults too; integers of 64 bits as strings, enums as names."""
    answered = ask(where, {"requests": [hit("whole", limit=1)]})
    assert answered.status == 200
    assert answered.headers["Content-Type"].startswith("application/json")
    assert answered.content == {
        "responses": [
            {
                "status": "UNDER_LIMIT",
                "limit": "1",
                "remaining": "0",
                "reset_time": str(EPOCH + 1000),
                "error": "",
                "metadata": {"owner": "test-node"},
            }
        ]
    }
    (refused,) = ask(where, {"requests": [hit("whole", limit=1)]}).content["responses"]
    assert refused["status"] == "OVER_LIMIT"


@pytest.mark.parametrize(
    "fields",
    [
        {"hits": "2", "limit": "9", "duration": "1000"},
        {"hits": 2, "limit": 9, "algorithm": "TOKEN_BUCKET", "behavior": "BATCHING"},
        {"hits": 2, "limit": 9, "algorithm": 0, "behavior": 1},
        {"hits": 2, "limit": 9, "metadata": {"any": "thing"}, "created_at": None},
        {"hits": 2, "limit": 9, "created_at": str(EPOCH)},
        {"hits": 2, "limit": 9, "createdAt": EPOCH},
    ],
)
def test_both_spellings_of_names_numbers_and_enums_are_taken(where: str, fields: dict[str, Any]) -> None:
    """Integers as numbers or strings, enums as names or numbers, names as the proto or in lowerCamelCase."""
    for name in ("unique_key", "uniqueKey"):
        request = {"name": "n", name: f"{name} {fields}", "duration": 1000, **fields}
        (answer,) = ask(where, {"requests": [request]}).content["responses"]
        assert (answer["error"], answer["limit"], answer["remaining"]) == ("", "9", "7")


def test_one_bad_request_fails_alone(where: str) -> None:
    """A missing name or key has V1's own words, an unknown algorithm or behavior ours; all come with status
    UNDER_LIMIT, and the others of the call are answered in their places."""
    bad = [hit("k", name=""), hit(""), hit("k", algorithm=7), hit("k", behavior=64), hit("k", behavior=-1)]
    answers = ask(where, {"requests": [hit("first"), *bad, hit("last")]}).content["responses"]
    assert [answer["remaining"] for answer in answers] == ["4", *["0"] * 5, "4"]
    assert {answer["status"] for answer in answers} == {"UNDER_LIMIT"}
    first, no_name, no_key, algorithm, behavior, negative, last = (answer["error"] for answer in answers)
    assert (first, last) == ("", "")
    assert no_name == "field 'namespace' cannot be empty"
    assert no_key == "field 'unique_key' cannot be empty"
    assert "unknown algorithm 7" in algorithm
    assert "unknown behavior 64" in behavior
    assert "field 'behavior'" in negative


def test_a_full_call_is_answered_in_order(where: str) -> None:
    """1,000 requests."""
    requests = [{"name": "n", "unique_key": f"{n}", "limit": n} for n in range(1000)]
    answers = ask(where, {"requests": requests}).content["responses"]
    assert [answer["limit"] for answer in answers] == [str(n) for n in range(1000)]


@pytest.mark.parametrize("body", [{}, {"requests": None}, {"requests": []}])
def test_no_requests_are_no_answers(where: str, body: object) -> None:
    """An empty call is answered emptily, as V1's is."""
    assert ask(where, body)[:2] == (200, {"responses": []})


def test_health_and_life(where: str) -> None:
    """The V1 routes and the probes of a daemon that is alone."""
    found = call(where, "GET", "/v1/HealthCheck")
    assert found.status == 200
    assert found.content["status"] == "healthy"
    assert found.content["peer_count"] == 1
    assert found.content["region_peers"] == []
    assert call(where, "GET", "/v1/LiveCheck")[:2] == (200, {})
    for probe in ("/livez", "/readyz"):
        assert call(where, "GET", probe)[:2] == (200, {"status": "ok"})


# --- Mistakes


def inner(**fields: Any) -> dict[str, Any]:
    """A call whose second request has these fields."""
    return {"requests": [hit("k"), fields]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"\xff\xfe", "body"),
        (b"[" * 60_000, "body"),
        (b'{"requests":[{"hits":' + b"9" * 5_000 + b"}]}", "requests[0].hits"),
        ([], "body"),
        ("x", "body"),
        (None, "body"),
        ({"request": []}, "request"),
        ({"requests": {}}, "requests"),
        ({"requests": "x"}, "requests"),
        ({"requests": [None]}, "requests[0]"),
        ({"requests": [1]}, "requests[0]"),
        (inner(hits="x"), "requests[1].hits"),
        (inner(hits=1.5), "requests[1].hits"),
        (inner(hits=True), "requests[1].hits"),
        (inner(hits=[]), "requests[1].hits"),
        (inner(limit=2**63), "requests[1].limit"),
        (inner(limit=-(2**63) - 1), "requests[1].limit"),
        (inner(duration={}), "requests[1].duration"),
        (inner(duration=float("nan")), "requests[1].duration"),
        (inner(burst="1 000"), "requests[1].burst"),
        (inner(createdAt="now"), "requests[1].createdAt"),
        (inner(name=3), "requests[1].name"),
        (inner(unique_key=["k"]), "requests[1].unique_key"),
        (inner(unique_key="\ud800"), "requests[1].unique_key"),
        (inner(algorithm="SLIDING"), "requests[1].algorithm"),
        (inner(algorithm=2**40), "requests[1].algorithm"),
        (inner(algorithm=True), "requests[1].algorithm"),
        (inner(behavior="global"), "requests[1].behavior"),
        (inner(behavior=1.0), "requests[1].behavior"),
        (inner(metadata=[]), "requests[1].metadata"),
        (inner(metadata={"a": 1}), "requests[1].metadata"),
        (inner(hit=1), "requests[1].hit"),
        (inner(unique_key="a", uniqueKey="b"), "requests[1].uniqueKey"),
        (b'{"requests":[{"hits":1,"hits":2}]}', "hits"),
        (b'{"requests":[{"\\ud800":2}]}', "requests[0].\\ud800"),
        ({"requests": [{}] * 1001}, "requests"),
    ],
)
def test_a_body_that_is_no_call_is_refused_by_the_field_at_fault(where: str, body: Any, field: str) -> None:
    """400, with a JSON error that names the field; no request of the call is counted."""
    if body is None:
        body = b"null"
    refused = ask(where, body)
    assert refused.status == 400
    assert f"field '{field}'" in refused.content["message"]
    assert refused.content["code"] == (11 if "1001" in refused.content["message"] else 3)
    assert set(refused.content) == {"code", "message", "details"}


def test_a_refused_call_counts_nothing(where: str) -> None:
    """A good request in front of a bad one is not decided."""
    assert ask(where, {"requests": [hit("uncounted"), {"hits": "x"}]}).status == 400
    (answer,) = ask(where, {"requests": [hit("uncounted")]}).content["responses"]
    assert answer["remaining"] == "4"


def test_a_body_that_is_too_large_is_refused(where: str) -> None:
    """413 past max_frame, by its length or as it comes; one just below it is read."""
    bodies: list[Any] = [b" " * (MAX_BODY + 1), iter([b" " * 1000] * 80)]
    for body in bodies:
        connection = connect(where)
        connection.request("POST", "/v1/GetRateLimits", body)  # an iterator is sent in chunks
        response = connection.getresponse()
        assert response.status == 413
        assert "field 'body'" in json.loads(response.read())["message"]
        connection.close()
    assert ask(where, b"{}".ljust(MAX_BODY)).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "x"])
def test_a_body_that_is_compressed_is_refused(start_daemon: Callable[..., DaemonProcess], encoding: str) -> None:
    """415, whatever is in it; that it is none of its kind is no fault of ours."""
    where = f"127.0.0.1:{free_port()}"
    daemon = start_daemon("--http", where)
    connection = connect(where)
    connection.request("POST", "/v1/GetRateLimits", b"{}", {"Content-Encoding": encoding})
    response = connection.getresponse()
    assert response.status == 415
    assert encoding in json.loads(response.read())["message"]
    connection.close()
    assert not daemon.events("internal_error") + daemon.events("loop_error")


def raw_answer(where: str, sent: bytes) -> bytes:
    """What comes back for these bytes, up to the end of the first read."""
    host, _, port = where.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as raw:
        raw.sendall(sent)
        return raw.recv(65_536)


POST = b"POST /v1/GetRateLimits HTTP/1.1\r\nHost: h\r\n"


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        (b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"Expect: tea\r\nContent-Length: 2\r\n\r\n", b"HTTP/1.1 417 "),
        (b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY + 1), b"HTTP/1.1 413 "),
        (b"Expect: 100-continue\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\n", b"HTTP/1.1 415 "),
        (b"Content-Length: %d\r\n\r\n" % (MAX_BODY + 1), b"HTTP/1.1 413 "),
    ],
)
def test_a_body_is_asked_for_or_refused_before_it_is_sent(where: str, head: bytes, answer: bytes) -> None:
    """By its head alone; the refusals are JSON."""
    got = raw_answer(where, POST + head)
    assert got.startswith(answer)
    assert answer.startswith(b"HTTP/1.1 100") or b'"message":"field ' in got


def test_a_body_that_was_asked_for_is_answered(where: str) -> None:
    """100, then 200."""
    host, _, port = where.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as raw:
        raw.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert raw.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(b"{}")
        assert raw.recv(65_536).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"X: %s\r\n\r\n" % (b"x" * 9_000),
        b"GET /%s HTTP/1.1\r\nHost: h\r\n\r\n" % (b"x" * 9_000),
        b"GET /livez HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_callers_fault(start_daemon: Callable[..., DaemonProcess], sent: bytes) -> None:
    """400, and one warning that says why, not a fault of ours with a traceback."""
    where = f"127.0.0.1:{free_port()}"
    daemon = start_daemon("--http", where)
    assert b" 400 " in raw_answer(where, sent).split(b"\r\n")[0]
    wait_until(lambda: daemon.events("bad_http"), "it is told")
    (line,) = daemon.events("bad_http")
    assert line["level"] == "warning"
    assert line["reason"]
    assert "exception" not in line
    assert not daemon.events("internal_error") + daemon.events("loop_error")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/GetRateLimits", "POST"),
        ("DELETE", "/v1/GetRateLimits", "POST"),
        ("POST", "/v1/HealthCheck", "GET, HEAD"),
        ("POST", "/v1/LiveCheck", "GET, HEAD"),
        ("PUT", "/livez", "GET, HEAD"),
        ("POST", "/readyz", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_refused(where: str, method: str, path: str, allowed: str) -> None:
    """405, and Allow tells the right ones."""
    refused = call(where, method, path)
    assert refused.status == 405
    assert refused.headers["Allow"] == allowed
    assert method in refused.content["message"]


@pytest.mark.parametrize("path", ["/", "/v1/getratelimits", "/v1/GetRateLimits/", "/livez/x"])
def test_an_unknown_path_is_refused(where: str, path: str) -> None:
    """404, and the path is told."""
    refused = call(where, "GET", path)
    assert (refused.status, refused.content["code"]) == (404, 5)
    assert path in refused.content["message"]


def test_a_body_that_does_not_come_is_not_waited_for(start_daemon: Callable[..., DaemonProcess]) -> None:
    """408 after stall_timeout."""
    where = f"127.0.0.1:{free_port()}"
    start_daemon("--http", where, "--stall-timeout", "200")
    connection = connect(where)
    connection.putrequest("POST", "/v1/GetRateLimits")
    connection.putheader("Content-Length", "10")
    connection.endheaders(b"{")
    response = connection.getresponse()
    assert response.status == 408
    assert "field 'body'" in json.loads(response.read())["message"]
    connection.close()


# --- The door itself


def test_the_door_may_be_a_unix_socket(start_daemon: Callable[..., DaemonProcess], short_path: Path) -> None:
    """With the mode of the daemon's own socket; the file goes with the daemon."""
    path = short_path / "http.sock"
    daemon = start_daemon("--http", f"unix:{path}", "--socket-mode", "0600")
    assert path.stat().st_mode & 0o777 == 0o600
    (answer,) = ask(f"unix:{path}", {"requests": [hit("k")]}).content["responses"]
    assert answer["remaining"] == "4"
    assert daemon.stop() == 0
    assert not path.exists()


def reach(where: str) -> socket.socket:
    """A bare connection."""
    host, _, port = where.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def alive(raw: socket.socket) -> bool:
    """Whether a request over this connection is answered."""
    raw.sendall(b"GET /livez HTTP/1.1\r\nHost: h\r\n\r\n")
    try:
        return raw.recv(65_536).startswith(b"HTTP/1.1 200 ")
    except ConnectionError:
        return False


def hung_up_on(raw: socket.socket) -> bool:
    """Wait for the end of a connection, reading what comes before."""
    try:
        while raw.recv(65_536):
            pass
    except ConnectionError:
        pass
    return True


def test_callers_are_bounded(start_daemon: Callable[..., DaemonProcess]) -> None:
    """Past max_connections a caller is hung up on and told of, apart from the socket's; a place that is freed is usable
    again, and the socket's own places are not touched."""
    where = f"127.0.0.1:{free_port()}"
    daemon = start_daemon("--http", where, "--max-connections", "2")
    with reach(where) as first, reach(where) as second:
        assert alive(first)
        assert alive(second)
        with reach(where) as third:
            assert hung_up_on(third)
        with daemon.client() as client:
            assert client.hit(Limit("n", 5, per="1s"), "k").remaining == 4
        assert alive(first)
        second.close()

        def room() -> bool:
            with reach(where) as again:
                try:
                    return alive(again)
                except ConnectionError:
                    return False

        wait_until(room, "the place is free")
    line = daemon.events("connection_refused")[0]
    assert (line["door"], line["max_connections"]) == ("http", 2)


@pytest.mark.parametrize("head", [b"G", b"GET /livez HTTP/1.1\r\n", b"POST /v1/GetRateLimits HTTP/1.1\r\nX: "])
def test_a_head_that_does_not_come_whole_is_not_waited_for(
    start_daemon: Callable[..., DaemonProcess], head: bytes
) -> None:
    """Its connection ends after stall_timeout, also if it answered before; one that is quiet, new or used, stays."""
    where = f"127.0.0.1:{free_port()}"
    daemon = start_daemon("--http", where, "--stall-timeout", "200")
    with reach(where) as new, reach(where) as used, reach(where) as slow, reach(where) as again:
        assert alive(used)
        assert alive(again)
        for raw in (slow, again):
            raw.sendall(head)
        assert hung_up_on(slow)
        assert hung_up_on(again)
        assert alive(used)
        assert alive(new)
    lines = daemon.events("client_dropped")
    assert {(line["door"], line["reason"]) for line in lines} == {("http", "head left unfinished")}


def test_answers_that_nobody_reads_are_not_kept(start_daemon: Callable[..., DaemonProcess]) -> None:
    """A caller that asks on and reads nothing is hung up on after stall_timeout."""
    where = f"127.0.0.1:{free_port()}"
    daemon = start_daemon("--http", where, "--stall-timeout", "200")
    body = json.dumps({"requests": [{}] * 1000}).encode()
    with reach(where) as raw:
        raw.settimeout(0.5)
        try:
            while True:
                raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        except TimeoutError:
            pass  # neither side reads any more
        except ConnectionError:
            pass  # it was quicker
        wait_until(lambda: daemon.events("client_dropped"), "it is told")
    (line,) = daemon.events("client_dropped")
    assert (line["door"], line["reason"]) == ("http", "answers left unread")
    assert call(where, "GET", "/livez").status == 200


def test_all_doors_count_in_one_bucket(start_daemon: Callable[..., DaemonProcess]) -> None:
    """HTTP and the socket."""
    where = f"127.0.0.1:{free_port()}"
    daemon = start_daemon("--http", where)
    with daemon.client() as client:
        assert client.hit(Limit("n", 5, per="1s"), "k").remaining == 4
    (answer,) = ask(where, {"requests": [hit("k")]}).content["responses"]
    assert answer["remaining"] == "3"


def test_a_draining_daemon_is_unready_and_lives(start_daemon: Callable[..., DaemonProcess]) -> None:
    """From SIGTERM on /readyz is 503 and V1 unhealthy, while /livez answers and calls are decided; a client that does
    not read keeps the daemon draining here."""
    where = f"127.0.0.1:{free_port()}"
    daemon = start_daemon("--http", where, "--grace", "60000")
    with Raw(daemon.socket) as raw:
        leave_unread(raw)
        daemon.process.terminate()
        wait_until(lambda: call(where, "GET", "/readyz").status == 503, "the daemon is unready")
        assert call(where, "GET", "/readyz").content["message"] == "draining"
        assert call(where, "GET", "/livez").status == 200
        found = call(where, "GET", "/v1/HealthCheck").content
        assert (found["status"], found["message"]) == ("unhealthy", "draining")
        assert ask(where, {"requests": [hit("k")]}).content["responses"][0]["remaining"] == "4"
    assert daemon.process.wait(30) == 0


def test_a_caller_that_hangs_up_is_given_up(start_cluster: Callable[..., Cluster]) -> None:
    """Its request no longer waits for an owner that stands still, so that the daemon stops at once."""
    where = f"127.0.0.1:{free_port()}"
    cluster = start_cluster(2, "--peer-timeout", "60000", "--grace", "60000")
    first, second = cluster.nodes
    first.stop()
    first.options = (*first.options, "--http", where)
    first.start()
    cluster.connect(Limit("n", 5, per="1d"))
    (key,) = cluster.keys(second, 1, "n")
    forwarded = first.peers()["forwarded"]
    second.pause()
    try:
        connection = connect(where)
        connection.request("POST", "/v1/GetRateLimits", json.dumps({"requests": [hit(key)]}))
        wait_until(lambda: first.peers()["forwarded"] > forwarded, "the request is on its way")
        connection.close()
        assert call(where, "GET", "/livez").status == 200
        assert first.stop(timeout=PATIENCE) == 0
    finally:
        second.resume()
    assert not first.events("internal_error") + first.events("loop_error")


def test_a_peer_that_is_away_makes_no_other_unready(start_cluster: Callable[..., Cluster]) -> None:
    """/readyz stays 200 and V1 healthy; V1's message names who is away."""
    where = f"127.0.0.1:{free_port()}"
    cluster = start_cluster(2)
    first, second = cluster.nodes
    first.stop()
    first.options = (*first.options, "--http", where)
    first.start()
    second.crash()
    (key,) = cluster.keys(second, 1, "n")
    (answer,) = ask(where, {"requests": [hit(key)]}).content["responses"]
    assert answer["status"] == "UNDER_LIMIT"
    assert answer["error"]
    assert call(where, "GET", "/readyz").status == 200
    found = call(where, "GET", "/v1/HealthCheck").content
    assert (found["status"], found["peer_count"]) == ("healthy", 2)
    assert second.name in found["message"]
