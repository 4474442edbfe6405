"""The source etcd with a fake etcd, in which a test decides what becomes of every call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from cluster_link.discovery.etcd import Etcd, Settings
from cluster_link.discovery.etcd_keys import Pair
from cluster_link.discovery.etcd_link import Change, Credentials, EtcdError, Files
from cluster_link.discovery.source import Standing
from cluster_link.errors import BadCredentials
from cluster_link.membership import Peer
from sidecar.config import Config, ConfigError, load
from sidecar.discovery import identity, open_source
from tests.authority import Authority

ME, A = Peer("me", "10.0.0.1:1051"), Peer("a", "10.0.0.2:1051")


class Store:
    """An etcd's memory, and the connections to it.  down: endpoints that do not answer."""

    def __init__(self) -> None:
        self.pairs: dict[bytes, Pair] = {}
        self.leases: set[int] = set()
        self.revision = self.granted = 0
        self.down: set[str] = set()
        self.dialled: list[str] = []
        self.lists = 0
        self.watches: set[FakeWatch] = set()
        self.links: set[FakeLink] = set()

    def change(self, key: bytes, value: bytes | None, lease: int = 0) -> None:
        """Put or delete, and tell."""
        self.revision += 1
        pair = None if value is None else Pair(key, value, self.revision, lease)
        if pair is None:
            del self.pairs[key]
        else:
            self.pairs[key] = pair
        for watch in self.watches:
            watch.queue.put_nowait(Change(key, self.revision, pair))

    def revoke(self, lease: int) -> None:
        """End a lease and what is under it."""
        self.leases.discard(lease)
        for key in [key for key, pair in self.pairs.items() if pair.lease == lease]:
            self.change(key, None)

    def put_peer(self, peer: Peer, lease: int = 99) -> None:
        """Another daemon registers."""
        self.change(f"/p/{peer.name}".encode(), peer.address.encode(), lease)

    def break_all(self, why: str) -> None:
        """End all connections."""
        for watch in self.watches:
            watch.queue.put_nowait(why)

    def connect(self, endpoint: str, _credentials: Credentials, _timeout: float) -> FakeLink:
        self.dialled.append(endpoint)
        return FakeLink(self, endpoint)


class FakeLink:
    def __init__(self, store: Store, endpoint: str) -> None:
        self.store = store
        self._endpoint = endpoint

    async def __aenter__(self) -> FakeLink:
        if self._endpoint in self.store.down:
            raise EtcdError("it is down")
        self.store.links.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.store.links.discard(self)

    async def list(self, _span: object) -> tuple[int, Iterable[Pair]]:
        self.store.lists += 1
        return self.store.revision, list(self.store.pairs.values())

    async def grant(self, ttl: int) -> tuple[int, int]:
        self.store.granted += 1
        self.store.leases.add(self.store.granted)
        return self.store.granted, ttl

    async def put(self, key: bytes, value: bytes, lease: int, revision: int) -> bool:
        if lease not in self.store.leases:
            raise EtcdError("requested lease not found")
        found = self.store.pairs.get(key)
        if (0 if found is None else found.revision) != revision:
            return False
        self.store.change(key, value, lease)
        return True

    async def revoke(self, lease: int) -> None:
        self.store.revoke(lease)

    def keep_alive(self) -> FakeRenewals:
        return FakeRenewals(self.store)

    def watch(self) -> FakeWatch:
        return FakeWatch(self.store)


class FakeRenewals:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def __aenter__(self) -> FakeRenewals:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def renew(self, lease: int) -> bool:
        return lease in self._store.leases


class FakeWatch:
    """What is put into its queue: a change is told, "compacted" ends it, another text breaks it, an exception is
    raised."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.queue: asyncio.Queue[Change | str | Exception] = asyncio.Queue()

    async def __aenter__(self) -> FakeWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._store.watches.discard(self)

    async def begin(self, _span: object) -> None:
        self._store.watches.add(self)

    async def follow(self, _quiet: float, changed: Callable[[list[Change]], None]) -> None:
        while True:
            told = await self.queue.get()
            if told == "compacted":
                return
            if isinstance(told, str):
                raise EtcdError(told)
            if isinstance(told, Exception):
                raise told
            changed([told])


class House:
    """A source and its store.  pauses: what it slept between attempts."""

    def __init__(self, *endpoints: str) -> None:
        self.store = Store()
        self.pauses: list[float] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.credentials = Credentials
        self.standing = Standing("etcd", lambda: 0.0, lambda event, **fields: self.events.append((event, fields)))
        settings = Settings(endpoints or ("one:1",), "/p", 3_600, lambda: self.credentials())
        self.source = Etcd(settings, ME, self.standing, self.store.connect, lambda: 0.0, self.sleep)
        self.found: frozenset[Peer] = frozenset()

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    @property
    def lease(self) -> int | None:
        """What this daemon's key is under; None while there is none."""
        pair = self.store.pairs.get(b"/p/me")
        return None if pair is None else pair.lease

    def names(self, event: str) -> list[dict[str, Any]]:
        """The fields of these events."""
        return [fields for name, fields in self.events if name == event]


def lived(
    test: Callable[[House, Callable[[Callable[[], bool]], Awaitable[None]]], Awaitable[None]], *ends: str
) -> House:
    """Run a test while the source is listened to; it may wait until something is so.  At the end nothing is open."""

    async def run() -> House:
        house = House(*ends)

        async def listen() -> None:
            async with aclosing(house.source.members()) as sets:
                async for house.found in sets:
                    pass

        async def until(condition: Callable[[], bool]) -> None:
            while not condition():
                if listening.done():
                    await listening
                await asyncio.sleep(0)

        listening = asyncio.create_task(listen())
        try:
            async with asyncio.timeout(10):
                await test(house, until)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        assert not house.store.links
        assert not house.store.watches
        return house

    return asyncio.run(run())


def test_it_registers_and_follows() -> None:
    """Its key stands under its lease; who comes and goes is told."""

    async def test(house: House, until: Any) -> None:
        house.store.put_peer(A)
        await until(lambda: house.found == {ME, A} and house.standing.listed)
        assert house.store.pairs[b"/p/me"][1:] == (b"10.0.0.1:1051", 2, 1)
        house.store.revoke(99)
        await until(lambda: house.found == {ME})
        assert not house.events
        assert house.standing.state == "current"

    lived(test)


def test_servers_are_tried_in_turn_at_growing_moments() -> None:
    """Pauses double from 0.1 s to 5 s, each at a moment of its own; after a server has answered they begin anew."""

    async def test(house: House, until: Any) -> None:
        house.store.down = {"a:1", "b:1", "c:1"}
        await until(lambda: len(house.pauses) >= 12)
        house.store.down = set()
        await until(lambda: house.standing.listed)
        before = len(house.pauses)
        house.store.break_all("broken")
        await until(lambda: len(house.pauses) > before and len(house.store.watches) == 1)
        assert 0.05 <= house.pauses[before] <= 0.1

    house = lived(test, "a:1", "b:1", "c:1")
    for number, pause in enumerate(house.pauses[:12]):
        longest = min(0.1 * 2**number, 5.0)
        assert longest / 2 <= pause <= longest
    turns = house.store.dialled
    assert set(turns[:3]) == {"a:1", "b:1", "c:1"}
    assert all(turns[index] == turns[index - 3] for index in range(3, len(turns)))
    told = house.names("discovery_away")
    assert told[0]["reason"] == f"{turns[0]}: it is down"
    assert told[-1]["reason"].endswith(": broken")


def test_a_lost_lease_and_a_deleted_key_are_registered_anew() -> None:
    """Another lease where it is gone, the same one where only the key is; each is told once."""

    async def test(house: House, until: Any) -> None:
        await until(lambda: house.standing.listed)
        house.store.revoke(1)
        await until(lambda: house.standing.listed and house.lease == 2)
        house.store.change(b"/p/me", None)
        await until(lambda: house.standing.listed and house.lease is not None)
        assert house.lease == 2
        assert house.names("discovery_forgotten") == [{"source": "etcd", "key": "/p/me"}] * 2
        assert house.found == {ME}

    lived(test)


def test_the_lease_outlives_a_connection_and_an_emptied_store_does_not() -> None:
    """After a broken connection nothing is put anew; after a loss of all data everything is, and who was there before
    is kept meanwhile."""

    async def test(house: House, until: Any) -> None:
        house.store.put_peer(A)
        await until(lambda: house.standing.listed)
        house.store.break_all("broken")
        await until(lambda: len(house.store.dialled) == 2 and house.standing.state == "current")
        assert house.store.granted == 1
        house.store.pairs.clear()
        house.store.leases.clear()
        house.store.revision = 0
        house.store.break_all("broken")
        await until(lambda: house.standing.listed and house.lease is not None)
        assert house.store.granted == 2
        assert house.found == {ME, A}

    lived(test)


def test_after_a_compaction_the_keys_are_listed_again() -> None:
    """In the same connection, after a pause, with what was missed meanwhile."""

    async def test(house: House, until: Any) -> None:
        await until(lambda: house.standing.listed)
        (watch,) = house.store.watches
        house.store.watches.clear()
        house.store.put_peer(A)
        watch.queue.put_nowait("compacted")
        await until(lambda: house.found == {ME, A})
        assert house.store.lists == 2
        assert len(house.pauses) == 1
        assert len(house.store.dialled) == 1
        assert not house.events

    lived(test)


def test_what_was_listed_already_is_not_told_again() -> None:
    """A change that the list knew comes late from the watch, which began before: it does not undo a newer one."""

    async def test(house: House, until: Any) -> None:
        house.store.put_peer(A)
        await until(lambda: house.standing.listed)
        (watch,) = house.store.watches
        watch.queue.put_nowait(Change(b"/p/a", 1, None))
        house.store.put_peer(Peer("b", "10.0.0.3:1051"))
        await until(lambda: len(house.found) >= 3)
        assert A in house.found

    lived(test)


def test_a_key_of_a_life_before_is_taken_over_and_another_daemons_is_not() -> None:
    """The same name at the same address is what this daemon was before it was killed; at another address it is told,
    once, and waited for."""

    async def before(house: House, until: Any) -> None:
        house.store.put_peer(ME, lease=55)
        await until(lambda: house.standing.listed and house.lease == 1)
        assert not house.events

    lived(before)

    async def taken(house: House, until: Any) -> None:
        other = Peer("me", "10.0.0.9:1051")
        house.store.put_peer(other, lease=55)
        await until(lambda: bool(house.names("discovery_name_taken")))
        house.store.put_peer(A)
        await until(lambda: house.found == {other, A})
        assert not house.standing.listed
        house.store.break_all("broken")
        await until(lambda: len(house.store.dialled) == 2 and house.standing.state == "current")
        house.store.revoke(55)
        await until(lambda: house.standing.listed and ME in house.found)
        assert house.names("discovery_name_taken") == [{"source": "etcd", "peer": "me", "address": other.address}]

    lived(taken)


def test_who_takes_our_name_and_address_is_not_fought() -> None:
    """Two daemons that both were told one name and one address do not put the key in turns."""

    async def test(house: House, until: Any) -> None:
        await until(lambda: house.standing.listed)
        house.store.put_peer(ME, lease=55)
        await until(lambda: bool(house.names("discovery_name_taken")))
        house.store.put_peer(A)
        await until(lambda: house.found == {ME, A})
        assert house.lease == 55
        house.store.revoke(55)
        await until(lambda: house.lease == 1)

    lived(test)


def test_leaving_revokes_the_lease_and_registers_no_more() -> None:
    """The set then goes on without this daemon; where there is no connection, leaving is silent."""

    async def test(house: House, until: Any) -> None:
        house.store.put_peer(A)
        await until(lambda: house.standing.listed)
        await house.source.leave()
        assert b"/p/me" not in house.store.pairs
        assert not house.store.leases
        await until(lambda: house.found == {A})
        house.store.break_all("broken")
        await until(lambda: len(house.store.watches) == 1 and house.standing.state == "current")
        assert b"/p/me" not in house.store.pairs
        house.store.down = {"one:1"}
        house.store.break_all("broken")
        await until(lambda: house.standing.state == "away")
        await house.source.leave()
        assert not house.names("discovery_forgotten")

    lived(test)


def test_bad_files_are_a_reason_and_a_fault_of_ours_is_raised() -> None:
    """A file that cannot be read at a later connection is tried again like a server that is down; what nobody foresaw
    ends the listening, and whoever listens tells it."""

    async def bad(house: House, until: Any) -> None:
        await until(lambda: house.standing.listed)

        def missing() -> Credentials:
            raise BadCredentials("etcd_ca: /x: is missing")

        house.credentials = missing  # type: ignore[assignment]
        house.store.break_all("broken")
        await until(lambda: "etcd_ca: /x: is missing" in house.standing.why)
        house.credentials = Credentials
        await until(lambda: house.standing.state == "current")

    lived(bad)

    async def fault(house: House, until: Any) -> None:
        await until(lambda: house.standing.listed)
        for watch in house.store.watches:
            watch.queue.put_nowait(ZeroDivisionError("a fault"))
        await until(lambda: False)

    with pytest.raises(ZeroDivisionError):
        lived(fault)


# --- Settings

ETCD = {"discovery": "etcd", "etcd_endpoints": "127.0.0.1:2379", "listen": "10.0.0.1:1051"}


def config(**values: str) -> Config:
    """The settings of a daemon that asks etcd."""
    return load({**ETCD, **values}, {})[0]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"etcd_endpoints": None}, "etcd_endpoints: is missing; discovery etcd needs to know where etcd is"),
        ({"etcd_endpoints": "https://h:1"}, "--etcd-endpoints: must be host:port, comma separated, without a scheme"),
        ({"etcd_endpoints": "h:1,,h:2"}, "--etcd-endpoints: must be host:port, comma separated"),
        ({"etcd_endpoints": "h"}, "--etcd-endpoints: must be host:port, comma separated"),
        ({"etcd_prefix": "//"}, "--etcd-prefix: must be 1 to 1000 printable characters"),
        ({"etcd_ttl": "2"}, "--etcd-ttl: must be an integer from 3 to 3600"),
        ({"etcd_user": "u"}, "etcd_password_file: is missing; a user takes"),
        ({"etcd_password_file": "/p"}, "etcd_user: is missing; a user takes"),
        ({"etcd_ca": "/ca", "etcd_cert": "/c"}, "etcd_key: is missing; a certificate takes"),
        ({"etcd_ca": "/ca", "etcd_key": "/k"}, "etcd_cert: is missing; a certificate takes"),
        ({"etcd_cert": "/c", "etcd_key": "/k"}, "etcd_ca: is missing; it switches TLS on"),
        ({"peers": "h:1"}, "peers: are told by etcd"),
        ({"listen": "off"}, "listen: a daemon with peers cannot have it off"),
        ({"listen": "unix:/x"}, "advertise: is missing; peers cannot reach the path"),
        ({"listen": "0.0.0.0:1051"}, "advertise: must be the address that peers reach this daemon at"),
        ({"listen": "[::]:1051"}, "advertise: must be the address that peers reach this daemon at"),
        ({"advertise": "h h:1"}, "--advertise: must be host:port"),
        ({"advertise": "a/b:1"}, "advertise: peers need it as an address, but"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_cannot_be_used_are_named(values: dict[str, str | None], line: str) -> None:
    """One line each, at the start and by `sidegate config --check`."""
    with pytest.raises(ConfigError) as caught:
        load({**ETCD, **values}, {})
    assert str(caught.value).startswith(line)


def test_who_it_is_and_where_it_looks() -> None:
    """It is `node` at `advertise`, in the one spelling of addresses; a prefix loses its last slash."""
    read = config(etcd_endpoints="a:1, b:2", etcd_prefix="/x/y/", node="n", advertise="Host:01051")
    assert (read.etcd_endpoints, read.etcd_prefix) == ("a:1,b:2", "/x/y")
    assert identity(read, {}) == Peer("n", "host:1051")
    assert identity(config(node="n"), {}) == Peer("n", "10.0.0.1:1051")


def test_what_files_hold(tmp_path: Path) -> None:
    """They are read at the start, where a bad one is a refusal that names it, and anew for each connection."""
    authority = Authority()
    pair = authority.issue()
    paths = {name: tmp_path / name for name in ("ca", "cert", "key", "password", "junk", "empty")}
    paths["ca"].write_bytes(authority.pem)
    paths["cert"].write_bytes(pair.cert)
    paths["key"].write_bytes(pair.key)
    paths["password"].write_text(" pass word\n")
    paths["junk"].write_bytes(b"\xff")
    paths["empty"].write_text("\n")
    names = {name: str(path) for name, path in paths.items()}
    files = Files(names["ca"], names["cert"], names["key"], "u", names["password"])
    assert files.read() == Credentials(authority.pem, pair.cert, pair.key, "u", " pass word")
    paths["password"].write_text("another")
    assert files.read().password == "another"
    standing = Standing("etcd", lambda: 0.0, lambda *_, **__: None)
    for changed, line in (
        ({"ca": names["junk"]}, f"etcd_ca: {names['junk']}: has no certificate that can be used"),
        ({"ca": "/nowhere"}, "etcd_ca: /nowhere: is missing"),
        ({"ca": str(tmp_path)}, f"etcd_ca: {tmp_path}: is no file"),
        ({"key": names["junk"]}, f"etcd_cert: {names['cert']}: cannot be used with {names['junk']}"),
        ({"password": names["junk"]}, f"etcd_password_file: {names['junk']}: is not UTF-8"),
        ({"password": names["empty"]}, f"etcd_password_file: {names['empty']}: is empty"),
    ):
        given = names | changed
        read = config(
            etcd_ca=given["ca"],
            etcd_cert=given["cert"],
            etcd_key=given["key"],
            etcd_user="u",
            etcd_password_file=given["password"],
        )
        with pytest.raises(ConfigError) as caught:
            open_source(read, ME, standing, {})
        assert str(caught.value).startswith(line)
