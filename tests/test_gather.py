"""When changed members become a ring: after a quiet moment, and never twice the same."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_link.discovery.gather import LONGEST, QUIET, Gather
from cluster_link.membership import Peer

A, B, C = (Peer(name, f"{name}.example:1051") for name in "abc")


def test_a_change_is_due_when_its_source_has_been_quiet() -> None:
    """The last of a burst is taken, a quiet moment after it came."""
    gather = Gather(quiet=0.05, longest=0.2)
    gather.offer(frozenset({A}), 1.0)
    gather.offer(frozenset({A, B}), 1.04)
    assert gather.due == pytest.approx(1.09)
    assert gather.take(1.08) is None
    assert gather.take(1.09) == frozenset({A, B})
    assert gather.due is None
    assert gather.take(9.0) is None


def test_a_source_that_is_never_quiet_is_heard_all_the_same() -> None:
    """Changes are held for the longest time and no longer."""
    gather = Gather(quiet=0.05, longest=0.2)
    for step in range(8):
        gather.offer(frozenset({A, (B, C)[step % 2]}), 1.0 + 0.04 * step)
    assert gather.due == pytest.approx(1.2)
    assert gather.take(1.28) == frozenset({A, C})


def test_an_unchanged_set_is_silent() -> None:
    """What is routed by already is no news, nor is a change that was taken back in time, nor the same news again."""
    gather = Gather(quiet=0.05, longest=0.2)
    gather.offer(frozenset({A}), 1.0)
    gather.offer(frozenset({A}), 1.04)
    assert gather.due == pytest.approx(1.05)
    assert gather.take(1.05) == frozenset({A})
    gather.offer(frozenset({A}), 2.0)
    assert gather.due is None
    gather.offer(frozenset({A, B}), 3.0)
    gather.offer(frozenset({A}), 3.01)
    assert gather.take(3.06) is None
    assert gather.due is None


def test_what_is_routed_by_already_is_taken_once() -> None:
    """A set that came another way ends what waited, and is silent when its source tells it too."""
    gather = Gather(quiet=0.05, longest=0.2)
    gather.offer(frozenset({A}), 1.0)
    gather.took(frozenset({A, B}))
    assert gather.due is None
    gather.offer(frozenset({A, B}), 2.0)
    assert gather.due is None
    gather.offer(frozenset({A}), 3.0)
    assert gather.take(3.05) == frozenset({A})


@given(st.lists(st.tuples(st.sets(st.sampled_from([A, B, C])), st.floats(0, 0.3)), min_size=1))
def test_the_last_set_wins_within_the_longest_time(told: list[tuple[set[Peer], float]]) -> None:
    """However sets come, each taken one differs from the one before, none waits longer than the longest time after
    the change that began it, and the last told is the last taken."""
    gather = Gather()
    now, taken = 0.0, []
    for members, pause in told:
        gather.offer(frozenset(members), now)
        assert gather.due is None or gather.due <= now + QUIET
        then = now + pause
        while gather.due is not None and gather.due <= then:
            assert gather.due <= now + LONGEST
            found = gather.take(gather.due)
            taken += [] if found is None else [found]
        now = then
    found = gather.take(now + LONGEST)
    taken += [] if found is None else [found]
    assert taken[-1] == told[-1][0]
    assert all(before != after for before, after in itertools.pairwise(taken))
