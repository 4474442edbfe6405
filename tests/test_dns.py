"""Peers by DNS, with a DNS that answers as a test has it answer, and pauses that take no time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from cluster_link.discovery.dns import Dns
from cluster_link.discovery.dns_lookup import Answer, LookupFailed
from cluster_link.discovery.dns_names import DnsName, parse_names
from cluster_link.discovery.source import Standing
from cluster_link.membership import Peer

ME = Peer("10.0.0.1:1051", "10.0.0.1:1051")
PEERS = [Peer(f"10.0.0.{number}:1051", f"10.0.0.{number}:1051") for number in range(1, 5)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Peers.example:1051", (("peers.example", 1051),)),
        ("peers:01051", (("peers", 1051),)),
        ("a.b.:1, a.b.:1 ,c:2", (("a.b.", 1), ("c", 2))),
        ("_grpc._tcp.Peers.example", (("_grpc._tcp.peers.example", None),)),
        ("_odd_host.example:9", (("_odd_host.example", 9),)),
    ],
)
def test_names_as_they_are_written(text: str, names: tuple[tuple[str, int | None], ...]) -> None:
    """A host with a port, or a service; in lower case, each once."""
    assert parse_names(text) == names


@pytest.mark.parametrize(
    "text",
    [
        *("", "peers", "peers:", "peers:0", "peers:70000", "10.0.0.1:1051", "[::1]:1051", "a,b:1", "a:1,", "-a:1"),
        *("a b:1", "_grpc._sctp.peers", "_grpc._tcp", "_grpc._tcp.peers:1051x", "a..b:1"),
        *(f"{'a' * 64}:1", f"{'a.' * 127}a:1"),
    ],
)
def test_what_names_nothing_is_refused_by_its_part(text: str) -> None:
    """The error is one line."""
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        parse_names(text)


class Zone:
    """What is asked gives what stands here: an answer, a list of addresses or services with a TTL, or a reason."""

    def __init__(self, **records: object) -> None:
        self.records = {name.replace("__", "."): record for name, record in records.items()}
        self.asked: list[str] = []

    async def addresses(self, host: str) -> Answer:
        self.asked.append(host)
        record = self.records[host]
        if isinstance(record, str):
            raise LookupFailed(record)
        assert isinstance(record, tuple)
        return Answer(tuple(record[0]), record[1])

    services = addresses


class Watch:
    """A source whose pauses are told and then over; `then` are what happens in each."""

    def __init__(self, zone: Zone, names: str, *then: Callable[[], object], chance: float = 0.0) -> None:
        self.events: list[tuple[str, object]] = []
        self.pauses: list[float] = []
        self.standing = Standing("dns", lambda: 100.0, lambda event, **f: self.events.append((event, f.get("reason"))))
        self.told: list[frozenset[Peer]] = []
        steps = iter(then)

        async def sleep(seconds: float) -> None:
            self.pauses.append(round(seconds, 3))
            for _ in range(5):  # what was found is told meanwhile
                await asyncio.sleep(0)
            step = next(steps, None)
            if step is None:
                raise asyncio.CancelledError
            step()

        self._source = Dns(parse_names(names), ME, self.standing, zone, 1.0, 30.0, sleep, lambda: chance)

    def run(self) -> Watch:
        """To the end of the last pause."""

        async def listen() -> None:
            async for members in self._source.members():
                self.told.append(members)

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(listen())
        return self


def members(*numbers: int) -> frozenset[Peer]:
    """Peers by the last part of their address."""
    return frozenset(PEERS[number - 1] for number in numbers)


def nothing() -> None:
    """A pause in which nothing happens."""


def addresses(*numbers: int) -> Sequence[str]:
    """Those addresses."""
    return [f"10.0.0.{number}" for number in numbers]


def test_a_name_is_followed() -> None:
    """Each address with the port is a peer, and what changes is told at the next question."""
    zone = Zone(peers=(addresses(1, 2), 5))
    watch = Watch(zone, "peers:1051", lambda: zone.records.update(peers=(addresses(1, 3), 5))).run()
    assert watch.told == [members(1, 2), members(1, 3)]
    assert watch.standing.state == "current"
    assert watch.standing.listed
    assert watch.events == []


@pytest.mark.parametrize(
    ("ttl", "chance", "pause"),
    [(5, 0.0, 5), (5, 1.0, 5.5), (0, 0.0, 1), (0, 1.0, 1.1), (1e9, 0.0, 30), (1e9, 1.0, 33)],
)
def test_the_ttl_decides_within_bounds(ttl: float, chance: float, pause: float) -> None:
    """A name is asked for again when its answer ends, no sooner than the shortest and no later than the longest
    interval, at a moment spread over a tenth more."""
    assert Watch(Zone(peers=(addresses(1), ttl)), "peers:1051", chance=chance).run().pauses == [pause]


def test_each_name_is_asked_for_at_its_own_pace() -> None:
    """By its own TTL; one that gives no answer for long, or fails, delays no other."""

    class Hanging(Zone):
        async def addresses(self, host: str) -> Answer:
            if host == "c":
                await asyncio.Event().wait()
            return await super().addresses(host)

    zone = Hanging(a=(addresses(1), 9), b="b does not exist", c=())
    watch = Watch(zone, "a:1051,b:1051,c:1051", *[nothing] * 5, chance=1.0).run()
    assert watch.pauses[:6] == [9.9, 1, 9.9, 2, 9.9, 4]
    assert set(watch.told) == {members(1)}


def test_a_failing_name_keeps_its_last_peers_while_others_go_on() -> None:
    """The union of names is told; one that fails is told of once, and asked for ever less often."""
    zone = Zone(a=(addresses(1, 2), 5), b=(addresses(3), 5))
    steps: list[Callable[[], object]] = [nothing] * 17
    steps[0] = lambda: zone.records.update(a="a does not exist", b=(addresses(4), 5))
    steps[14] = lambda: zone.records.update(a=(addresses(1), 5))
    watch = Watch(zone, "a:1051,b:1051", *steps, chance=1.0).run()
    assert list(dict.fromkeys(watch.told)) == [members(1, 2, 3), members(1, 2, 4), members(1, 4)]
    assert watch.pauses[::2][:9] == [5.5, 1, 2, 4, 8, 16, 30, 30, 5.5]
    assert set(watch.pauses[1::2]) == {5.5}
    assert watch.events == [("discovery_away", "a does not exist"), ("discovery_back", None)]
    assert watch.standing.failures == 7


def test_why_several_names_are_away_is_one_line() -> None:
    """In the order in which they were given; each change of it is told."""
    zone = Zone(a="a is away", b="b is away", c=(addresses(1), 5))
    watch = Watch(zone, "c:1051,a:1051,b:1051", nothing, nothing, chance=1.0).run()
    assert watch.events == [("discovery_away", "a is away"), ("discovery_away", "a is away; b is away")]
    assert watch.standing.state == "away"
    assert watch.standing.listed


def test_before_the_first_answer_nothing_is_told() -> None:
    """No set is better than a wrong one."""
    zone = Zone(peers="no answer")
    watch = Watch(zone, "peers:1051", lambda: zone.records.update(peers=(addresses(1), 5))).run()
    assert watch.told == [members(1)]
    assert watch.events == [("discovery_away", "no answer"), ("discovery_back", None)]


def test_a_daemon_that_is_not_there_yet_adds_itself() -> None:
    """It forwards to the others meanwhile, and its ring is provisional."""
    watch = Watch(Zone(peers=(addresses(2, 3), 5)), "peers:1051").run()
    assert watch.told == [members(1, 2, 3)]
    assert watch.standing.state == "current"
    assert not watch.standing.listed


def test_services_are_named_by_their_target() -> None:
    """A peer keeps its place on the ring whatever its address; a target that is not found stays where it was; one that
    was never found is left out."""
    service = [("One.example.", 1051), ("two.example.", 1052), ("gone.example.", 1)]
    zone = Zone(_grpc___tcp__peers=(service, 9))
    zone.records = {"_grpc._tcp.peers": (service, 9)}
    zone.records |= {"One.example.": (addresses(1), 9), "two.example.": (addresses(2, 3), 4), "gone.example.": "gone"}

    def move() -> None:
        zone.records |= {"One.example.": (addresses(4), 9), "two.example.": "two is away"}

    watch = Watch(zone, "_grpc._tcp.peers", move).run()
    one, two = Peer("one.example:1051", "10.0.0.1:1051"), Peer("two.example:1052", "10.0.0.2:1052")
    assert watch.told == [{one, two}, {one._replace(address="10.0.0.4:1051"), two, ME}]
    assert watch.events == [("discovery_away", "gone"), ("discovery_away", "two is away, and 1 more")]


def test_a_daemon_found_in_two_ways_is_one_peer() -> None:
    """By its address under two names, and by its name at two addresses."""
    zone = Zone(a=(addresses(1, 2), 9), b=(addresses(2, 3), 9))
    zone.records |= {"_x._tcp.c": ([("one.", 1051)], 9), "one.": (addresses(1), 9)}
    watch = Watch(zone, "a:1051,b:1051,_x._tcp.c").run()
    assert sorted(peer.address for peer in watch.told[-1]) == ["10.0.0.1:1051", "10.0.0.2:1051", "10.0.0.3:1051"]


def test_ipv6_has_the_spelling_that_lists_have() -> None:
    """In brackets, short."""
    watch = Watch(Zone(peers=(["2001:db8:0::1"], 5)), "peers:1051").run()
    assert Peer("[2001:db8::1]:1051", "[2001:db8::1]:1051") in watch.told[0]


def test_port_0_is_told_and_left_out() -> None:
    """A record that no one can call."""
    zone = Zone()
    zone.records = {"_x._tcp.c": ([("one.", 1051), ("two.", 0)], 9), "one.": (addresses(1), 9)}
    watch = Watch(zone, "_x._tcp.c").run()
    assert [peer.address for peer in watch.told[0]] == ["10.0.0.1:1051"]
    assert watch.events == [("discovery_away", "_x._tcp.c names port 0")]


def test_many_targets_are_asked_for_a_few_at_a_time() -> None:
    """A thousand pods are no thousand questions at one moment."""
    under_way, most = 0, 0

    class Slow(Zone):
        async def addresses(self, host: str) -> Answer:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1
            return await super().addresses(host)

    zone = Slow()
    zone.services = Zone.addresses.__get__(zone)  # type: ignore[method-assign]
    zone.records = {f"t{number}.": ([f"10.1.{number // 250}.{number % 250}"], 9) for number in range(1_000)}
    zone.records["_x._tcp.c"] = ([(f"t{number}.", 1051) for number in range(1_000)], 9)
    watch = Watch(zone, "_x._tcp.c").run()
    assert len(watch.told[0]) == 1_001
    assert most == 16


def test_a_name_reads_as_it_was_written() -> None:
    """For operators."""
    assert [str(DnsName("a", 1)), str(DnsName("_x._tcp.c", None))] == ["a:1", "_x._tcp.c"]
