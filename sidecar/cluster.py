"""This node among its peers: its listener, its links, and the ring it routes by.

Decides when a new set of members takes effect.  Knows no discovery: the set is handed to `follow`.  Loaded only by a
daemon that listens, since gRPC costs 20 MiB.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

# gRPC's own lines on standard error are no part of our log; what they tell comes as exceptions too.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
if int(version("grpcio").split(".")[1]) <= 85:  # a release that knows them no more would say so on standard error
    # Sockets are polled by the thread that waits for their events, not handed there by a thread of gRPC's event engine:
    # one wake-up less each way, two thirds of a stream's round trip and of its CPU time (benchmarks/README.md).
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

from cluster_link.errors import CannotListen
from cluster_link.membership import Peer, change, find, parse_peers
from cluster_link.peer_client import Codec, PeerClient, Settings
from cluster_link.peer_pool import PeerPool
from cluster_link.peer_server import PeerServer
from cluster_link.ring import Ring
from cluster_link.tls import Tls
from sidecar.calendar import Calendar
from sidecar.config import UNIX, Config, time_zone
from sidecar.forward import FALLBACKS, Deadlines
from sidecar.replica import Counters, Replicas
from sidecar.router import Router
from sidecar.service import Service
from sidecar.socketfile import SocketFile, SocketUnavailable
from sidecar.sync import GlobalSync
from sidecar.table import Table
from sidecar.wire import VERSIONS, Op, Outcome, Packer, open_answer

if TYPE_CHECKING:
    from cluster_link.certificates import Certificates
    from cluster_link.discovery.source import Standing

_FALLBACK_BUCKETS = 100_000
_CHECK, _PING = int(Op.CHECK), int(Op.PING)


class Cluster:
    """The links of one daemon.

    report: told of trouble that may repeat; log: of changes.  services: what else is served where peers call, see
    PeerServer.  certificates: those of TLS; None: all is plain text.
    me: this daemon as its source of members names it, in which case a set without it says that it is leaving; None:
    members are a list, where it looks for itself by its address and its node's name.
    """

    def __init__(
        self,
        config: Config,
        service: Service,
        now: Callable[[], int],
        report: Any,
        log: Any,
        services: Sequence[Callable[[Any], None]] = (),
        certificates: Certificates | None = None,
        me: Peer | None = None,
    ) -> None:
        self._me = me
        self.standing: Standing | None = None
        self._config = config
        self._service = service
        self._now = now
        self._log = log
        self._settings = Settings(
            limit=config.batch_limit,
            wait=config.batch_wait / 1000,
            max_queue=config.peer_queue,
            timeout=config.peer_timeout / 1000,
        )
        trace = None if service.tracing is None else service.tracing.forwarded
        codecs = [_codec(Packer(config.node, version)) for version in VERSIONS]
        self._tls = None if certificates is None else Tls(certificates, config.tls_server_name)
        self._pool = PeerPool(codecs, self._settings, report, trace, self._tls)
        self._server = PeerServer(
            lambda batch: service.answer_peer(batch, now()), services, self._tls, config.max_connections
        )
        self._socket_file: SocketFile | None = None
        # Shares of limits whose owner is away are counted apart, so that they never mix with owned buckets.
        calendar = Calendar(time_zone(config.time_zone))
        self._fallback_table = Table(min(config.max_buckets, _FALLBACK_BUCKETS), config.max_clock_skew, calendar)
        self._replicas = Replicas(config.max_replicas, config.max_clock_skew, calendar)
        self._sync = GlobalSync(self._replicas, now, service.table, self._owner, self._pool.client, report)
        self._syncing: asyncio.Task[None] | None = None
        self._members: frozenset[Peer] = frozenset()
        self._router: Router | None = None
        self._fallback = FALLBACKS[config.fallback]
        self._changing = asyncio.Lock()
        loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(loop.call_later, loop.time)
        service.peers = self._facts

    async def start(self) -> None:
        """Listen; raises CannotListen."""
        config = self._config
        if not config.listen.startswith(UNIX):
            await self._server.start(config.listen)
            return
        try:
            path = config.listen.removeprefix(UNIX)
            self._socket_file = place = SocketFile(path, config.socket_mode, config.socket_group, 1)
            await self._server.start(UNIX + place.temporary)
            place.give_way()
        except SocketUnavailable as error:
            raise CannotListen("listen", config.listen, str(error)) from None

    async def follow(self, members: frozenset[Peer]) -> None:
        """Route by this set of members from now on: requests under way finish, new ones follow the new ring.

        An empty set is a daemon that is alone.
        """
        async with self._changing:
            (await self.prepare(members))()

    async def prepare(self, members: frozenset[Peer]) -> Callable[[], None]:
        """The same in two steps: what may take a while is done now, and the call that comes back makes the change."""
        if not members and not self._members:
            return lambda: None
        given, me = members, self._find_me(members)
        if me is None:
            me = Peer(self.address, self.address)
            members = frozenset({me})
        given_me = self._me is not None or me in given
        # Off the loop, since a thousand peers take a while; the swap itself is one assignment.
        ring = None if members == self._members else await asyncio.to_thread(Ring, members, rest=lambda: time.sleep(0))

        def swap() -> None:
            if given and self._syncing is None:
                self._syncing = asyncio.get_running_loop().create_task(self._keep_in_step())
            if given and not given_me:
                self._log.warning(
                    "not_among_peers", advertise=self.address, node=self._config.node, peers=_names(given)
                )
            if ring is not None:
                self._swap(me, members, ring)

        return swap

    def _swap(self, me: Peer, members: frozenset[Peer], ring: Ring) -> None:
        changed = change(self._members, members)
        self._members = members
        self._router = None if members == {me} else self._route(me, ring)
        self._service.route_by(self._router)
        self._pool.keep(members - {me})
        self._log.info(
            "ring_changed",
            members=len(members),
            joined=_names(changed.joined),
            left=_names(changed.left),
            moved=_names(changed.moved),
        )

    def fall_back_by(self, policy: str) -> None:
        """Answer by this policy (a key of FALLBACKS) where an owner gives no answer, requests under way included."""
        self._fallback = FALLBACKS[policy]
        if self._router is not None:
            self._router.fallback = self._fallback

    def secure_by(self, certificates: Certificates, server_name: str) -> None:
        """Use these from now on: links go on over new connections, and lose no request for it."""
        if self._tls is not None and self._tls.use(certificates, server_name):
            self._pool.renew()

    async def stop(self, grace: float) -> None:
        """Finish what is under way within `grace` seconds, both ways."""
        if self._syncing is not None:
            self._syncing.cancel()
        self._sync.flush()
        if self._socket_file is not None:
            self._socket_file.remove()
        await asyncio.gather(self._pool.close(grace), self._server.stop(grace))
        if self._socket_file is not None:
            self._socket_file.release()

    async def _keep_in_step(self) -> None:
        """Every interval, tell owners what replicas admitted."""
        while True:
            await asyncio.sleep(self._config.global_sync_interval / 1000)
            if self._replicas.due:
                self._sync.flush()

    def _owner(self, name: str, unique_key: str) -> Peer | None:
        return self._router.owner(name, unique_key) if self._router is not None else None

    def sweep(self, budget: int) -> None:
        """Forget ended buckets of fallbacks and replicas."""
        self._replicas.sweep(self._now(), budget)
        if len(self._fallback_table):
            self._fallback_table.sweep(self._now(), budget)

    @property
    def address(self) -> str:
        """Where peers reach this node; a path, if it listens on one and advertises nothing."""
        if self._me is not None:
            return self._me.address
        return self._config.advertise or self._config.listen

    def _find_me(self, members: frozenset[Peer]) -> Peer | None:
        if self._me is not None:
            # By name first: an address may be another's that went a moment ago.
            found = next((peer for peer in members if peer.name == self._me.name), None)
            found = found or find(members, "", self._me.address) or self._me
            if found.address == self._me.address or self.standing is None or self.standing.listed:
                return found
            # Our name is another daemon's by right: what falls to it is that one's to decide, and nothing is ours.
            return Peer("", self.address)
        return listed(members, self._config)

    def _route(self, me: Peer, ring: Ring) -> Router:
        return Router(
            me,
            ring,
            self._pool.client,
            self._sync,
            self._deadlines,
            self._service.decide_here,
            self._decide_alone,
            self._fallback,
            self._settings.timeout,
            self._service.tally,
        )

    def _decide_alone(self, request: Sequence[Any]) -> Any:
        return self._fallback_table.decide(self._now(), request)

    @property
    def peers(self) -> list[Peer]:
        """All daemons of the cluster, this one too; none if it is alone."""
        return sorted(self._members)

    @property
    def links(self) -> list[PeerClient]:
        """The link to each peer that has been asked."""
        return self._pool.clients()

    @property
    def replicas(self) -> Counters:
        """What has become of GLOBAL's replicas and of what they admitted."""
        return self._replicas.counters

    @property
    def reports(self) -> int:
        """Messages to owners about what replicas admitted."""
        return self._sync.reports

    @property
    def away(self) -> list[str]:
        """Names of the peers that do not answer."""
        return sorted(client.peer.name for client in self._pool.clients() if client.state == "away")

    @property
    def why_away(self) -> list[str]:
        """Why each of the peers that do not answer is away."""
        return [client.failure for client in self._pool.clients() if client.failure]

    def _facts(self) -> dict[str, object]:
        if not self._members:
            return {} if self.standing is None else {"discovery": self._heard(self.standing), "peers": []}
        links = {client.peer.name: client for client in self._pool.clients()}
        router = self._router
        me = self._find_me(self._members)
        return {
            "me": self.address,
            **({} if self.standing is None else {"discovery": self._heard(self.standing)}),
            "forwarded": router.forwarded if router else 0,
            "fallbacks": router.fallbacks if router else 0,
            "global": {"reports": self._sync.reports, **self._replicas.counters._asdict()},
            "peers": [
                {
                    "name": peer.name,
                    "address": peer.address,
                    "node": self._config.node if peer == me else links[peer.name].node if peer.name in links else "",
                    "state": "self" if peer == me else links[peer.name].state if peer.name in links else "idle",
                    "queued": links[peer.name].queued if peer.name in links else 0,
                    "batches": links[peer.name].batches if peer.name in links else 0,
                    "requests": links[peer.name].requests if peer.name in links else 0,
                    "p50_us": links[peer.name].round_trip(50) if peer.name in links else None,
                    "p99_us": links[peer.name].round_trip(99) if peer.name in links else None,
                }
                for peer in sorted(self._members)
            ],
        }

    @staticmethod
    def _heard(standing: Standing) -> dict[str, object]:
        """What is known of the source of members; ages in ms, None where there was nothing yet."""
        age, ring_age = standing.age, standing.ring_age
        return {
            "source": standing.name,
            "state": standing.state,
            "why": standing.why,
            "provisional": standing.provisional,
            "failures": standing.failures,
            "age_ms": None if age is None else round(age * 1000),
            "ring_age_ms": None if ring_age is None else round(ring_age * 1000),
        }


def listed(members: frozenset[Peer], config: Config) -> Peer | None:
    """This daemon in a list of peers: by the address it is reached at, else by its node's name."""
    address = config.advertise or config.listen
    # In the one spelling that lists are read in; no list has a path in it.
    here = parse_peers("" if address.startswith(UNIX) else address)
    return find(members, config.node, next((peer.address for peer in here), ""))


def _names(peers: frozenset[Peer]) -> list[str]:
    return sorted(peer.name for peer in peers)


def _codec(packer: Packer) -> Codec:
    """Batches are frames of the socket's protocol without their length."""

    def unpack(data: bytes) -> tuple[int, Any, str, str]:
        batch_id, outcome, payload, node = open_answer(data)
        return batch_id, payload, "" if outcome == Outcome.ANSWERED else str(payload), node

    return Codec(
        many=_CHECK,
        pack=packer.request_body,
        pack_traced=lambda batch_id, op, payload, context: packer.request_body(batch_id, op, payload, None, context),
        unpack=unpack,
        ping=lambda batch_id: packer.request_body(batch_id, _PING, None),
    )
