"""What the keys below a prefix of etcd's say: who is in the cluster, and who holds a name.

Decides which keys and values name a peer, which of two registrations counts, and who is kept for a while although the
store has forgotten it.  Knows no etcd, no loop and no clock: keys, revisions and seconds are handed in.

A daemon's key is <prefix>/<its name>, the value its address, "host:port".  The store's revisions order all changes,
the same for everyone who reads them, so that all daemons choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from cluster_link.membership import MAX_NAME, Peer, parse_peers

_LONGEST_VALUE = 512
_AT_ONCE = 1.0
"""Seconds: what vanishes this close to our own key was forgotten together with it."""


class Pair(NamedTuple):
    """A key as the store has it.  revision: of its last change.  lease: what it lives under; 0: nothing."""

    key: bytes
    value: bytes
    revision: int
    lease: int


class Registration(NamedTuple):
    """A name's key.  address: None where the value is none."""

    name: str
    address: str | None
    revision: int
    lease: int


class Keys:
    """All keys below a prefix.

    me: this daemon.  keep: seconds that peers are kept whom the store has forgotten together with us.
    tell: told once of each value that is passed over: (key or name, why).
    """

    def __init__(self, prefix: str, me: Peer, keep: float, tell: Callable[[str, str], None]) -> None:
        self._start = f"{prefix}/".encode()
        self._me = me
        self._keep = keep
        self._tell = tell
        self._told: dict[str, str] = {}
        self._found: dict[str, Registration] = {}
        self._vanished: dict[str, tuple[Peer, float]] = {}
        self._forgotten: float | None = None
        self._leaving = False

    @property
    def span(self) -> tuple[bytes, bytes]:
        """The first key below the prefix, and the first one behind."""
        return self._start, self._start[:-1] + bytes((self._start[-1] + 1,))

    @property
    def key(self) -> bytes:
        """This daemon's own."""
        return self._start + self._me.name.encode()

    @property
    def mine(self) -> Registration | None:
        """What stands under this daemon's name."""
        return self._found.get(self._me.name)

    @property
    def taken(self) -> bool:
        """Whether another daemon's address stands under this daemon's name: the first one keeps it.  A value that
        names no address is nobody's."""
        mine = self.mine
        return mine is not None and mine.address is not None and mine.address != self._me.address

    @property
    def listed(self) -> bool:
        """Whether whoever reads the store finds this daemon there."""
        return self._me in self._present()

    def listing(self, pairs: Iterable[Pair], now: float) -> None:
        """These are all the keys that there are."""
        before = self._present()
        self._found = {}
        told, self._told = self._told, {}
        for pair in pairs:
            self._take(pair, told)
        self._present(told)
        self._compare(before, now)

    def put(self, pair: Pair, now: float) -> None:
        """A key has this value from now on."""
        before = self._present()
        self._take(pair, self._told)
        self._compare(before, now)

    def deleted(self, key: bytes, now: float) -> None:
        """A key is no more."""
        before = self._present()
        name = self._name(key)
        self._found.pop(name or "", None)
        self._told.pop(_text(key) if name is None else name, None)
        self._compare(before, now)

    def leave(self) -> None:
        """This daemon is on its way out, whatever the store still says."""
        self._leaving = True

    def members(self, now: float) -> frozenset[Peer]:
        """The set of peers.  This daemon is in it unless it leaves, or another one holds its name or its address."""
        found = self._present()
        names = {peer.name for peer in found}
        if self.mine is None:
            # About to register, which will be the last word on this address.
            found = frozenset(peer for peer in found if peer.address != self._me.address) | {self._me}
            names.add(self._me.name)
        if self.due is not None and now < self.due:
            addresses = {peer.address for peer in found}
            kept = (peer for peer, _ in self._vanished.values())
            found |= {peer for peer in kept if peer.name not in names and peer.address not in addresses}
        return frozenset(peer for peer in found if peer.name != self._me.name) if self._leaving else found

    @property
    def due(self) -> float | None:
        """When those that were kept are kept no more; None while nobody is."""
        return None if self._forgotten is None or not self._vanished else self._forgotten + self._keep

    def _present(self, told: Mapping[str, str] | None = None) -> frozenset[Peer]:
        """Those whose registrations count: of two names with one address, the one registered last.  told: what was
        told before."""
        by_address: dict[str, Registration] = {}
        for one in self._found.values():
            if one.address is not None:
                other = by_address.setdefault(one.address, one)
                if (other.revision, other.name) < (one.revision, one.name):
                    by_address[one.address] = one
        for one in self._found.values():
            if one.address is not None and by_address[one.address] is not one:
                later = by_address[one.address].name
                self._remark(one.name, f"its address {one.address} was registered later as {later}", told or self._told)
        return frozenset(Peer(one.name, address) for address, one in by_address.items())

    def _compare(self, before: frozenset[Peer], now: float) -> None:
        after = self._present()
        if self._forgotten is not None and now >= self._forgotten + self._keep:
            self._forgotten, self._vanished = None, {}
        if self._me in before and self.mine is None and not self._leaving:
            self._forgotten = now
            self._vanished = {name: gone for name, gone in self._vanished.items() if now - gone[1] <= _AT_ONCE}
        names = {peer.name for peer in after}
        for name in names & self._vanished.keys():
            del self._vanished[name]
        for peer in before:
            # A peer that leaves later than that has come back before, and leaves in earnest.
            if peer.name not in names and peer.name != self._me.name and self._near(now):
                self._vanished[peer.name] = (peer, now)
        if self._forgotten is None:
            self._vanished = {name: gone for name, gone in self._vanished.items() if now - gone[1] <= _AT_ONCE}

    def _near(self, now: float) -> bool:
        return self._forgotten is None or now - self._forgotten <= _AT_ONCE

    def _take(self, pair: Pair, told: Mapping[str, str]) -> None:
        name = self._name(pair.key)
        if name is None:
            self._remark(_text(pair.key), "the key ends in no name of 1 to 253 printable characters", told)
            return
        try:
            address = address_in(pair.value)
        except ValueError as error:
            address = None
            self._remark(name, f"its value {error}", told)
        else:
            self._told.pop(name, None)
        self._found[name] = Registration(name, address, pair.revision, pair.lease)

    def _name(self, key: bytes) -> str | None:
        try:
            name = key.removeprefix(self._start).decode()
        except UnicodeDecodeError:
            return None
        return name if name.isprintable() and 0 < len(name) <= MAX_NAME else None

    def _remark(self, what: str, why: str, told: Mapping[str, str]) -> None:
        news = told.get(what) != why
        self._told[what] = why
        if news:
            self._tell(what, why)


def address_in(value: bytes) -> str:
    """The address that a value is, in the one spelling that addresses have here; raises ValueError, whose text begins
    with "is"."""
    wrong = f"is not host:port, an IPv6 host in brackets: {_text(value)}"
    try:
        text = value.decode() if len(value) <= _LONGEST_VALUE else ""
        (peer,) = parse_peers(text)
    except ValueError:
        raise ValueError(wrong) from None
    if "=" in text or "," in text:
        raise ValueError(wrong)
    return peer.address


def _text(data: bytes) -> str:
    """For a log: one line, however long it is."""
    shown = ascii(data[:64].decode(errors="backslashreplace"))
    return shown if len(data) <= 64 else f"{shown}..."
