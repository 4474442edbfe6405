"""Which peer owns a key: a ring of 64-bit points, immutable, built from the set of peers.

Decides that a key belongs to the peer whose point is the first at or after the key's own, past the last one
the first of all; of equal points the one whose peer's name sorts first counts.  Knows no network, nor who is
alive.  Only names decide, so an address may change and no key moves.  A daemon by itself is a ring of one.

Every daemon must find the same owner, so `encode`, the hash and the number of points are part of what
daemons say to each other: a change of one of them is a change of the protocol.

A ring is built in a worker thread while the event loop serves from the old one, and no other thread runs
during a call into C: sorting the 512,000 points of 1,000 peers at once would stop the loop for hundreds of
ms.  So points are first dealt, by their top bits, to runs of about a thousand, and sorted run by run.  Short
calls are not enough: a loop that wants the interpreter back from a thread that computes waits 5 ms, after
each poll, read and write anew.  So the build also stops often to let others run (`rest`): a timer is then
0.3 ms late in the middle instead of 5, and 5 ms at worst instead of 15; the build takes up to twice as long.

The finished ring is three flat arrays, 13 bytes a point.  Lists of ints (the way not taken) take 45, and
the old ring's last reference is dropped on the loop: freeing arrays takes it 0.5 ms, lists 7 ms.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import pairwise

import xxhash

from cluster_link.membership import Peer

DEFAULT_POINTS = 512
"""Points a peer: the shares of peers then differ by about 1/sqrt(512), 4 %, one standard deviation."""
_HASH_BITS = 64
_SLICE_TARGET = 8
"""Points in one slice, at most, on average: three steps of bisection, and 1 to 2 bytes of index a point."""
_RUN_TARGET = 1_024
"""Points sorted in one call, at most, on average: 0.14 ms."""
_REST_EVERY = 256
"""Points made between two rests: 0.3 ms."""


def encode(name: str, unique_key: str) -> bytes:
    """What is hashed: the name's length in characters, a colon, the name, the key, in UTF-8.

    No two pairs are encoded alike, whatever they hold; a lone surrogate, which is no UTF-8, is passed too,
    so that finding the owner never fails: refusing such a key is validate's part.
    """
    return f"{len(name)}:{name}{unique_key}".encode("utf-8", "surrogatepass")


class Ring:
    """The owners of all keys among `peers`.

    points: how many each peer has.  hash_bytes: bytes -> 0..2**64-1, the same on every daemon.
    rest: called between pieces of the build, some 0.3 ms each; in a worker thread beside a loop give
        `lambda: time.sleep(0)`, so that the loop has its turn.

    Raises ValueError without peers, or if one name comes with two addresses.
    """

    __slots__ = ("_hash", "_members", "_owners", "_peers", "_per_peer", "_points", "_shift", "_starts")

    def __init__(
        self,
        peers: Iterable[Peer],
        points: int = DEFAULT_POINTS,
        hash_bytes: Callable[[bytes], int] = xxhash.xxh64_intdigest,
        rest: Callable[[], object] = lambda: None,
    ) -> None:
        self._members = frozenset(peers)
        # In the order of names, so that of equal points the lower number is the name that sorts first.
        self._peers = sorted(self._members)
        if not self._peers:
            raise ValueError("a ring needs at least one peer; a daemon by itself is a ring of one")
        for one, next_one in pairwise(self._peers):
            if one.name == next_one.name:
                raise ValueError(f"peer {one.name!r} has two addresses, {one.address} and {next_one.address}")
        if points < 1:
            raise ValueError(f"a peer needs at least one point, not {points}")
        self._per_peer = points
        self._hash = hash_bytes
        self._build(rest)

    def owner(self, name: str, unique_key: str) -> Peer:
        """The peer that owns a key; any two strings have one."""
        at = self._hash(encode(name, unique_key))
        part = at >> self._shift
        # Past the slice's last point, bisection ends at the first of the next that has any.
        place = bisect_left(self._points, at, self._starts[part], self._starts[part + 1])
        return self._peers[self._owners[place]]

    @property
    def peers(self) -> frozenset[Peer]:
        """Everyone on the ring."""
        return self._members

    def __len__(self) -> int:
        """How many peers."""
        return len(self._peers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ring):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"Ring({self._peers!r}, points={self._per_peer})"

    def _identity(self) -> tuple[object, ...]:
        return self._members, self._per_peer, self._hash

    def _build(self, rest: Callable[[], object]) -> None:
        """Fill the arrays, in many short calls.

        _points, ascending, and _owners, the number of each point's peer (one more than points: past the
        last comes the first).  _starts: for each value of a hash's top bits, where its points begin.
        """
        total = len(self._peers) * self._per_peer
        slice_bits = _bits(total, _SLICE_TARGET)
        run_bits = _bits(total, _RUN_TARGET)
        slices_a_run = 1 << slice_bits - run_bits
        self._shift = _HASH_BITS - slice_bits
        number_bits = (len(self._peers) - 1).bit_length()
        mask = (1 << number_bits) - 1

        runs: list[list[int]] = [[] for _ in range(1 << run_bits)]
        hash_bytes = self._hash
        run_shift = _HASH_BITS - run_bits
        made = 0
        for number, (name, _) in enumerate(self._peers):
            for which in range(self._per_peer):
                if not made % _REST_EVERY:
                    rest()
                made += 1
                point = hash_bytes(encode(name, str(which)))
                # One int instead of a pair: sorted twice as fast, and no business of the garbage collector.
                runs[point >> run_shift].append(point << number_bits | number)

        self._points = array("Q")
        self._owners = array("I")
        self._starts = array("Q")
        for run_number, run in enumerate(runs):
            rest()
            run.sort()
            before = len(self._points)
            for part in range(run_number * slices_a_run, (run_number + 1) * slices_a_run):
                self._starts.append(before + bisect_left(run, part << self._shift + number_bits))
            self._points.extend([entry >> number_bits for entry in run])
            self._owners.extend([entry & mask for entry in run])
            run.clear()
        self._starts.append(len(self._points))
        self._owners.append(self._owners[0])


def _bits(total: int, target: int) -> int:
    """The least number of top bits that leaves no more than `target` points, on average, to each value."""
    return max(0, (total - 1) // target).bit_length()
