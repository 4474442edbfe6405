"""Who owns a key: by readable numbers where the rule is looked at, by the real hash where shares and moves are."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_link.membership import Peer
from cluster_link.ring import DEFAULT_POINTS, Ring, encode

LAST = 2**64 - 1
KEYS = [("requests_per_sec", f"account:{number}") for number in range(100_000)]
FEW = KEYS[:3_000]


def peers(*names: str) -> list[Peer]:
    """Peers of these names, each somewhere."""
    return [Peer(name, f"{name}.example:1051") for name in names]


def hosts(count: int) -> list[Peer]:
    """So many peers, named as hosts in one network are."""
    return [Peer(f"10.0.0.{number}:1051", f"10.0.0.{number}:1051") for number in range(count)]


def numbers(**places: list[int]) -> Callable[[bytes], int]:
    """A hash to read: a peer's points lie where `places` says, and the key "k" of any name at int(name)."""
    known = {encode(name, str(which)): at for name, points in places.items() for which, at in enumerate(points)}
    return lambda text: known[text] if text in known else int(text.decode().partition(":")[2].removesuffix("k"))


def owners(ring: Ring, keys: Iterable[tuple[str, str]]) -> list[str]:
    """The name of each key's owner."""
    return [ring.owner(*key).name for key in keys]


# --- The rule, by numbers


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        (0, "a"),
        (9, "a"),
        (10, "a"),  # a point's own place is its peer's
        (11, "b"),
        (20, "b"),
        (21, "c"),
        (30, "c"),
        (31, "b"),
        (40, "b"),
        (50, "a"),
        (60, "c"),
        (61, "a"),  # past the last point the first one owns
        (2**63, "a"),
        (LAST, "a"),
    ],
)
def test_a_key_belongs_to_the_next_point(key: int, owner: str) -> None:
    """The first point at or after a key's own place owns it; past the last, the first of all."""
    place = numbers(a=[10, 50], b=[20, 40], c=[30, 60])
    for order in itertools.permutations(peers("a", "b", "c")):
        assert Ring(order, points=2, hash_bytes=place).owner(str(key), "k").name == owner


def test_the_ends_of_the_ring_are_places_like_others() -> None:
    """Points at 0 and at the last place own what they should."""
    ring = Ring(peers("a", "b"), points=1, hash_bytes=numbers(a=[LAST], b=[0]))
    assert owners(ring, [(str(at), "k") for at in (0, 1, 2**63, LAST - 1, LAST)]) == ["b", "a", "a", "a", "a"]


@pytest.mark.parametrize("at", [0, 7, 2**63, LAST])
def test_of_equal_points_the_first_name_counts(at: int) -> None:
    """Peers whose points fall together share no keys there: the name that sorts first has them."""
    place = numbers(a=[at], b=[at], c=[at])
    keys = [(str(key), "k") for key in (0, 6, 7, 8, 2**63, LAST)]
    for order in itertools.permutations(peers("c", "b", "a")):
        assert owners(Ring(order, points=1, hash_bytes=place), keys) == ["a"] * 6
    assert owners(Ring(peers("c", "b"), points=1, hash_bytes=place), keys) == ["b"] * 6


def test_names_sort_by_their_characters() -> None:
    """A tie does not look at numbers in names, nor at addresses."""
    tied = [Peer("n10", "z:1"), Peer("n9", "a:1")]
    assert owners(Ring(tied, points=1, hash_bytes=lambda text: 5), [("any", "key")]) == ["n10"]


@given(
    places=st.dictionaries(
        st.text("abcdefgh", min_size=1, max_size=2),
        st.lists(st.integers(0, 40) | st.integers(0, LAST), min_size=5, max_size=5),
        min_size=1,
        max_size=12,
    ),
    keys=st.lists(st.integers(0, 40) | st.integers(0, LAST), min_size=1),
)
def test_the_rule_is_that_of_one_sorted_list(places: dict[str, list[int]], keys: list[int]) -> None:
    """Points dense in one place, sparse or tied: an owner is what looking through all points in order finds."""
    ring = Ring(peers(*places), points=5, hash_bytes=numbers(**places))
    line = sorted((at, name) for name, points in places.items() for at in points)
    around = [at for at, _ in line]
    for key in {*keys, *around, *(min(at + 1, LAST) for at in around)}:
        wanted = next((name for at, name in line if at >= key), line[0][1])
        assert ring.owner(str(key), "k").name == wanted


@pytest.mark.parametrize("clumped", [False, True])
def test_many_points_keep_the_rule(clumped: bool) -> None:
    """A ring of thousands of points, even or in clumps with wide gaps, owns as one sorted list would."""
    chance = random.Random(7)
    names = [f"n{number}" for number in range(50)]
    clumps = [chance.randrange(LAST - 2**30) for _ in range(4)]
    places = {
        name: [
            chance.choice(clumps) + chance.randrange(2**30) if clumped else chance.randrange(LAST) for _ in range(90)
        ]
        for name in names
    }
    ring = Ring(peers(*names), points=90, hash_bytes=numbers(**places))
    line = sorted((at, name) for name, points in places.items() for at in points)
    for (before, _), (at, name) in itertools.pairwise(line):
        for key in (before + 1, (before + at) // 2 + 1, at):
            assert ring.owner(str(key), "k").name == name
    assert owners(ring, [(str(key), "k") for key in (0, line[0][0], line[-1][0] + 1, LAST)]) == [line[0][1]] * 4


# --- Who is on it


def test_a_lone_daemon_is_a_ring_of_one() -> None:
    """One peer owns everything, and no code has to ask whether there are others."""
    (alone,) = peers("me")
    for points in (1, 2, DEFAULT_POINTS):
        ring = Ring([alone], points)
        assert {ring.owner(*key) for key in FEW} == {alone}
    assert len(ring) == 1
    assert ring.peers == {alone}


def test_an_empty_ring_is_refused() -> None:
    """Nobody could own anything."""
    with pytest.raises(ValueError, match="a ring needs at least one peer"):
        Ring([])


@pytest.mark.parametrize("points", [0, -1])
def test_a_peer_without_points_is_refused(points: int) -> None:
    """A peer on the ring owns something."""
    with pytest.raises(ValueError, match=f"at least one point, not {points}"):
        Ring(peers("a"), points)


def test_one_name_at_two_addresses_is_refused() -> None:
    """A name is one peer; the same peer twice is once."""
    with pytest.raises(ValueError, match=r"^peer 'a' has two addresses, h:1 and h:2$"):
        Ring([Peer("a", "h:2"), Peer("b", "h:3"), Peer("a", "h:1")])
    assert len(Ring([Peer("a", "h:1"), Peer("a", "h:1")])) == 1


def test_rings_of_the_same_peers_and_points_are_equal() -> None:
    """Two rings are equal when they give the same answers: the same peers, addresses too, and as many points."""
    ring = Ring(peers("a", "b"), 8)
    assert ring == Ring(peers("b", "a"), 8)
    assert hash(ring) == hash(Ring(peers("b", "a"), 8))
    assert ring.peers == set(peers("a", "b"))
    others = [
        Ring(peers("a", "b"), 9),
        Ring(peers("a"), 8),
        Ring(peers("a", "c"), 8),
        Ring([*peers("a"), Peer("b", "h:1")], 8),
        Ring(peers("a", "b"), 8, hash_bytes=len),
    ]
    assert ring not in others
    assert ring != ring.peers


def test_a_ring_does_not_follow_the_list_it_was_built_from() -> None:
    """What was handed in may change afterwards; the ring does not."""
    members = peers("a", "b")
    ring = Ring(members)
    before = owners(ring, FEW)
    members.pop()
    assert owners(ring, FEW) == before
    assert len(ring) == 2


# --- What is hashed


@given(
    one=st.tuples(st.text("1:_\0ab"), st.text("1:_\0ab")) | st.tuples(st.text(), st.text()),
    other=st.tuples(st.text("1:_\0ab"), st.text("1:_\0ab")) | st.tuples(st.text(), st.text()),
)
def test_different_pairs_are_encoded_differently(one: tuple[str, str], other: tuple[str, str]) -> None:
    """No separator can be forged: two pairs are encoded alike only if they are one."""
    assert (encode(*one) == encode(*other)) == (one == other)


def test_a_name_and_key_are_not_glued() -> None:
    """("a_b", "c") and ("a", "b_c") are two buckets, and may have two owners."""
    ring = Ring(hosts(10))
    pairs = [((f"a_{number}", "c"), ("a", f"{number}_c")) for number in range(200)]
    apart = sum(ring.owner(*one) != ring.owner(*other) for one, other in pairs)
    assert apart > 150  # nine of ten, by chance


@given(name=st.text(st.characters()), unique_key=st.text(st.characters()))
def test_every_key_has_an_owner(name: str, unique_key: str) -> None:
    """NUL, lone surrogates, nothing at all: finding the owner never fails, and finds the same one twice."""
    ring = Ring(hosts(3), 16)
    assert ring.owner(name, unique_key) == ring.owner(name, unique_key)
    assert ring.owner(name, unique_key) in ring.peers


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (("a_b", "c"), b"3:a_bc"),
        (("a", "b_c"), b"1:ab_c"),
        (("", ""), b"0:"),
        (("n", "\0"), b"1:n\0"),
        (("ü", "é"), "1:üé".encode()),  # characters are counted, not bytes
        (("n", "\ud800"), b"1:n\xed\xa0\x80"),
    ],
)
def test_the_encoding_is_written_down(pair: tuple[str, str], text: bytes) -> None:
    """Daemons of different releases hash the same bytes."""
    assert encode(*pair) == text


# --- Shares and moves, by the real hash


def test_owners_are_the_same_in_every_release() -> None:
    """These owners were found by the first release with a ring; daemons of two releases must agree on them."""
    assert "".join(name[7] for name in owners(Ring(hosts(10)), KEYS[:40])) == "8855109423627745274009969727177075707901"


def test_every_order_of_building_gives_the_same_owners() -> None:
    """However the peers came in, by whatever kind of collection, every key has the same owner."""
    members = hosts(5)
    wanted = owners(Ring(members, 64), FEW)
    for order in itertools.permutations(members):
        assert owners(Ring(order, 64), FEW[:300]) == wanted[:300]
    assert owners(Ring(frozenset(members), 64), FEW) == wanted
    assert owners(Ring(iter(members), 64), FEW) == wanted


@pytest.mark.parametrize("naming", ["10.0.0.{}:1051", "daemon-{}", "sidegate-7c9f{}.pods.example:1051"])
def test_no_peer_holds_much_over_its_share(naming: str) -> None:
    """Of 10 peers and 100,000 keys, none holds over 1.2 of its share."""
    members = [Peer(naming.format(number), f"h:{number + 1}") for number in range(10)]
    held = Counter(owners(Ring(members), KEYS))
    assert len(held) == 10
    assert max(held.values()) <= 1.2 * len(KEYS) / 10


def test_a_peer_that_leaves_moves_only_its_own_keys() -> None:
    """Keys of those that stay do not move; the leaver's are spread over all of them."""
    members = hosts(10)
    before = owners(Ring(members), KEYS)
    for leaver in (members[0], members[7]):
        after = owners(Ring(set(members) - {leaver}), KEYS)
        assert all(new == old for old, new in zip(before, after, strict=True) if old != leaver.name)
        heirs = Counter(new for old, new in zip(before, after, strict=True) if old == leaver.name)
        assert len(heirs) == 9


def test_a_peer_that_joins_takes_keys_only_to_itself() -> None:
    """Keys that move go to the newcomer, about its share of them, and from everyone."""
    members = hosts(10)
    newcomer = Peer("new", "new:1")
    before = owners(Ring(members), KEYS)
    after = owners(Ring([*members, newcomer]), KEYS)
    moves = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moves} == {"new"}
    assert len({old for old, _ in moves}) == 10
    assert 0.8 < len(moves) / (len(KEYS) / 11) < 1.2


@given(
    names=st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=8),
    keys=st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=30),
    data=st.data(),
)
def test_whoever_leaves_or_joins_no_third_is_touched(
    names: set[str], keys: list[tuple[str, str]], data: st.DataObject
) -> None:
    """For any names and keys: between a ring with a peer and one without it, only that peer's keys differ."""
    one = data.draw(st.sampled_from(sorted(names)))
    more, fewer = Ring(peers(*names), 4), Ring(peers(*(names - {one})), 4)
    for key in keys:
        assert more.owner(*key).name in (one, fewer.owner(*key).name)


def test_an_address_change_moves_no_key() -> None:
    """Only names decide; the owner comes with its new address."""
    before = Ring(hosts(10))
    after = Ring(Peer(name, f"moved.example:{9_999 - which}") for which, (name, _) in enumerate(hosts(10)))
    assert owners(after, KEYS) == owners(before, KEYS)
    assert {after.owner(*key) for key in KEYS} == after.peers
    assert before != after


# --- Building beside a loop


@pytest.mark.parametrize("count", [1, 10, 40])
def test_the_build_rests_between_short_pieces(count: int) -> None:
    """A build rests at least once for 256 hashed points, and resting changes no owner."""
    hashed, longest = 0, 0

    def count_hash(text: bytes) -> int:
        nonlocal hashed
        hashed += 1
        return hash(text) & LAST

    def rest() -> None:
        nonlocal hashed, longest
        longest, hashed = max(longest, hashed), 0

    ring = Ring(hosts(count), hash_bytes=count_hash, rest=rest)
    assert longest == 256
    assert ring == Ring(hosts(count), hash_bytes=count_hash)
    hasty = Ring(hosts(count), hash_bytes=count_hash)
    assert owners(ring, FEW) == owners(hasty, FEW)
