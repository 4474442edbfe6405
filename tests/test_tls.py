"""TLS on real daemons: rotation under load, what is refused and what is said of it, versions, HTTP."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from sidecar import Client, Limit, Status
from tests.authority import Authority, Mount, Pair, options, serial_of
from tests.clusters import Cluster, Load, free_port
from tests.daemons import DaemonProcess, clean_environment, wait_until
from tests.v1_client import Stranger

LIMIT = Limit("tls", 1_000_000, per="1d")
ONE = {"name": "tls", "unique_key": "k", "hits": 1, "limit": 10, "duration": 60_000}


class SecureStranger(Stranger):
    """A V1 client that speaks TLS; pair: the certificate that it shows, if any."""

    def __init__(self, port: int, trusts: Authority, pair: Pair | None) -> None:
        super().__init__("127.0.0.1:1")
        self.channel.close()
        shown = (None, None) if pair is None else (pair.key, pair.cert)
        self.channel = grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(trusts.pem, *shown))


def refused(stranger: Stranger) -> str:
    """What the stranger is told, who must not be answered."""
    with stranger, pytest.raises(grpc.RpcError) as told:
        stranger.ask(ONE)
    assert told.value.code() == grpc.StatusCode.UNAVAILABLE
    return str(told.value.details())


def handshake(
    port: int, trusts: Authority, pair: Pair | None = None, version: ssl.TLSVersion | None = None, alpn: str = "h2"
) -> tuple[str, int]:
    """A real handshake by OpenSSL: the version agreed upon and the serial number of what the server showed; raises
    ConnectionAbortedError if there is none."""
    context = ssl.create_default_context(cadata=trusts.pem.decode())
    context.set_alpn_protocols([alpn])
    if version is not None:
        context.set_ciphers("ALL:@SECLEVEL=0")  # else OpenSSL would itself refuse what is old
        context.minimum_version = context.maximum_version = version
    if pair is not None:
        with_files(pair, context.load_cert_chain)
    with socket.create_connection(("127.0.0.1", port)) as stream:
        try:
            tls = context.wrap_socket(stream, server_hostname="127.0.0.1")
        except (ssl.SSLError, ConnectionError) as error:
            raise ConnectionAbortedError(f"no handshake: {error}") from None
        with tls:
            found = tls.getpeercert(binary_form=True)
            assert found is not None
            return str(tls.version()), serial_of(found)


def with_files(pair: Pair, load: Callable[[str, str], None]) -> None:
    """Call with paths of the certificate and the key; Python's ssl takes no bytes."""
    with tempfile.TemporaryDirectory() as folder:
        cert, key = os.path.join(folder, "cert.pem"), os.path.join(folder, "key.pem")
        Path(cert).write_bytes(pair.cert)
        Path(key).write_bytes(pair.key)
        load(cert, key)


def failures(load: Load) -> list[object]:
    """Every answer with an error in it, and every call that failed."""
    answers = [one for result, _, _ in load.results for one in (result if isinstance(result, list) else [result])]
    return [answer for answer in answers if getattr(answer, "error", answer) or getattr(answer, "degraded", False)]


def told(daemon: DaemonProcess, event: str, reason: str) -> dict[str, Any]:
    """Wait for that event with that reason."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = [line for line in daemon.events(event) if reason in line["reason"]]
        return bool(found)

    wait_until(there, f"{event} tells {reason!r}")
    return found[0]


@pytest.fixture
def ca() -> Authority:
    """The CA of a test."""
    return Authority()


@pytest.fixture
def mount(short_path: Path, ca: Authority) -> Mount:
    """Files that daemons of a test share."""
    made = Mount(short_path / "tls")
    made.write([ca], ca.issue())
    return made


@pytest.fixture
def secure(start_daemon: Callable[..., DaemonProcess], mount: Mount) -> Callable[..., tuple[DaemonProcess, int]]:
    """Starts a daemon with TLS and an open gRPC port."""

    def start(*more: str) -> tuple[DaemonProcess, int]:
        port = free_port()
        return start_daemon("--listen", f"127.0.0.1:{port}", *mount.options, *more), port

    return start


# --- Rotation


def ask_of(cluster: Cluster) -> Callable[[Client, int], object]:
    """A frame with keys of every owner."""
    requests = [LIMIT.request(key, 1) for node in cluster.nodes for key in cluster.keys(node, 10, LIMIT.name)]
    return lambda client, _: client.check(requests)


def renewed(cluster: Cluster, times: int) -> None:
    """Wait until every node has taken so many new sets over."""
    for node in cluster.nodes:
        wait_until(lambda node=node: len(node.events("tls_renewed")) >= times, f"{node.name} renews")  # type: ignore[misc]


def test_everything_is_renewed_under_load_and_no_request_fails(
    start_cluster: Callable[..., Cluster], mount: Mount, ca: Authority
) -> None:
    """From one CA to another in the order that docs/tls.md tells, with new certificates in between: both ends of each
    link end up with the new ones, and no request is refused, falls back or is lost."""
    cluster = start_cluster(2, *mount.options)
    cluster.connect(LIMIT)
    new = Authority()
    sets: list[tuple[list[Authority], Pair]] = [
        ([ca], ca.issue()),
        ([ca, new], ca.issue()),
        ([ca, new], new.issue()),
        ([new], new.issue()),
    ]
    before = [{owner.name: node.link(owner)["batches"] for owner in cluster.nodes} for node in cluster.nodes]
    with Load(cluster.nodes, ask_of(cluster), rate=300) as load:
        for times, (authorities, pair) in enumerate(sets, 1):
            mount.write(authorities, pair)
            renewed(cluster, times)
            instant = time.monotonic()
            wait_until(lambda since=instant: len(load.since(since)) > 100, "calls go on")  # type: ignore[misc]
    assert failures(load) == []
    calls = len(load.results)
    for node, batches in zip(cluster.nodes, before, strict=True):
        for owner in cluster.nodes:
            if owner is not node:
                assert node.link(owner)["batches"] - batches[owner.name] > 100
        assert handshake(node.port, new, new.issue()) == ("TLSv1.3", pair.serial)
        assert node.events("peer_away") == node.events("tls_refused") == []
        (key,) = cluster.keys(node, 1, LIMIT.name)
        assert 1_000_000 - node.left(LIMIT, key) == calls, "each hit is charged once"
    for node in cluster.nodes:  # which trusts the new CA alone: whoever still dials by the old certificate is refused
        node.stop()
        node.start()
        cluster.connect(LIMIT)


def test_a_bad_new_set_keeps_the_old_one_and_is_told_once(
    start_cluster: Callable[..., Cluster], mount: Mount, ca: Authority
) -> None:
    """An expired certificate, written under load: one line on each daemon, and requests are answered as before."""
    cluster = start_cluster(2, *mount.options)
    cluster.connect(LIMIT)
    with Load(cluster.nodes, ask_of(cluster), rate=100) as load:
        mount.write([ca], ca.issue(ends=-60.0))
        for node in cluster.nodes:
            told(node, "tls_not_renewed", "expired at")
        time.sleep(3)
    assert failures(load) == []
    for node in cluster.nodes:
        assert len(node.events("tls_not_renewed")) == 1
        assert node.events("tls_renewed") == []
    mount.write([ca], ca.issue())
    renewed(cluster, 1)


def test_sighup_reads_the_files_at_once_and_refuses_bad_ones(
    start_cluster: Callable[..., Cluster], mount: Mount, ca: Authority
) -> None:
    """A bad set at SIGHUP is `reload_failed` with the file's name; a good one is taken, from other paths too."""
    cluster = start_cluster(1)
    (node,) = cluster.nodes
    node.stop()
    settings = "\n".join(
        f"tls_{name} = '{path}'" for name, path in zip(("ca", "cert", "key"), mount.paths, strict=True)
    )
    node.settings.write_text(settings + "\n")
    node.start()
    other = Mount(cluster.folder / "other")
    other.write([ca], ca.issue(ends=-60.0))
    moved = settings.replace(str(mount.folder), str(other.folder)) + "\n"
    node.settings.write_text(moved)
    node.hang_up()
    assert str(other.folder) in told(node, "reload_failed", "expired at")["reason"]
    pair = ca.issue()
    other.write([ca], pair)
    node.hang_up()
    wait_until(lambda: node.events("tls_renewed"), "the new paths are read")
    assert handshake(node.port, ca, ca.issue())[1] == pair.serial
    pair = ca.issue()
    other.write([ca], pair)
    wait_until(lambda: handshake(node.port, ca, ca.issue())[1] == pair.serial, "and looked at from then on")


def test_switching_tls_on_or_off_needs_a_restart(
    start_cluster: Callable[..., Cluster], mount: Mount, ca: Authority
) -> None:
    """Named, and left as it was: a port that spoke plain text does not fall silent, nor the other way round."""
    cluster = start_cluster(1)
    (node,) = cluster.nodes
    lines = "".join(f"tls_{name} = '{path}'\n" for name, path in zip(("ca", "cert", "key"), mount.paths, strict=True))
    node.settings.write_text(lines)
    node.hang_up()
    wait_until(lambda: node.events("restart_needed"), "it is named")
    assert node.events("restart_needed")[0]["settings"] == ["tls_ca", "tls_cert", "tls_key"]
    with Stranger(f"127.0.0.1:{node.port}") as stranger:
        assert stranger.ask(ONE)[0].remaining == 9
    node.stop()
    node.start()
    node.settings.write_text("")
    node.hang_up()
    wait_until(lambda: len(node.events("restart_needed")) == 2, "it is named")
    refused(Stranger(f"127.0.0.1:{node.port}"))


# --- Refused


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        (lambda ca: None, "it showed no certificate"),
        (lambda ca: Authority().issue(), "its certificate is signed by no CA in tls_ca"),
        (lambda ca: ca.issue(ends=-60.0), "its certificate has expired"),
    ],
    ids=["missing", "wrong CA", "expired"],
)
def test_a_client_without_a_good_certificate_is_refused_and_told_of_once(
    secure: Callable[..., tuple[DaemonProcess, int]],
    ca: Authority,
    pair: Callable[[Authority], Pair | None],
    reason: str,
) -> None:
    """The daemon that refuses it says why, in one line; a client with a certificate is answered all the while."""
    daemon, port = secure()
    refused(SecureStranger(port, ca, pair(ca)))
    told(daemon, "tls_refused", reason)
    with SecureStranger(port, ca, ca.issue()) as friend:
        assert friend.ask(ONE)[0].remaining == 9
    assert len(daemon.events("tls_refused")) == 1


def test_a_client_in_plain_text_is_refused_and_told_of(
    secure: Callable[..., tuple[DaemonProcess, int]], ca: Authority
) -> None:
    """The gRPC port speaks TLS alone, to V1 clients too."""
    daemon, port = secure()
    refused(Stranger(f"127.0.0.1:{port}"))
    told(daemon, "tls_refused", "it does not speak TLS")


def test_a_flood_of_refusals_is_no_flood_of_lines(
    secure: Callable[..., tuple[DaemonProcess, int]], ca: Authority
) -> None:
    """Three hundred connections in plain text: at most two lines, which count the others; the daemon goes on."""
    daemon, port = secure()
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", port)) as stream:
            stream.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stream.settimeout(10)
            try:
                while stream.recv(100):
                    pass
            except ConnectionError:
                pass
    told(daemon, "tls_refused", "it does not speak TLS")
    daemon.stop()
    lines = daemon.events("tls_refused")
    assert len(lines) <= 2
    assert sum(line.get("held_back", 0) + 1 for line in lines) >= 250
    assert daemon.events("daemon_stopped")


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        (lambda ca: Authority().issue(), "its certificate is signed by no CA in tls_ca"),
        (lambda ca: ca.issue("other.example"), "its certificate does not bear the name it is dialled by"),
    ],
    ids=["wrong CA", "wrong name"],
)
def test_a_peer_that_cannot_be_trusted_is_away_and_its_keys_fall_back(
    start_cluster: Callable[..., Cluster],
    short_path: Path,
    ca: Authority,
    pair: Callable[[Authority], Pair],
    reason: str,
) -> None:
    """The one that dials says why, in one line; requests get the fallback; with a good certificate it is back."""
    mounts = [Mount(short_path / "pairs" / f"node-{number}") for number in (1, 2)]
    mounts[0].write([ca], ca.issue())
    mounts[1].write([ca], pair(ca))
    cluster = start_cluster(2, *options(short_path / "pairs" / "{name}"), "--fallback", "local")
    one, two = cluster.nodes
    (key,) = cluster.keys(two, 1, LIMIT.name)
    wait_until(lambda: reason in one.ask(LIMIT, key).error, "it is refused")
    decision = one.ask(LIMIT, key)
    assert (decision.status, decision.degraded) == (Status.UNDER_LIMIT, True)
    assert reason in decision.error
    time.sleep(3)
    assert [line["peer"] for line in one.events("peer_away")] == ["node-2"]
    assert one.events("tls_refused") == []
    mounts[1].write([ca], ca.issue())
    wait_until(lambda: not one.ask(LIMIT, key).degraded, "it is trusted")


def test_a_daemon_whose_certificate_is_refused_is_sent_to_the_log_of_the_one_that_refuses_it(
    start_cluster: Callable[..., Cluster], short_path: Path, ca: Authority
) -> None:
    """The one that dials is not told why, so it says where that stands; there it stands in one line."""
    mounts = [Mount(short_path / "pairs" / f"node-{number}") for number in (1, 2)]
    mounts[0].write([ca], ca.issue())
    mounts[1].write([ca], Authority().issue())
    cluster = start_cluster(2, *options(short_path / "pairs" / "{name}"), "--fallback", "deny")
    one, two = cluster.nodes
    (key,) = cluster.keys(one, 1, LIMIT.name)
    wait_until(lambda: "its log tells why (tls_refused)" in two.ask(LIMIT, key).error, "it is refused")
    assert two.ask(LIMIT, key).status == Status.OVER_LIMIT
    told(one, "tls_refused", "its certificate is signed by no CA in tls_ca")
    time.sleep(3)
    assert len(one.events("tls_refused")) == len(two.events("peer_away")) == 1
    assert one.events("peer_away") == two.events("tls_refused") == []


def test_a_peer_whose_certificate_has_expired_is_away(
    start_cluster: Callable[..., Cluster], short_path: Path, ca: Authority
) -> None:
    """It says so itself, once, and so does the one that dials it; requests get the fallback."""
    mounts = [Mount(short_path / "pairs" / f"node-{number}") for number in (1, 2)]
    mounts[0].write([ca], ca.issue())
    mounts[1].write([ca], ca.issue(ends=8.0))
    cluster = start_cluster(2, *options(short_path / "pairs" / "{name}"), "--fallback", "allow")
    one, two = cluster.nodes
    wait_until(lambda: two.events("tls_expired"), "it notices")
    (key,) = cluster.keys(two, 1, LIMIT.name)
    wait_until(lambda: "its certificate has expired" in one.ask(LIMIT, key).error, "it is refused")
    assert one.ask(LIMIT, key).degraded
    time.sleep(3)
    assert len(one.events("peer_away")) == 1
    assert len(two.events("tls_expired")) == 1


def test_a_daemon_in_plain_text_is_no_peer_of_one_in_tls(start_cluster: Callable[..., Cluster], mount: Mount) -> None:
    """Neither way is a request carried; the one with TLS says why, of its link and of its port."""
    cluster = start_cluster(2, "--peer-timeout", "2000")
    one, two = cluster.nodes
    one.stop()
    one.options = (*one.options, *mount.options)
    one.start()
    (of_two,) = cluster.keys(two, 1, LIMIT.name)
    (of_one,) = cluster.keys(one, 1, LIMIT.name)
    assert one.ask(LIMIT, of_two).status == Status.ERROR
    assert two.ask(LIMIT, of_one).status == Status.ERROR
    told(one, "peer_away", "it does not speak TLS")
    assert len(two.events("peer_away")) == 1


def test_a_server_name_stands_for_every_host(
    start_cluster: Callable[..., Cluster], mount: Mount, ca: Authority
) -> None:
    """Certificates made out to a name alone serve peers that are dialled by address."""
    mount.write([ca], ca.issue("peers.example"))
    cluster = start_cluster(2, *mount.options, "--tls-server-name", "peers.example")
    cluster.connect(LIMIT)
    assert cluster.nodes[0].events("peer_away") == []


def test_a_unix_socket_of_grpc_speaks_tls_too(
    start_daemon: Callable[..., DaemonProcess], short_path: Path, mount: Mount, ca: Authority
) -> None:
    """Plain text is refused on whatever the gRPC port is."""
    path = f"unix:{short_path}/v1.sock"
    mount.write([ca], ca.issue("v1.example"))
    start_daemon("--listen", path, *mount.options)
    pair = ca.issue()
    options = (("grpc.ssl_target_name_override", "v1.example"),)
    with SecureStranger(1, ca, pair) as stranger:
        stranger.channel = grpc.secure_channel(
            path, grpc.ssl_channel_credentials(ca.pem, pair.key, pair.cert), options=options
        )
        assert stranger.ask(ONE)[0].remaining == 9
    refused(Stranger(path))


# --- Versions


@pytest.mark.parametrize("rsa", [False, True], ids=["ecdsa", "rsa"])
def test_the_lowest_version_is_kept_to(
    secure: Callable[..., tuple[DaemonProcess, int]], mount: Mount, ca: Authority, rsa: bool
) -> None:
    """At default 1.3 alone; at 1.2 that one too, and nothing below.  OpenSSL shakes hands, on the gRPC port."""
    mount.write([ca], ca.issue(rsa=rsa))
    v1_1, v1_2, v1_3 = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
    daemon, port = secure()
    pair = ca.issue(rsa=rsa)
    assert handshake(port, ca, pair, v1_3)[0] == "TLSv1.3"
    with pytest.raises(ConnectionAbortedError):
        handshake(port, ca, pair, v1_2)
    told(daemon, "tls_refused", "no version of TLS that tls_min_version allows")
    daemon, port = secure("--tls-min-version", "1.2")
    assert handshake(port, ca, pair, v1_3)[0] == "TLSv1.3"
    assert handshake(port, ca, pair, v1_2)[0] == "TLSv1.2"
    with pytest.raises(ConnectionAbortedError), pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        handshake(port, ca, pair, v1_1)


@pytest.mark.parametrize(("lowest", "answered"), [("1.3", False), ("1.2", True)])
def test_a_peer_that_speaks_1_2_alone_is_dialled_only_where_that_is_allowed(
    start_cluster: Callable[..., Cluster], mount: Mount, ca: Authority, lowest: str, answered: bool
) -> None:
    """The asking end keeps to the lowest version too: a listener of OpenSSL's that knows 1.2 alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    with_files(ca.issue(), context.load_cert_chain)
    versions: list[str | None] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    stream, _ = listener.accept()
                except OSError:
                    return
                with stream:
                    try:
                        with context.wrap_socket(stream, server_side=True) as tls:
                            versions.append(tls.version())
                    except OSError:
                        versions.append("refused")

        thread = threading.Thread(target=listen)
        thread.start()
        (node,) = start_cluster(1, *mount.options, "--tls-min-version", lowest, "--peer-timeout", "5000").nodes
        node.list_peers(f"{node.peer.name}={node.peer.address},old=127.0.0.1:{listener.getsockname()[1]}")
        node.hang_up()
        wait_until(lambda: "old" in node.members(), "it is a peer")
        node.ask_all(LIMIT, [str(number) for number in range(50)])
        told(node, "peer_away", "" if answered else "no version of TLS that tls_min_version allows")
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert set(versions) == {"TLSv1.2" if answered else "refused"}


# --- HTTP


def test_http_speaks_tls_with_the_same_certificate_and_follows_its_renewal(
    secure: Callable[..., tuple[DaemonProcess, int]], mount: Mount, ca: Authority
) -> None:
    """A client needs no certificate there; plain HTTP and TLS 1.2 are refused; a new certificate is shown to those that
    come after it, and a connection that was open stays."""
    port = free_port()
    daemon, _ = secure("--http", f"127.0.0.1:{port}")
    context = ssl.create_default_context(cadata=ca.pem.decode())
    kept = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)

    def ready(connection: http.client.HTTPConnection) -> int:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        answer.read()
        return answer.status

    assert ready(kept) == 200
    with pytest.raises(ConnectionAbortedError):
        handshake(port, ca, None, ssl.TLSVersion.TLSv1_2, "http/1.1")
    plain = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with pytest.raises((OSError, http.client.HTTPException)):
        ready(plain)
    plain.close()
    pair = ca.issue()
    mount.write([ca], pair)
    wait_until(lambda: handshake(port, ca, None, None, "http/1.1") == ("TLSv1.3", pair.serial), "it is shown")
    assert ready(kept) == 200
    kept.close()
    assert daemon.events("loop_error") == []


def https_client(port: int, context: ssl.SSLContext) -> None:
    """A handshake, and a word."""
    with socket.create_connection(("127.0.0.1", port)) as raw:
        try:
            with context.wrap_socket(raw, server_hostname="127.0.0.1") as tls:
                tls.sendall(b"GET / HTTP/1.1\r\n\r\n")
        except (ssl.SSLError, ConnectionError):
            pass


def old_version(ca: Authority) -> ssl.SSLContext:
    """Of a client that speaks TLS 1.2 at most."""
    context = ssl.create_default_context(cadata=ca.pem.decode())
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def plain_text(port: int) -> None:
    """A client that speaks HTTP at once."""
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET /readyz HTTP/1.1\r\nHost: h\r\n\r\n")
        raw.settimeout(20)
        try:
            raw.recv(100)
        except ConnectionError:
            pass


@pytest.mark.parametrize(
    ("come", "reason"),
    [
        (lambda port, ca: plain_text(port), "it does not speak TLS"),
        (lambda port, ca: https_client(port, old_version(ca)), "it speaks no version of TLS"),
        (
            lambda port, ca: https_client(port, ssl.create_default_context(cadata=Authority().pem.decode())),
            "it knows no CA",
        ),
    ],
    ids=["plain", "TLS 1.2", "another CA"],
)
def test_an_https_handshake_that_fails_is_told_once(
    secure: Callable[..., tuple[DaemonProcess, int]],
    ca: Authority,
    come: Callable[[int, Authority], None],
    reason: str,
) -> None:
    """In one line that says why, and which door; others are answered all the while."""
    port = free_port()
    daemon, _ = secure("--http", f"127.0.0.1:{port}")
    come(port, ca)
    assert told(daemon, "tls_refused", reason)["door"] == "http"
    good = http.client.HTTPSConnection(
        "127.0.0.1", port, timeout=20, context=ssl.create_default_context(cadata=ca.pem.decode())
    )
    good.request("GET", "/metrics")
    assert b"\nsidegate_tls_expiry_timestamp_seconds 1." in good.getresponse().read()
    good.close()
    assert len(daemon.events("tls_refused")) == 1
    assert not daemon.events("loop_error") + daemon.events("internal_error")


def test_who_looks_whether_https_is_open_is_not_told_of_and_holds_no_place(
    secure: Callable[..., tuple[DaemonProcess, int]], ca: Authority
) -> None:
    """A probe that connects and hangs up is no attack; one that stands still in its handshake has a place."""
    port = free_port()
    daemon, _ = secure("--http", f"127.0.0.1:{port}", "--max-connections", "1")
    for _ in range(20):
        socket.create_connection(("127.0.0.1", port)).close()

    def shaken() -> bool:
        try:
            return handshake(port, ca, None, None, "http/1.1")[0] == "TLSv1.3"
        except ConnectionAbortedError:
            return False

    wait_until(shaken, "the place is free")
    assert daemon.events("tls_refused") == []
    holders: list[socket.socket] = []

    def taken() -> bool:
        # One that comes while the one before is still being closed finds no place itself.
        holders.append(socket.create_connection(("127.0.0.1", port)))
        return not shaken() and not shaken()

    wait_until(taken, "the place is taken")
    for holder in holders:
        holder.close()
    wait_until(shaken, "the place is free again")


# --- What is said of it


def test_standard_error_is_given_back_and_loses_only_what_is_of_grpc() -> None:
    """In a process of its own: what others write there comes out, and gRPC's lines become counted reasons, less those
    that are known of the links."""
    program = """
import asyncio, os, sys
from sidecar.refusals import Refusals
lines = [b"I1201 03:22:39.9 1 a.cc:1] Handshake failed with error X:PEER_DID_NOT_RETURN_A_CERTIFICATE: y",
         b"E1201 03:22:39.9 1 a.cc:1] some other line of gRPC's", b"words of somebody else",
         b"I1201 03:22:39.9 1 a.cc:1] Handshake failed with error SOMETHING NEW"]
async def work():
    refusals.start()
    os.write(2, b"\\n".join(lines * 2) + b"\\nan unfinished ")
    await asyncio.sleep(0.2)
    assert refusals.due([]) == {}
    due = refusals.due(["owner is away: SOMETHING NEW"])
    print(dict(due), file=sys.stderr)
    refusals.stop()
refusals = Refusals()
asyncio.run(work())
os.write(2, b"line\\n")
refusals.close()
os.write(2, b"the end\\n")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=60)
    assert done.stderr.splitlines() == [
        "words of somebody else",
        "words of somebody else",
        "{'it showed no certificate': 2}",
        "an unfinished line",
        "the end",
    ]
    assert done.returncode == 0


def test_a_daemon_without_standard_error_serves_tls(short_path: Path, mount: Mount, ca: Authority) -> None:
    """Some supervisors close it."""
    port = free_port()
    words = f"--socket {short_path}/s.sock --listen 127.0.0.1:{port} --http off {' '.join(mount.options)}"
    command = ["sh", "-c", f"exec {sys.executable} -m sidecar serve {words} 2>&-"]
    process = subprocess.Popen(command, env=clean_environment())
    try:

        def answers() -> bool:
            try:
                with SecureStranger(port, ca, ca.issue()) as stranger:
                    return bool(stranger.ask(ONE)[0].remaining)
            except grpc.RpcError:
                return False

        wait_until(answers, "it answers")
    finally:
        process.terminate()
        assert process.wait(20) == 0


# --- At the start


@pytest.mark.parametrize("listen", ["off", "port"])
def test_files_that_cannot_be_used_stop_the_start(short_path: Path, ca: Authority, listen: str) -> None:
    """One line that names the file and the reason, exit status 2, and no socket: whichever doors are open."""
    mount = Mount(short_path / "tls")
    mount.write([ca], ca.issue(ends=-60.0))
    door = "off" if listen == "off" else f"127.0.0.1:{free_port()}"
    words = ["--socket", str(short_path / "s.sock"), "--listen", door, "--http", "off", *mount.options]
    command = [sys.executable, "-m", "sidecar", "serve", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert '"event": "tls_unavailable"' in line
    assert f"tls_cert: {mount.folder}/cert.pem: expired at" in line


def test_a_daemon_with_tls_ends_well_and_leaves_nothing_unsaid(
    secure: Callable[..., tuple[DaemonProcess, int]],
) -> None:
    """Its last lines come out though standard error is read on the way, each of them JSON."""
    daemon, _ = secure()
    assert daemon.stop() == 0
    assert [line["event"] for line in daemon.events()][-2:] == ["daemon_draining", "daemon_stopped"]
