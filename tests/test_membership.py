"""Which texts name peers, and what changed between two sets of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_link.membership import Change, Peer, change, parse_peers

# --- A list of peers


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
def test_no_text_is_no_peers(text: str) -> None:
    """An empty setting is an empty set, not an error."""
    assert parse_peers(text) == frozenset()


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        ("a:1", [("a:1", "a:1")]),
        ("a:1,b:65535", [("a:1", "a:1"), ("b:65535", "b:65535")]),
        ("10.0.0.1:1051", [("10.0.0.1:1051", "10.0.0.1:1051")]),
        ("x=a:1", [("x", "a:1")]),
        ("x=a:1,b:2", [("x", "a:1"), ("b:2", "b:2")]),
        (" a:1 ,\tx = b:2\n", [("a:1", "a:1"), ("x", "b:2")]),
        ("rack 7/node:3=a_b-c.example.:1", [("rack 7/node:3", "a_b-c.example.:1")]),
        ("grün=a:1", [("grün", "a:1")]),
        ("[::1]:1051", [("[::1]:1051", "[::1]:1051")]),
        ("x=[fe80::1%Eth0]:1", [("x", "[fe80::1%Eth0]:1")]),
        # The same peer again is no second one.
        ("a:1,a:1", [("a:1", "a:1")]),
        ("x=a:1,x=a:1", [("x", "a:1")]),
        # The same host on two ports is two daemons.
        ("a:1,a:2", [("a:1", "a:1"), ("a:2", "a:2")]),
        # A name is taken as it stands, capitals too.
        ("X=a:1,x=b:1", [("X", "a:1"), ("x", "b:1")]),
    ],
)
def test_a_list_names_its_peers(text: str, peers: list[tuple[str, str]]) -> None:
    """Each part is an address, with a name before it or as its own name; spaces around them do not matter."""
    assert parse_peers(text) == {Peer(*peer) for peer in peers}


@pytest.mark.parametrize(
    ("texts", "address"),
    [
        (["Host.Example:1051", "host.example:1051", "host.example:01051"], "host.example:1051"),
        (["[::1]:80", "[0:0:0:0:0:0:0:1]:80", "[0000::0001]:00080"], "[::1]:80"),
        (["[2001:DB8::A]:1", "[2001:db8:0::a]:1"], "[2001:db8::a]:1"),
        # An IPv4 address in IPv6's clothes is the IPv4 address.
        (["[::ffff:127.0.0.1]:1", "[::FFFF:7f00:1]:1", "127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_spellings_of_one_address_are_one_peer(texts: list[str], address: str) -> None:
    """Hosts whose lists spell an address in different ways agree on its name, so on who owns what."""
    assert parse_peers(",".join(texts)) == {Peer(address, address)}
    for text in texts:
        assert parse_peers(f"x={text}") == {Peer("x", address)}


@pytest.mark.parametrize(
    "part",
    [
        "a",
        ":1",
        "a:",
        "a:b",
        "a:1:2",
        "a b:1",
        "a:1 2",
        "a:-1",
        "a:+1",
        "a:1_0",
        "a:\u0661",  # an Arabic-Indic digit, which int() would take
        "::1:1051",
        "[::1]",
        "[::1]1051",
        "[]:1",
        "[::1:1",
        "[::1%\n]:1",
        "x=",
        "x=a",
        "http://a:1",
        "a/b:1",
        "ü:1",
        "h" * 254 + ":1",
    ],
)
def test_a_part_that_is_no_address_is_refused(part: str) -> None:
    """What is not host:port is said to be none, in one line that shows the part."""
    with pytest.raises(ValueError, match="is not host:port or name=host:port") as caught:
        parse_peers(f"good:1,{part},good:2")
    assert repr(part) in str(caught.value)
    assert "good" not in str(caught.value)


@pytest.mark.parametrize("port", ["0", "00", "65536", "99999", "100000", "9" * 5000])
def test_a_port_outside_its_range_is_refused(port: str) -> None:
    """A port lies in 1..65535, whatever the length of its digits."""
    with pytest.raises(ValueError, match=r"a port lies in 1\.\.65535") as caught:
        parse_peers(f"good:1,a:{port}")
    assert repr(f"a:{port}") in str(caught.value)


@pytest.mark.parametrize("host", ["::g", "1", "127.0.0.1", "host", "1::2::3", "::1%"])
def test_brackets_hold_an_ipv6_address(host: str) -> None:
    """What stands in brackets must be an IPv6 address."""
    with pytest.raises(ValueError, match="is not an IPv6 address") as caught:
        parse_peers(f"good:1,[{host}]:1")
    assert repr(host) in str(caught.value)


@pytest.mark.parametrize("name", ["", " ", "a=b", "a\nb", "a\0b", "n" * 254])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    """A name has 1 to 253 printable characters and no =."""
    with pytest.raises(ValueError, match="a name has 1 to 253 printable characters") as caught:
        parse_peers(f"good:1,{name}=a:1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [",", "a:1,", ",a:1", "a:1,,b:1", "a:1, ,b:1"])
def test_an_empty_part_is_refused(text: str) -> None:
    """A part left empty, as by a variable that was not set, is no smaller cluster."""
    with pytest.raises(ValueError, match="a peer is empty in") as caught:
        parse_peers(text)
    assert repr(text) in str(caught.value)


def test_one_name_has_one_address() -> None:
    """Two addresses for one name are refused, and both are told."""
    with pytest.raises(ValueError, match=r"^peer 'x' has two addresses, a:1 and b:1$"):
        parse_peers("x=a:1,y=c:1,x=b:1")
    with pytest.raises(ValueError, match=r"^peer 'a:1' has two addresses, a:1 and b:1$"):
        parse_peers("a:1,a:1=b:1")


def test_one_address_has_one_name() -> None:
    """Two names for one address are refused: one daemon would hold two shares and know itself by one name."""
    with pytest.raises(ValueError, match=r"^address a:1 has two names, 'x' and 'y'$"):
        parse_peers("x=a:1,y=A:01")


@given(text=st.text(alphabet="ab=:,.[]0123 \n%", max_size=30) | st.text())
def test_any_text_is_peers_or_one_line(text: str) -> None:
    """Whatever the text, it gives peers that read back as they are, or a ValueError of one line."""
    try:
        peers = parse_peers(text)
    except ValueError as error:
        lines = str(error).splitlines()
    else:
        lines = [""]
        assert parse_peers(",".join(f"{peer.name}={peer.address}" for peer in peers)) == peers
        assert len(dict(peers)) == len(peers)
    assert len(lines) == 1


# --- What changed


A, B, C = Peer("a", "h:1"), Peer("b", "h:2"), Peer("c", "h:3")
A2 = Peer("a", "h:9")


@pytest.mark.parametrize(
    ("before", "after", "joined", "left", "moved"),
    [
        ([], [], [], [], []),
        ([A, B], [B, A], [], [], []),
        ([], [A, B], [A, B], [], []),
        ([A, B], [], [], [A, B], []),
        ([A], [A, B], [B], [], []),
        ([A, B], [B], [], [A], []),
        ([A, B], [B, C], [C], [A], []),
        ([A, B], [A2, B], [], [], [A2]),
        ([A, B], [A2, C], [C], [B], [A2]),
        # Another name at the same address is another peer.
        ([A], [Peer("z", "h:1")], [Peer("z", "h:1")], [A], []),
        # Two peers that swap addresses both move.
        ([A, B], [("a", "h:2"), ("b", "h:1")], [], [], [("a", "h:2"), ("b", "h:1")]),
    ],
)
def test_a_change_is_who_joined_left_and_moved(
    before: list[tuple[str, str]],
    after: list[tuple[str, str]],
    joined: list[tuple[str, str]],
    left: list[tuple[str, str]],
    moved: list[tuple[str, str]],
) -> None:
    """A new name joins, a missing one leaves, a known one at another address moves and is told with the new one."""
    old, new = ({Peer(*peer) for peer in peers} for peers in (before, after))
    found = change(old, new)
    assert found == Change(*(frozenset(Peer(*peer) for peer in peers) for peers in (joined, left, moved)))
    assert bool(found) == (old != new)


_members = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["h:1", "h:2", "h:3"])).map(
    lambda addresses: frozenset(Peer(*item) for item in addresses.items())
)


@given(before=_members, after=_members)
def test_a_change_leads_from_one_set_to_the_other(before: frozenset[Peer], after: frozenset[Peer]) -> None:
    """Carrying out a change on the old set gives the new one."""
    joined, left, moved = change(before, after)
    gone = {peer.name for peer in left | moved}
    assert {peer for peer in before if peer.name not in gone} | joined | moved == after
    assert left <= before
    assert not joined & moved
