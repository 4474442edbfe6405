"""What etcd's keys say of the cluster: tables for single cases, hypothesis for any order of changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_link.discovery.etcd_keys import Keys, Pair, address_in
from cluster_link.membership import Peer

ME, A, B = Peer("me", "10.0.0.1:1051"), Peer("a", "10.0.0.2:1051"), Peer("b", "10.0.0.3:1051")
KEEP = 20.0


class Told(Keys):
    """Keys below /p, and what they told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        super().__init__("/p", ME, KEEP, lambda what, why: self.told.append((what, why)))


def pair(peer: Peer | str, revision: int = 1, value: bytes | None = None, lease: int = 7) -> Pair:
    """A peer's key."""
    name = peer if isinstance(peer, str) else peer.name
    if value is None:
        assert isinstance(peer, Peer)
        value = peer.address.encode()
    return Pair(f"/p/{name}".encode(), value, revision, lease)


def test_the_span_holds_what_lies_below_the_prefix_alone() -> None:
    """Neither the prefix itself nor one that begins alike."""
    first, end = Told().span
    inside = (b"/p/", b"/p/a", b"/p/\xff\xff", b"/p/a/b")
    outside = (b"/p", b"/p0", b"/p-of-others/a", b"/q", b"/")
    assert [first <= key < end for key in (*inside, *outside)] == [True] * 4 + [False] * 5


@pytest.mark.parametrize(
    ("value", "address"),
    [
        (b"10.0.0.1:1051", "10.0.0.1:1051"),
        (b"Host.Example:01051\n", "host.example:1051"),
        (b"[0:0::1]:1051", "[::1]:1051"),
        (b"", None),
        (b"10.0.0.1", None),
        (b"10.0.0.1:0", None),
        (b"10.0.0.1:65536", None),
        (b"http://10.0.0.1:1051", None),
        (b"a=10.0.0.1:1051", None),
        (b"10.0.0.1:1051=10.0.0.1:1051", None),
        (b"10.0.0.1:1051,10.0.0.1:1051", None),
        (b"10.0.0.1:1051,10.0.0.2:1051", None),
        (b'{"GRPCAddress": "10.0.0.1:1051"}', None),
        (b"\xff\xfe", None),
        (b"a" * 513, None),
        (b" " * 1_500_000 + b"a:1", None),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_what_value_is_an_address(value: bytes, address: str | None) -> None:
    """host:port and nothing else; what is none is told in one line of a bounded length."""
    if address is not None:
        assert address_in(value) == address
        return
    with pytest.raises(ValueError, match="is not host:port") as caught:
        address_in(value)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@given(st.binary(max_size=600))
def test_any_bytes_are_an_address_or_told_in_one_line(value: bytes) -> None:
    """No value of anybody's is a fault of ours."""
    keys = Told()
    keys.put(pair("x", 1, value), 0.0)
    assert all(why.isprintable() for _, why in keys.told)
    assert len(keys.told) + len(keys.members(0.0)) == 2


def test_bad_keys_and_values_are_passed_over_and_told_once() -> None:
    """A bad value is told once, again when it has become another, and never hides the others."""
    keys = Told()
    named = [Pair(b"/p/\xff", b"x", 2, 0), Pair(b"/p/", b"x", 3, 0)]
    bad = [*named, pair("odd", 4, b"junk"), pair("long" * 80, 5, b"h:1")]
    for _ in range(2):
        keys.listing([pair(ME), *bad, pair(A)], 0.0)
        assert keys.members(0.0) == {ME, A}
        assert [what for what, _ in keys.told] == ["'/p/\\\\xff'", "'/p/'", "odd", keys.told[3][0]]
    keys.put(pair("odd", 6, b"junk"), 0.0)
    assert len(keys.told) == 4
    keys.put(pair("odd", 7, b"more junk"), 0.0)
    assert keys.told[4] == ("odd", "its value is not host:port, an IPv6 host in brackets: 'more junk'")
    keys.put(pair("odd", 8, b"10.0.0.9:1"), 0.0)
    assert Peer("odd", "10.0.0.9:1") in keys.members(0.0)


def test_of_two_names_with_one_address_the_later_counts() -> None:
    """A daemon that was renamed is one peer for everyone, in whatever order they hear of it."""
    renamed = Peer("a-anew", A.address)
    for order in ((pair(A, 3), pair(renamed, 9)), (pair(renamed, 9), pair(A, 3))):
        keys = Told()
        keys.listing((pair(ME), *order), 0.0)
        assert keys.members(0.0) == {ME, renamed}
        assert keys.told == [("a", f"its address {A.address} was registered later as a-anew")]
        keys.deleted(b"/p/a-anew", 1.0)
        assert keys.members(1.0) == {ME, A}


def test_this_daemon_is_a_member_before_it_is_listed_and_not_once_it_leaves() -> None:
    """Whoever asks is there; whoever leaves is not, whatever the store still says."""
    keys = Told()
    keys.listing([pair(A)], 0.0)
    assert keys.members(0.0) == {ME, A}
    assert (keys.listed, keys.taken) == (False, False)
    keys.put(pair(ME), 0.0)
    assert keys.members(0.0) == {ME, A}
    assert keys.listed
    keys.leave()
    assert keys.members(0.0) == {A}
    keys.deleted(keys.key, 0.0)
    assert keys.members(0.0) == {A}


def test_a_name_that_another_daemon_holds_is_its() -> None:
    """The holder is the member of that name; a value that is no address holds nothing."""
    keys = Told()
    other = Peer("me", "10.0.0.9:1051")
    keys.listing([pair(other), pair(A)], 0.0)
    assert keys.members(0.0) == {other, A}
    assert (keys.taken, keys.listed) == (True, False)
    keys.put(pair("me", 2, b"junk"), 0.0)
    assert (keys.taken, keys.listed) == (False, False)
    keys.deleted(keys.key, 0.0)
    assert keys.members(0.0) == {ME, A}
    assert not keys.taken


@pytest.mark.parametrize("order", [("me", "a", "b"), ("a", "me", "b"), ("a", "b", "me")])
def test_those_who_were_forgotten_together_with_us_are_kept_for_a_while(order: tuple[str, ...]) -> None:
    """A store that lost its data, or ended all leases, is no reason for a new ring: who comes back in time was never
    away, who does not is gone at the end."""
    keys = Told()
    keys.listing([pair(ME), pair(A), pair(B)], 0.0)
    for step, name in enumerate(order):
        keys.deleted(f"/p/{name}".encode(), 100.0 + step / 10)
    assert keys.members(100.3) == {ME, A, B}
    keys.put(pair(ME, 5), 101.0)
    keys.put(pair(A, 6), 102.0)
    assert keys.members(102.0) == {ME, A, B}
    keys.deleted(b"/p/a", 105.0)
    assert keys.members(105.0) == {ME, B}, "it came back and left in earnest"
    assert keys.due is not None
    assert 119.9 <= keys.due <= 120.3
    assert keys.members(keys.due) == {ME}


def test_an_empty_list_after_an_outage_keeps_everyone_for_a_while() -> None:
    """The same where the store comes back without its data."""
    keys = Told()
    keys.listing([pair(ME), pair(A), pair(B)], 0.0)
    keys.listing([], 50.0)
    assert keys.members(50.0) == {ME, A, B}
    moved = Peer("a", "10.0.0.7:1051")
    keys.put(pair(moved, 2), 51.0)
    assert keys.members(51.0) == {ME, moved, B}
    assert keys.members(50.0 + KEEP) == {ME, moved}


def test_those_who_go_while_we_stay_are_gone_at_once() -> None:
    """Also long after, or long before, we were forgotten ourselves."""
    keys = Told()
    keys.listing([pair(ME), pair(A), pair(B)], 0.0)
    keys.deleted(b"/p/a", 10.0)
    assert keys.members(10.0) == {ME, B}
    keys.deleted(keys.key, 12.0)
    assert keys.members(12.0) == {ME, B}
    assert keys.due is None
    keys.put(pair(ME, 5), 12.1)
    keys.deleted(b"/p/b", 14.0)
    assert keys.members(14.0) == {ME}


names = st.sampled_from(["me", "a", "b", "c"])
values = st.sampled_from([b"10.0.0.1:1051", b"10.0.0.2:1051", b"10.0.0.3:1051", b"junk"])


@given(st.lists(st.tuples(names, st.one_of(st.none(), values)), max_size=30), st.integers(0, 30))
def test_whether_listed_or_followed_the_set_is_the_same(changes: list[tuple[str, bytes | None]], cut: int) -> None:
    """Any changes, listed up to any of them and followed from there: every daemon comes to the same set, if it was
    never forgotten itself."""
    changes = [(name, value) for name, value in changes if value is not None or name != "me"]
    store: dict[str, Pair] = {}
    keys = Told()
    cut = min(cut, len(changes))
    for revision, (name, value) in enumerate(changes[:cut], 1):
        store.pop(name, None)
        if value is not None:
            store[name] = pair(name, revision, value)
    keys.listing(store.values(), 0.0)
    for revision, (name, value) in enumerate(changes[cut:], cut + 1):
        store.pop(name, None)
        if value is None:
            keys.deleted(f"/p/{name}".encode(), 0.0)
        else:
            store[name] = pair(name, revision, value)
            keys.put(store[name], 0.0)
    fresh = Told()
    fresh.listing(reversed(store.values()), 0.0)
    assert keys.members(0.0) == fresh.members(0.0)
    assert keys.listed == fresh.listed
    assert len({peer.address for peer in fresh.members(0.0)}) == len(fresh.members(0.0))
