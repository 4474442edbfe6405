"""Real daemons that find each other: by a file, and by a real DNS server (dnsmasq) on loopback."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster_link.discovery.dns_lookup import Lookup, LookupFailed
from sidecar import Client, Decision, Limit
from tests.clusters import free_port
from tests.daemons import DaemonProcess, clean_environment, wait_until

FOLLOWED = 2.0
"""Seconds within which a scale-up and a scale-down are followed."""


class Found:
    """Daemons on addresses of their own, 127.0.0.2 and up, with one port for all, as pods of one service have."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self.port = free_port()
        self.daemons: dict[int, DaemonProcess] = {}

    def start(self, *numbers: int) -> None:
        """Start daemons by the last part of their address."""
        with ThreadPoolExecutor() as pool:
            for number, daemon in zip(numbers, pool.map(self._start, numbers), strict=True):
                self.daemons[number] = daemon

    def _start(self, number: int) -> DaemonProcess:
        folder = self._folder / str(number)
        folder.mkdir()
        place = f"127.0.0.{number}:{self.port}"
        return DaemonProcess(folder, "--listen", place, "--node", f"n{number}", *self._options, clock="system")

    def address(self, number: int) -> str:
        """Where that daemon listens."""
        return f"127.0.0.{number}:{self.port}"

    def peers(self, number: int) -> dict[str, Any]:
        """What that daemon says of the cluster."""
        with self.daemons[number].client() as client:
            return client.peers()

    def see(self, asked: Sequence[int], members: Sequence[int], seconds: float = 30.0) -> None:
        """Wait until these daemons know these members."""
        wanted = sorted(self.address(number) for number in members)

        def known(number: int) -> bool:
            return sorted(peer["address"] for peer in self.peers(number)["peers"]) == wanted

        wait_until(lambda: all(map(known, asked)), f"{asked} know {members}", seconds)

    def ask(self, limit: Limit, times: int) -> list[Decision]:
        """Ask of one key that often, all daemons at once."""

        def one(client: Client) -> list[Decision]:
            return [client.hit(limit, "shared") for _ in range(times // len(self.daemons))]

        clients = [daemon.client() for daemon in self.daemons.values()]
        try:
            with ThreadPoolExecutor() as pool:
                return [decision for part in pool.map(one, clients) for decision in part]
        finally:
            for client in clients:
                client.close()

    def answer_as_one(self, name: str) -> None:
        """One limit, asked for three times as often through all, admits exactly as many as it says."""
        decisions = self.ask(Limit(name, 60, per="1d"), 180)
        assert [decision.error for decision in decisions if decision.error] == []
        assert sum(map(bool, decisions)) == 60
        assert len({decision.owner for decision in decisions}) == 1

    def kill(self) -> None:
        """End all."""
        for daemon in self.daemons.values():
            daemon.kill()


class DnsServer:
    """A dnsmasq that knows `peers.test` and the services of `_sidegate._tcp.peers.test`, and nothing else."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self._options = options
        self._hosts = folder / "hosts"
        self._hosts.write_text("")
        self.start()

    def start(self) -> None:
        """Start (again) and wait until it answers."""
        self._process = subprocess.Popen(
            [
                *("dnsmasq", "--keep-in-foreground", f"--port={self.port}", "--listen-address=127.0.0.1"),
                *("--bind-interfaces", "--no-resolv", "--no-hosts", "--conf-file=/dev/null", "--pid-file="),
                *(f"--addn-hosts={self._hosts}", "--local=/test/", "--local-ttl=1", "--log-facility=-", *self._options),
                # Whoever runs the tests; it would change to a user who may not read the file.
                *(("--user=root", "--group=root") if os.getuid() == 0 else ()),
            ],
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers, "the DNS server answers")

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the DNS server has ended"
        query = bytes.fromhex("0001010000010000000000000470656572047465737400000100 01".replace(" ", ""))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.settimeout(0.2)
            try:
                asked.sendto(query, ("127.0.0.1", self.port))
                return bool(asked.recv(512))
            except OSError:
                return False

    def tell(self, *numbers: int) -> None:
        """From now on these addresses stand behind the name."""
        lines = [f"127.0.0.{number} peers.test\n127.0.0.{number} n{number}.test\n" for number in numbers]
        new = self._hosts.with_suffix(".new")
        new.write_text("".join(lines))
        new.rename(self._hosts)
        self.send(signal.SIGHUP)

    def send(self, number: int) -> None:
        """A signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it whatever state it is in."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
        self._process.wait()


@pytest.fixture
def dns(short_path: Path) -> Iterator[Callable[..., DnsServer]]:
    """Starts DNS servers."""
    if shutil.which("dnsmasq") is None:
        if os.environ.get("CI"):
            pytest.fail("dnsmasq is missing")
        pytest.skip("dnsmasq is missing: install dnsmasq-base to test discovery by DNS")
    servers: list[DnsServer] = []

    def start(*options: str) -> DnsServer:
        servers.append(DnsServer(short_path, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def found(short_path: Path) -> Iterator[Callable[..., Found]]:
    """Makes groups of daemons."""
    groups: list[Found] = []

    def make(*options: str) -> Found:
        groups.append(Found(short_path, *options))
        return groups[-1]

    yield make
    for group in groups:
        group.kill()


def test_daemons_found_by_dns(dns: Callable[..., DnsServer], found: Callable[..., Found]) -> None:
    """Three answer as one, follow a scale-up and a scale-down within two seconds, and keep limiting while the DNS
    server stands still, is gone, or says that there is no such name; then they follow it again."""
    server = dns()
    server.tell(2, 3, 4)
    group = found("--discovery", "dns", "--dns-server", f"127.0.0.1:{server.port}")
    group._options += ("--dns-names", f"peers.test:{group.port}")
    group.start(2, 3, 4)
    group.see([2, 3, 4], [2, 3, 4])
    told = group.peers(2)["discovery"]
    assert (told["source"], told["state"], told["why"], told["provisional"]) == ("dns", "current", "", False)
    assert told["age_ms"] < 2_000
    group.answer_as_one("all")
    server.tell(2, 3)
    group.see([2, 3], [2, 3], FOLLOWED)
    # The one that was taken out adds itself, and says that it is not there.
    group.see([4], [2, 3, 4])
    wait_until(lambda: group.peers(4)["discovery"]["provisional"], "it is provisional")
    server.tell(2, 3, 4)
    group.see([2, 3, 4], [2, 3, 4], FOLLOWED)
    server.tell()
    wait_until(lambda: all(group.peers(n)["discovery"]["state"] == "away" for n in (2, 3, 4)), "the name is gone")
    assert "peers.test" in group.peers(2)["discovery"]["why"]
    group.answer_as_one("no such name")
    server.send(signal.SIGSTOP)
    group.answer_as_one("black hole")
    server.kill()
    group.answer_as_one("gone")
    assert sorted(peer["address"] for peer in group.peers(2)["peers"]) == [group.address(n) for n in (2, 3, 4)]
    for daemon in group.daemons.values():
        # One line for each reason, however often it was tried.
        assert 1 <= len(daemon.events("discovery_away")) <= 3
        assert next(event["joined"] for event in daemon.events("ring_changed"))
    server.start()
    server.tell(2, 3, 4)
    wait_until(lambda: group.peers(2)["discovery"]["state"] == "current", "the server is heard again", 60)
    wait_until(lambda: group.daemons[2].events("discovery_back"), "it is told", 15)


def test_daemons_found_by_services(dns: Callable[..., DnsServer], found: Callable[..., Found]) -> None:
    """SRV records name them and their ports; the targets' addresses are looked up."""
    group = found("--discovery", "dns", "--dns-names", "_sidegate._tcp.peers.test")
    srv = [f"--srv-host=_sidegate._tcp.peers.test,n{number}.test,{group.port}" for number in (2, 3, 4)]
    server = dns(*srv)
    server.tell(2, 3, 4)
    group._options += ("--dns-server", f"127.0.0.1:{server.port}")
    group.start(2, 3, 4)
    group.see([2, 3, 4], [2, 3, 4])
    assert sorted(peer["name"] for peer in group.peers(2)["peers"]) == [f"n{n}.test:{group.port}" for n in (2, 3, 4)]
    group.answer_as_one("services")


def test_an_answer_too_long_for_udp_is_whole(dns: Callable[..., DnsServer]) -> None:
    """Sixty addresses come by TCP."""
    server = dns()
    server.tell(*range(2, 62))
    lookup = Lookup(("127.0.0.1", server.port))
    wait_until(lambda: _found(lookup, "peers.test"), "the addresses are there")
    assert len(asyncio.run(lookup.addresses("peers.test")).found) == 60
    with pytest.raises(LookupFailed, match=r"nobody\.test\.? does not exist"):
        asyncio.run(lookup.addresses("nobody.test"))
    with pytest.raises(LookupFailed, match=r"peers\.test has no SRV record"):
        asyncio.run(lookup.services("peers.test"))


def _found(lookup: Lookup, host: str) -> bool:
    try:
        return bool(asyncio.run(lookup.addresses(host)).found)
    except LookupFailed:
        return False


def test_resolv_conf_is_read_at_each_question(short_path: Path) -> None:
    """A file that is missing or names no server is a reason; one that changes is followed."""
    conf = short_path / "resolv.conf"
    lookup = Lookup(conf=str(conf))
    for content in (None, "# no server\n"):
        if content is not None:
            conf.write_text(content)
        with pytest.raises(LookupFailed, match=str(conf)):
            asyncio.run(lookup.addresses("peers.test"))
    for server in ("127.0.0.8", "127.0.0.9"):
        conf.write_text(f"nameserver {server}\n")
        assert asyncio.run(lookup._resolver()).nameservers == [server]


def test_daemons_found_by_a_file(short_path: Path, found: Callable[..., Found]) -> None:
    """Three answer as one, follow the file within two seconds without a signal, and keep limiting while it is away or
    wrong, which is told; SIGHUP reads it at once, and refuses all settings with it while it is wrong."""
    file = short_path / "peers"
    group = found("--peers-file", str(file))

    def write(*numbers: int) -> None:
        new = file.with_suffix(".new")
        new.write_text("# the hosts\n" + "".join(f"{group.address(number)}\n" for number in numbers))
        new.rename(file)

    write(2, 3, 4)
    group.start(2, 3, 4)
    group.see([2, 3, 4], [2, 3, 4])
    assert group.peers(2)["discovery"]["source"] == "static"
    group.answer_as_one("all")
    write(2, 3)
    group.see([2, 3], [2, 3], FOLLOWED)
    # As with a list: who is not in it says so, and serves by itself.
    wait_until(lambda: group.daemons[4].events("not_among_peers"), "it is told")
    write(2, 3, 4)
    group.see([2, 3, 4], [2, 3, 4], FOLLOWED)
    file.write_text("nonsense")
    wait_until(lambda: group.peers(2)["discovery"]["state"] == "away", "the mistake is seen")
    assert "'nonsense' is not host:port" in group.peers(2)["discovery"]["why"]
    group.daemons[2].process.send_signal(signal.SIGHUP)
    wait_until(lambda: group.daemons[2].events("reload_failed"), "the reload is refused")
    assert "nonsense" in group.daemons[2].events("reload_failed")[0]["reason"]
    file.unlink()
    group.answer_as_one("gone")
    write(2, 3)
    group.daemons[2].process.send_signal(signal.SIGHUP)
    group.see([2], [2, 3], FOLLOWED)
    write(2, 3, 4)
    group.see([2, 3, 4], [2, 3, 4], FOLLOWED)
    assert len(group.daemons[2].events("discovery_back")) == 1


def _status(port: int) -> tuple[int, str]:
    with socket.create_connection(("127.0.0.1", port), 5) as asked:
        asked.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        answer = b""
        while part := asked.recv(4096):
            answer += part
    return int(answer.split(b" ", 2)[1]), answer.decode().rpartition("\r\n")[2]


def test_a_daemon_starts_while_its_source_is_away(short_path: Path, found: Callable[..., Found]) -> None:
    """It answers clients at once, as a provisional ring of one; it is not ready for at most five seconds, and then is;
    when the source comes up, it follows."""
    port = free_port()
    group = found("--peers-file", str(short_path / "peers"), "--http", f"127.0.0.1:{port}")
    group.start(2)
    status, body = _status(port)
    assert (status, "not known yet" in body) == (503, True)
    with group.daemons[2].client() as client:
        decision = client.hit(Limit("early", 2, per="1d"), "k")
        assert decision
        assert decision.owner == "n2"
    told = group.peers(2)
    assert not told["peers"]
    assert (told["discovery"]["state"], told["discovery"]["provisional"]) == ("away", True)
    assert told["discovery"]["age_ms"] is None
    command = [sys.executable, "-m", "sidecar", "peers", "--socket", group.daemons[2].socket]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=30)
    assert done.returncode == 0
    assert done.stdout.startswith("by static: away, never heard, provisional (")
    wait_until(lambda: _status(port)[0] == 200, "it is ready", 7)
    assert len(group.daemons[2].events("ring_provisional")) == 1
    (short_path / "peers").write_text(f"{group.address(2)},{group.address(3)}")
    group.see([2], [2, 3], FOLLOWED)
    wait_until(lambda: not group.peers(2)["discovery"]["provisional"], "it has heard")
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=30)
    assert "by static: current, heard " in done.stdout
    assert group.address(3) in done.stdout


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--discovery", "dns"), "dns_names: "),
        (("--dns-names", "a:1"), "dns_names: "),
        (("--discovery", "dns", "--dns-names", "a:1", "--peers", "b:1"), "peers: "),
        (("--discovery", "dns", "--dns-names", "a:1", "--peers-file", "/x"), "peers_file: "),
        (("--peers", "b:1", "--peers-file", "/x"), "peers_file: "),
        (("--peers-file", "/x", "--listen", "off"), "listen: "),
        (("--discovery", "dns", "--dns-names", "a:1", "--listen", "0.0.0.0:1051"), "advertise: "),
        (("--discovery", "dns", "--dns-names", "a:1", "--listen", "unix:/x"), "advertise: "),
        (("--discovery", "dns", "--dns-names", "a:1", "--dns-server", "a:53"), "--dns-server: "),
        (("--discovery", "dns", "--dns-names", "a:1", "--dns-min-interval", "60000"), "dns_min_interval: "),
    ],
)
def test_settings_that_do_not_go_together_stop_the_start(short_path: Path, options: Sequence[str], why: str) -> None:
    """One line that names the setting, exit status 2."""
    words = [sys.executable, "-m", "sidecar", "serve", "--socket", str(short_path / "s"), "--http", "off"]
    listen = () if "--listen" in options else ("--listen", f"127.0.0.1:{free_port()}")
    command = [*words, *listen, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=30)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert why in line
