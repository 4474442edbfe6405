"""The daemon: rooms wired together, signals, housekeeping, drain.  The only file that knows everything.

Decides the order of starting and stopping, and when housekeeping runs.  What any room does is its own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import uvloop

from cluster_link.errors import BadCertificates, CannotListen
from cluster_link.histogram import Histogram
from cluster_link.membership import Peer, parse_peers
from sidecar.activation import passed_socket
from sidecar.calendar import Calendar
from sidecar.clock import Clock, ManualClock, SystemClock
from sidecar.config import OFF, UNIX, Config, ConfigError, time_zone
from sidecar.hot import HotKeys
from sidecar.logs import Log, Repeats, make_logger
from sidecar.notify import Manager
from sidecar.reload import Reload
from sidecar.server import BACKLOG, Server
from sidecar.service import Service
from sidecar.socketfile import SocketFile, SocketUnavailable
from sidecar.table import Table
from sidecar.tally import Tally
from sidecar.wire import VERSION

if TYPE_CHECKING:
    from sidecar.cluster import Cluster
    from sidecar.discovery import Discovery
    from sidecar.gateway.grpc_v1 import GrpcDoor
    from sidecar.gateway.http import HttpDoor
    from sidecar.gateway.v1 import V1, Standing
    from sidecar.metrics import Metrics
    from sidecar.refusals import Refusals
    from sidecar.secure import Secure

_SWEEP_SLICE = 500
"""Buckets looked at in one go: 1 to 3 ms if all of them have ended and lie all over memory."""
_SWEEP_PASS = 60.0
"""Seconds in which the whole table is looked at once, while the pauses below allow."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.1
_LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_SERVING = "answering requests"
_LISTENING = "its peers are not known yet"
_TO_HEAR = 5.0
"""Seconds that a daemon which has not heard of its peers yet calls itself unready."""
_SPARE_DESCRIPTORS = 64
_FOR_LINKS = 4_000
"""Descriptors for links, where they are to be had: a peer takes two, one each way (docs/scale.md)."""
_YOUNG_OBJECTS, _YOUNG_COLLECTIONS = 5_000, 3
"""When the cycle collector looks at young objects: Python's own 700 find most forwarded requests still under way, and
cost 4 % of the asked daemon's time; more would pause the loop for longer than a millisecond."""
_CLOCK_AHEAD_WORTH_TELLING = 1_000


class _TracingUnavailable(ConfigError):
    """Tracing is on, and what it needs is not there."""


class Daemon:
    """One running daemon.  `config` says all; `reload` gives it anew on SIGHUP.

    Whoever else can change a setting at run time adds a row to the daemon's own `reload`.
    refusals: what becomes of handshakes that fail; None: nobody hears of them.
    """

    def __init__(
        self,
        config: Config,
        log: Log,
        reload: Callable[[], Config] | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        self._config = config
        self._cluster: Cluster | None = None
        self._discovery: Discovery | None = None
        self._grpc: GrpcDoor | None = None
        self._http: HttpDoor | None = None
        self._http_file: SocketFile | None = None
        self._secure: Secure | None = None
        self._refusals = refusals
        self._unready = "starting"
        self._stop_tracing: Callable[[float], Awaitable[None]] | None = None
        self._log = log
        self._manager = Manager(os.environ, log.warning)
        self.reload = Reload(config, reload or (lambda: config), log, self._tell_reading)
        # The first, so that what is told of the other changes is told at the new level.
        self.reload.add(("log_level",), self._prepare_log_level)
        self.reload.add(("fallback",), self._prepare_fallback)
        self.reload.add(("peers",), self._prepare_peers)
        self.reload.add((), self._prepare_peers_file)
        self.reload.add(("tls_ca", "tls_cert", "tls_key", "tls_server_name"), self._prepare_tls)
        self._started = time.monotonic()
        self._repeats = Repeats(log, time.monotonic)
        self._clock: Clock = (
            SystemClock() if config.clock == "system" else ManualClock(int(config.clock.partition(":")[2]))
        )
        self._table = Table(config.max_buckets, config.max_clock_skew, Calendar(time_zone(config.time_zone)))
        self._service = Service(self._table, self._clock, config.node, self._facts, Tally(config.metric_names))
        self._lag = Histogram(_LAGS)
        self._hot: HotKeys | None = None
        if config.hot_keys:
            self._hot = HotKeys(config.hot_keys, time.monotonic(), random.random)
            self._service.count_hot(self._hot, time.monotonic)
        self._server = Server(
            self._service.answer,
            self._service.answer_again,
            self._clock.now,
            self._service.pack,
            self._repeats,
            max_connections=config.max_connections,
            max_frame=config.max_frame,
            stall_timeout=config.stall_timeout / 1000,
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; raises SocketUnavailable, CannotListen, BadCertificates."""
        config, log = self._config, self._log
        self._raise_descriptor_limit()
        socket_file = passed_socket(os.environ, os.getpid(), log.warning) or SocketFile(
            config.socket, config.socket_mode, config.socket_group, BACKLOG
        )
        try:
            stop = asyncio.Event()
            self._catch_signals(stop, socket_file.remove)
            asyncio.get_running_loop().set_exception_handler(self._report_loop_error)
            self._switch_tls_on()
            v1 = self._make_v1()
            await self._open_http(v1)
            cluster = await self._join(v1)
            await self._server.start(socket_file.socket)
            keep_collector_off_the_table()
            await self._tell_standing("" if self._discovery is None else _LISTENING)
            log.info(
                "daemon_ready",
                socket=socket_file.path,
                listen=config.listen,
                http=config.http,
                node=config.node,
                version=release(),
                pid=os.getpid(),
                max_buckets=config.max_buckets,
                clock=config.clock,
                time_zone=config.time_zone,
            )
            self._manager.ready(_SERVING)
            self.reload.start()
            housekeeping = [
                asyncio.create_task(work)
                for work in (self._sweep(), self._keep_house(), self._watch_certificates(), self._await_members())
            ]
            # To the end: a manager's watchdog may run on while the daemon drains.
            alive = asyncio.create_task(self._tell_alive())
            await stop.wait()
            self.reload.stop()
            self._manager.stopping()
            await self._tell_standing("draining")
            log.info("daemon_draining", connections=len(self._server.connections), grace_ms=config.grace)
            for task in housekeeping:
                task.cancel()
            if self._discovery is not None:
                await self._discovery.leave()
            # Removed before draining: from now on a client finds no daemon, rather than one that hangs up.
            socket_file.remove()
            if self._http_file is not None:
                self._http_file.remove()
            end = asyncio.get_running_loop().time() + config.grace / 1000
            await self._server.drain(config.grace / 1000)
            if v1 is not None:
                await v1.finish(max(0.0, end - asyncio.get_running_loop().time()))
            if self._http is not None:
                await self._http.stop()
            if self._discovery is not None:
                await self._discovery.stop()
            if cluster is not None:
                await cluster.stop(min(1.0, config.grace / 1000))
            if self._refusals is not None:
                self._refusals.stop()
            if self._stop_tracing is not None:
                await self._stop_tracing(min(1.0, config.grace / 1000))
            alive.cancel()
            self._repeats.flush(everything=True)
            log.info("daemon_stopped", **self._table.counters._asdict())
        finally:
            for file in (socket_file, self._http_file):
                if file is not None:
                    file.remove()
                    file.release()

    def _switch_tls_on(self) -> None:
        """Have the doors speak TLS, if that is on; raises BadCertificates."""
        config = self._config
        if not config.tls_ca:
            return
        from sidecar.refusals import settle
        from sidecar.secure import Secure

        settle(os.environ, config.tls_min_version, self._refusals is not None)
        self._secure = Secure(config, self._log)
        if self._refusals is not None:
            self._refusals.start()

    def _make_v1(self) -> V1 | None:
        """The V1 API, if a door to it is open."""
        if self._config.listen == OFF and self._config.http == OFF:
            return None
        from sidecar.gateway.v1 import V1

        return V1(self._service, self._clock.now, self._config.node, self._standing)

    async def _open_http(self, v1: V1 | None) -> None:
        """Serve HTTP, unless that door is off; raises CannotListen."""
        config = self._config
        if v1 is None or config.http == OFF:
            return
        from sidecar.gateway.http import HttpDoor, address_of, make_app

        app = make_app(
            v1,
            self._repeats,
            self._metrics().exposition,
            max_body=config.max_frame,
            patience=config.stall_timeout / 1000,
        )
        # Calls that wait for owners have had the grace by then; the rest is a matter of writing what is there.
        self._http = HttpDoor(
            app,
            self._repeats,
            grace=min(1.0, config.grace / 1000),
            most=self._server.max_connections,
            patience=config.stall_timeout / 1000,
        )
        try:
            if config.http.startswith(UNIX):
                path = config.http.removeprefix(UNIX)
                self._http_file = SocketFile(path, config.socket_mode, config.socket_group, BACKLOG)
                await self._http.start(self._http_file.socket)
            else:
                await self._http.start(address_of(config.http), self._secure.http() if self._secure else None)
        except (OSError, SocketUnavailable) as error:
            raise CannotListen("http", config.http, str(error)) from None

    def _metrics(self) -> Metrics:
        from sidecar.metrics import Metrics, Sources

        return Metrics(
            Sources(
                tally=self._service.tally,
                table=lambda: self._table.counters,
                max_buckets=self._config.max_buckets,
                server=self._server,
                links=lambda: self._cluster.links if self._cluster is not None else (),
                replicas=lambda: self._cluster.replicas if self._cluster is not None else None,
                reports=lambda: self._cluster.reports if self._cluster is not None else 0,
                standing=lambda: self._discovery.standing if self._discovery is not None else None,
                expires=lambda: self._secure.certificates.expires.timestamp() if self._secure is not None else None,
                lag=self._lag,
                held_back=lambda: self._repeats.held_back,
                build={"version": release(), "protocol": str(VERSION), "node": self._config.node},
            )
        )

    def _standing(self) -> Standing:
        from sidecar.gateway.v1 import Standing

        cluster, config = self._cluster, self._config
        address = cluster.address if cluster is not None else config.advertise
        peers = [peer.address for peer in cluster.peers] if cluster is not None else []
        return Standing(self._unready, address, peers or [address], cluster.away if cluster is not None else [])

    async def _tell_standing(self, unready: str) -> None:
        """From now on this daemon takes requests, or does not and this is why."""
        self._unready = unready
        if self._grpc is not None:
            await self._grpc.serve(not unready)

    async def _join(self, v1: V1 | None) -> Cluster | None:
        """Listen on the gRPC port and follow the set of peers, unless that port is off."""
        config = self._config
        if v1 is None or config.listen == OFF:
            self._start_tracing()
            return None
        # Before any exporter of spans, which may bring gRPC too: how that is to run is settled there.
        from sidecar.cluster import Cluster
        from sidecar.gateway.grpc_v1 import GrpcDoor

        self._start_tracing()
        self._grpc = GrpcDoor(v1)
        certificates = None if self._secure is None else self._secure.certificates
        services = [self._grpc.add_to]
        # A list alone needs no ear for changes.
        discovered = config.discovery != "static" or bool(config.peers_file)
        me = None
        if discovered:
            from sidecar.discovery import identity

            me = identity(config, os.environ)
        config = replace(config, max_connections=self._server.max_connections)  # fewer, where descriptors are short
        cluster = Cluster(config, self._service, self._clock.now, self._repeats, self._log, services, certificates, me)
        if self._secure is not None:
            self._secure.tell(cluster.secure_by)
        await cluster.start()
        self._cluster = cluster
        if not discovered:
            await cluster.follow(parse_peers(config.peers))
        else:
            self._listen_for_members(me, cluster)
        return cluster

    def _listen_for_members(self, me: Peer | None, cluster: Cluster) -> None:
        from cluster_link.discovery.source import Standing
        from sidecar.discovery import Discovery, open_source

        standing = Standing(self._config.discovery, time.monotonic, self._repeats)
        source = open_source(self._config, me, standing, os.environ)
        self._discovery = Discovery(source, standing, cluster.follow, self._log)
        cluster.standing = standing
        self._discovery.start()

    async def _await_members(self) -> None:
        """Take requests from outside once the members are known; soon in any case, as they may be known only to a
        source that waits for this daemon to be ready, or that is down."""
        if self._discovery is None:
            return
        try:
            async with asyncio.timeout(_TO_HEAR):
                await self._discovery.known.wait()
        except TimeoutError:
            self._log.warning("ring_provisional", source=self._config.discovery)
        await self._tell_standing("")

    def _start_tracing(self) -> None:
        """Have batches followed by spans, if that is on; raises _TracingUnavailable."""
        if self._config.tracing == "off":
            return
        try:
            from sidecar.exporters import start
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("opentelemetry"):
                raise
            raise _TracingUnavailable("tracing: on needs opentelemetry-api: pip install 'sidegate[otel]'") from None
        try:
            self._service.tracing, self._stop_tracing = start(self._config.node, release(), self._repeats, self._log)
        except ConfigError as error:
            raise _TracingUnavailable(str(error)) from None

    def _tell_reading(self, begins: bool) -> None:
        if begins:
            self._manager.reloading()
        else:
            self._manager.ready(_SERVING)

    async def _tell_alive(self) -> None:
        """Have the manager's watchdog hear from the loop itself, so that a daemon that hangs is started anew."""
        while self._manager.watchdog:
            self._manager.alive()
            await asyncio.sleep(self._manager.watchdog)

    async def _prepare_fallback(self, config: Config) -> Callable[[], None] | None:
        return lambda: self._cluster.fall_back_by(config.fallback) if self._cluster is not None else None

    async def _prepare_peers(self, config: Config) -> Callable[[], None] | None:
        # With the gRPC port off at the start there is no cluster to be in.
        if self._cluster is None or self._discovery is not None:
            return None
        return await self._cluster.prepare(parse_peers(config.peers))

    async def _prepare_peers_file(self, _: Config) -> Callable[[], None] | None:
        """The content of the file that is listened to: changed with all else, or not at all."""
        path = self._config.peers_file
        if not path or self._cluster is None:
            return None
        from cluster_link.discovery.static_file import read_peers

        try:
            peers = await asyncio.to_thread(read_peers, path)
        except ValueError as error:
            raise ConfigError(f"peers_file: {error}") from None
        swap = await self._cluster.prepare(peers)

        def change() -> None:
            swap()
            if self._discovery is not None:
                self._discovery.took(peers)

        return change

    async def _prepare_tls(self, config: Config) -> Callable[[], None] | None:
        if self._secure is None:
            return (lambda: None) if not config.tls_ca else None
        return await self._secure.prepare(config)

    async def _prepare_log_level(self, config: Config) -> Callable[[], None] | None:
        return lambda: self._log.tell_from(config.log_level)

    def _facts(self) -> dict[str, object]:
        server = self._server
        return {
            "version": release(),
            "protocol": VERSION,
            "uptime_ms": int((time.monotonic() - self._started) * 1000),
            "pid": os.getpid(),
            "memory": memory(),
            "max_buckets": self._config.max_buckets,
            "connections": {
                "open": len(server.connections),
                "accepted": server.accepted,
                "refused": server.refused,
                "dropped": server.dropped,
                "bad_frames": server.bad_frames,
            },
        }

    def _report_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._repeats("loop_error", error=context.get("message", repr(error)), exc_info=error)

    async def _sweep(self) -> None:
        """Forget ended buckets, a slice at a time: often while that finds many, else one pass a minute."""
        loop = asyncio.get_running_loop()
        while True:
            held = len(self._table)
            pause = _LONGEST_PAUSE
            # A manual clock may be set back; what a sweep had forgotten by real time would then be missed.
            if held and not self._clock.manual:
                forgotten = self._table.sweep(self._clock.now(), _SWEEP_SLICE)
                pause = 0 if forgotten > _SWEEP_SLICE // 4 else _SWEEP_PASS * _SWEEP_SLICE / held
            due = loop.time() + min(max(pause, _SHORTEST_PAUSE), _LONGEST_PAUSE)
            await asyncio.sleep(due - loop.time())
            self._lag.see(max(0.0, loop.time() - due))

    async def _keep_house(self) -> None:
        """Once a second: the clock, clients that stall, and what has changed that operators should know."""
        loop = asyncio.get_running_loop()
        evicted_before = 0
        while True:
            await asyncio.sleep(1)
            ahead = self._clock.adjust()
            if ahead > _CLOCK_AHEAD_WORTH_TELLING:
                self._repeats("clock_set_back", ahead_ms=ahead)
            self._server.drop_stalled(loop.time())
            if self._http is not None:
                self._http.drop_stalled(loop.time())
            if self._hot is not None:
                self._hot.renew(time.monotonic())
            counters = self._table.counters
            evicted = counters.evicted + counters.evicted_exhausted
            if evicted > evicted_before:
                evicted_before = evicted
                self._repeats(
                    "table_full",
                    max_buckets=self._config.max_buckets,
                    evicted=counters.evicted,
                    evicted_exhausted=counters.evicted_exhausted,
                )
            if self._refusals is not None:
                away = self._cluster.why_away if self._cluster is not None else []
                for why in self._refusals.due(away).elements():
                    self._repeats("tls_refused", door="grpc", reason=why)
            self._repeats.flush()
            self._manager.try_again()
            if self._cluster is not None:
                self._cluster.sweep(_SWEEP_SLICE)

    async def _watch_certificates(self) -> None:
        """Once a second, apart from all else: their files may be on a disk that does not answer."""
        while self._secure is not None:
            await asyncio.sleep(1)
            await self._secure.look()

    def _raise_descriptor_limit(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        config = self._config
        doors = 1 + (config.listen != OFF) + (config.http != OFF)
        needed = config.max_connections * doors + _SPARE_DESCRIPTORS
        wanted = needed + (_FOR_LINKS if config.listen != OFF else 0)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            if allowed < needed:
                self._server.max_connections = max(1, (allowed - _SPARE_DESCRIPTORS) // doors)
                self._log.warning("descriptors_short", limit=allowed, max_connections=self._server.max_connections)

    def _catch_signals(self, stop: asyncio.Event, remove_socket: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def caught(number: signal.Signals) -> None:
            if stop.is_set():
                remove_socket()
                self._log.warning("daemon_cut_short", signal=number.name)
                os._exit(128 + number)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, caught, number)
        loop.add_signal_handler(signal.SIGHUP, self.reload)


def serve(config: Config, reload: Callable[[], Config] | None = None) -> int:
    """Run a daemon to its end; the exit status.  reload: the settings read anew, for SIGHUP; raises ConfigError."""
    refusals = _take_refusals(config)
    log = make_logger(config.log_level, config.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Daemon(config, log, reload, refusals).run())
    except SocketUnavailable as error:
        log.error("socket_unavailable", reason=str(error), socket=config.socket)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # before the daemon could catch it: nothing was served yet
    except BadCertificates as error:
        log.error("tls_unavailable", reason=str(error))
        return 2
    except _TracingUnavailable as error:
        log.error("tracing_unavailable", reason=str(error))
        return 2
    except ConfigError as error:
        log.error("settings_unusable", reason=str(error))
        return 2
    except CannotListen as error:
        log.error("listen_failed", reason=str(error), listen=error.address)
        return 2
    finally:
        if refusals is not None:
            refusals.close()
    return 0


def _take_refusals(config: Config) -> Refusals | None:
    """Hear of handshakes that fail, where TLS is on and somebody would read of it."""
    if not config.tls_ca or config.listen == OFF or sys.stderr is None:
        return None
    from sidecar.refusals import Refusals

    return Refusals()


@cache
def release() -> str:
    """The installed release of Sidegate."""
    try:
        return version("sidegate")
    except PackageNotFoundError:
        return "unknown"


def memory() -> int:
    """Bytes of memory that this process holds (its resident set); where the system does not tell, the most it ever
    held."""
    try:
        with open("/proc/self/statm", "rb") as told:
            return int(told.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def keep_collector_off_the_table() -> None:
    """Let the cycle collector look at young objects only.

    A full collection of a million buckets stops the loop for 130 ms and frees nothing: buckets die by
    reference count.  What start-up made is frozen out of its sight.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, 1 << 30)
