"""Real clusters for tests: daemons linked over gRPC on ports of 127.0.0.1, and what can befall one of them."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

from cluster_link.membership import Peer
from cluster_link.ring import Ring
from sidecar import Client, Decision, Limit, SidegateError
from tests.daemons import DaemonProcess, wait_until

_FIRST_PORT, _PORTS_A_WORKER = 12_000, 2_500
"""Below the ports that the kernel gives away by itself, so that nobody takes a node's while it restarts."""
_used: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody else in this run is given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    while True:
        port = _FIRST_PORT + worker * _PORTS_A_WORKER + random.randrange(_PORTS_A_WORKER)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _used:
            _used.add(port)
            return port


class Node(DaemonProcess):
    """One daemon of a cluster.  name: its own; port: where it listens; peer: as the others list it."""

    def __init__(self, folder: Path, name: str, port: int, peer: Peer, peers: str, *options: str, clock: str) -> None:
        self.name = name
        self.port = port
        self.peer = peer
        self.settings = folder / "settings.toml"
        self.list_peers(peers)
        words = ("--node", name, "--listen", f"127.0.0.1:{port}", "--config", str(self.settings))
        super().__init__(folder, *words, *options, clock=clock)

    def start(self) -> None:
        """As any daemon starts; one that does not answer is ended."""
        try:
            super().start()
        except AssertionError:
            self.kill()
            raise

    def list_peers(self, peers: str) -> None:
        """Write the list of peers into the settings file; no one is told."""
        self.settings.write_text(f"peers = '{peers}'\n")

    def hang_up(self) -> None:
        """SIGHUP: read the settings again."""
        self.process.send_signal(signal.SIGHUP)

    def pause(self) -> None:
        """SIGSTOP, and wait until it stands still: a black hole that still accepts connections and bytes."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the process stands still")

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def crash(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.stop(signal.SIGKILL)

    def peers(self) -> dict[str, Any]:
        """What it says of the cluster."""
        with self.client() as client:
            return client.peers()

    def members(self) -> set[str]:
        """The names of the cluster's daemons, as this one knows them."""
        return {peer["name"] for peer in self.peers()["peers"]}

    def link(self, other: Node) -> dict[str, Any]:
        """What it says of its link to another node: state, queued, batches, requests, ..."""
        (found,) = (peer for peer in self.peers()["peers"] if peer["name"] == other.peer.name)
        return dict(found)

    def ask(self, limit: Limit, key: str, hits: int = 1) -> Decision:
        """Ask of one key; an error of its own is a decision with status ERROR, not an exception."""
        return self.ask_all(limit, [key], hits)[0]

    def ask_all(self, limit: Limit, keys: Sequence[str], hits: int = 1) -> list[Decision]:
        """The same for several keys in one frame."""
        with self.client() as client:
            return client.check([limit.request(key, hits) for key in keys])

    def left(self, limit: Limit, key: str) -> int:
        """What is left of a bucket, asked of this node."""
        decision = self.ask(limit, key, 0)
        assert not decision.error, decision
        return decision.remaining


class Cluster:
    """Linked daemons; nodes[i] is named node-<i + 1>."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.proxies: dict[int, SlowProxy] = {}
        self._ring: Ring | None = None
        self._options: tuple[str, ...] = ()
        self._clock = "system"

    def start(self, nodes: int, *options: str, clock: str = "system", slow: Iterable[int] = ()) -> None:
        """Start so many daemons at once.  options: {name} in one stands for the node's name.  slow: the numbers of
        nodes that a SlowProxy stands before."""
        self._options, self._clock = options, clock
        ports = [free_port() for _ in range(nodes)]
        for number in slow:
            self.proxies[number] = SlowProxy(ports[number])
        peers = [self._peer(number, port) for number, port in enumerate(ports)]
        with ThreadPoolExecutor(nodes) as pool:
            starting = [pool.submit(self._node, number, ports[number], peers) for number in range(nodes)]
        # Those that did start are ended by `close`, whatever became of the others.
        self.nodes += [one.result() for one in starting if one.exception() is None]
        for one in starting:
            one.result()

    def add(self) -> Node:
        """Start one more daemon, which lists all; the others are not told."""
        number, port = len(self.nodes), free_port()
        peers = [*(node.peer for node in self.nodes), self._peer(number, port)]
        self.nodes.append(self._node(number, port, peers))
        return self.nodes[-1]

    def follow(self, members: Sequence[Node], tell: Sequence[Node] | None = None) -> None:
        """Have `tell` (the members) re-read a list of these members, and wait until they route by it."""
        told = members if tell is None else tell
        for node in told:
            node.list_peers(listed(member.peer for member in members))
            node.hang_up()
        names = {member.peer.name for member in members}
        for node in told:
            wait_until(lambda node=node: node.members() == names, f"{node.name} follows the new list")  # type: ignore[misc]

    @property
    def ring(self) -> Ring:
        """The ring of all nodes started."""
        peers = frozenset(node.peer for node in self.nodes)
        if self._ring is None or self._ring.peers != peers:
            self._ring = Ring(peers)
        return self._ring

    def keys(self, owner: Node, amount: int, name: str, prefix: str = "account:") -> list[str]:
        """So many keys of the limit `name` that this node owns."""
        ring = self.ring
        every = (f"{prefix}{number}" for number in count())
        return list(islice((key for key in every if ring.owner(name, key) == owner.peer), amount))

    def owner(self, name: str, key: str) -> Node:
        """The node that owns a key."""
        peer = self.ring.owner(name, key)
        (found,) = (node for node in self.nodes if node.peer == peer)
        return found

    def connect(self, limit: Limit) -> None:
        """Open every link, by asking for a key of its own; on a busy machine the first try may be too late."""
        for node in self.nodes:
            for owner in self.nodes:
                (key,) = self.keys(owner, 1, limit.name, f"connect-{node.name}:")
                wait_until(
                    lambda node=node, owner=owner, key=key: node.ask(limit, key, 0).owner == owner.name,  # type: ignore[misc]
                    f"{node.name} asks {owner.name}",
                )

    def close(self) -> None:
        """End every daemon, whatever state it is in."""
        for node in self.nodes:
            node.kill()
        for proxy in self.proxies.values():
            proxy.close()

    def _peer(self, number: int, port: int) -> Peer:
        seen = self.proxies[number].port if number in self.proxies else port
        return Peer(f"node-{number + 1}", f"127.0.0.1:{seen}")

    def _node(self, number: int, port: int, peers: Sequence[Peer]) -> Node:
        name = f"node-{number + 1}"
        folder = self.folder / name
        folder.mkdir()
        options = [option.replace("{name}", name) for option in self._options]
        return Node(folder, name, port, peers[number], listed(peers), *options, clock=self._clock)


@contextmanager
def running_cluster(nodes: int, *options: str, **more: Any) -> Iterator[Cluster]:
    """A cluster in a folder of its own, for fixtures that several tests share."""
    folder = Path(tempfile.mkdtemp(prefix="sg-"))
    cluster = Cluster(folder)
    try:
        cluster.start(nodes, *options, **more)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def listed(peers: Iterable[Peer]) -> str:
    """Peers as an operator writes them."""
    return ",".join(f"{peer.name}={peer.address}" for peer in peers)


class Load:
    """Threads that ask without a pause longer than they must, until told to stop.

    ask: (a client, the number of this call) -> anything worth keeping.  What it returns stands in `results` with
    the instants (monotonic) before and after; a SidegateError is a result, any other exception is a failure.
    rate: calls a second of each thread.
    """

    def __init__(
        self, nodes: Sequence[Node], ask: Callable[[Client, int], object], rate: float, timeout: float = 5.0
    ) -> None:
        self.results: list[tuple[object, float, float]] = []
        self.failures: list[BaseException] = []
        self._ask = ask
        self._pause = 1 / rate
        self._over = threading.Event()
        self._numbers = count()
        self._threads = [threading.Thread(target=self._run, args=(node.client(timeout=timeout),)) for node in nodes]
        for thread in self._threads:
            thread.start()

    def _run(self, client: Client) -> None:
        with client:
            due = time.monotonic()
            while not self._over.is_set():
                start = time.monotonic()
                result: object
                try:
                    result = self._ask(client, next(self._numbers))
                except SidegateError as error:
                    result = error
                except BaseException as error:
                    self.failures.append(error)
                    return
                self.results.append((result, start, time.monotonic()))
                due = max(due + self._pause, start)
                self._over.wait(max(0.0, due - time.monotonic()))

    def since(self, instant: float) -> list[object]:
        """The results of calls that began after this instant."""
        return [result for result, start, _ in list(self.results) if start > instant]

    def stop(self) -> None:
        """Let every call end; fails if a thread had an exception that is no SidegateError."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        assert not self.failures, self.failures

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class SlowProxy:
    """Carries TCP connections to a port of 127.0.0.1, each byte `delay` seconds late on its way there and `back`
    seconds on its way back."""

    def __init__(self, target: int) -> None:
        self.delay = self.back = 0.0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._streams: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            self._streams += [near, far]
            for source, sink, late in ((near, far, lambda: self.delay), (far, near, lambda: self.back)):
                threading.Thread(target=self._carry, args=(source, sink, late), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, late: Callable[[], float]) -> None:
        waiting: deque[tuple[float, bytes]] = deque()
        ended = False
        try:
            while True:
                # What came is held while reading goes on: a delay is no bound on the rate.
                left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
                if select.select([] if ended else [source], [], [], left)[0]:
                    data = source.recv(65_536)
                    ended = not data
                    waiting.append((time.monotonic() + late(), data))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, data = waiting.popleft()
                    if not data:
                        sink.shutdown(socket.SHUT_WR)
                        return
                    sink.sendall(data)
        except (OSError, ValueError):  # a stream that was closed has no descriptor
            for stream in (source, sink):
                stream.close()

    def close(self) -> None:
        """Stop accepting and cut every connection."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in self._streams:
            try:
                stream.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            stream.close()


class Watch:
    """Listens on a port and counts who connects; hangs up on them."""

    def __init__(self, port: int) -> None:
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            stream.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
