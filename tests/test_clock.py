"""What time it is, by clocks that a test turns by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.calendar import LAST_INSTANT
from sidecar.clock import ManualClock, SystemClock
from tests.helpers import T

MS = 1_000_000
"""Nanoseconds in a millisecond."""


class Machine:
    """A machine's two clocks, in ms."""

    def __init__(self, monotonic: int = 5_000_000, wall: int = T) -> None:
        self.monotonic = monotonic
        self.wall = wall
        self.clock = SystemClock(lambda: self.monotonic * MS, lambda: self.wall * MS)

    def run(self, ms: int) -> None:
        """Let time pass on both."""
        self.monotonic += ms
        self.wall += ms


def test_it_shows_the_wall_clock_and_runs_on_the_monotonic_one() -> None:
    """The wall clock says where the clock starts; between adjustments only the monotonic one moves it."""
    machine = Machine()
    assert machine.clock.now() == T
    machine.run(1234)
    assert machine.clock.now() == T + 1234
    machine.wall += 99_999
    assert machine.clock.now() == T + 1234
    assert machine.clock.manual is False


def test_it_shows_whole_milliseconds_that_have_begun() -> None:
    """A millisecond is told from its first nanosecond to its last."""
    wall = T * MS
    clock = SystemClock(lambda: wall, lambda: wall)
    shown = []
    for passed in (0, 1, MS - 1, MS, 2 * MS - 1):
        wall = T * MS + passed
        shown.append(clock.now() - T)
    assert shown == [0, 0, 0, 1, 1]


def test_it_follows_the_wall_clock_forward_at_once() -> None:
    """A wall clock set forward is followed by the next adjustment, which then is not ahead."""
    machine = Machine()
    machine.run(1000)
    machine.wall += 3_600_000
    assert machine.clock.adjust() == 0
    assert machine.clock.now() == T + 1000 + 3_600_000


def test_a_wall_clock_set_back_is_met_at_half_speed() -> None:
    """Set back by ten seconds, it runs at half speed for twenty, adjusted each second, and then is right."""
    machine = Machine()
    machine.clock.now()
    machine.wall -= 10_000
    shown = [machine.clock.now()]
    told = [machine.clock.adjust()]
    for _ in range(25):
        machine.run(1000)
        told.append(machine.clock.adjust())
        shown.append(machine.clock.now())
    steps = [later - earlier for earlier, later in pairwise(shown)]
    assert steps == [500] * 20 + [1000] * 5
    assert told[:3] == [10_000, 10_000, 9_500]
    assert told[-1] == 0
    assert machine.clock.now() == machine.wall


def test_the_meeting_does_not_overshoot() -> None:
    """A wall clock set back by little is met exactly, and not passed."""
    machine = Machine()
    machine.wall -= 3
    machine.run(1000)
    assert machine.clock.adjust() == 3
    assert machine.clock.now() == machine.wall
    assert machine.clock.adjust() == 0


STEPS = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(-20_000, 20_000), st.sampled_from(["now", "adjust"])), max_size=60
)


@given(STEPS)
def test_it_never_runs_backwards(steps: list[tuple[int, int, str]]) -> None:
    """Whatever is done to the wall clock, no reading is less than the one before, and none falls behind it."""
    machine = Machine()
    last = machine.clock.now()
    for ms, jump, what in steps:
        machine.run(ms)
        machine.wall += jump
        if what == "adjust":
            assert machine.clock.adjust() >= 0
            assert machine.clock.now() >= machine.wall
        now = machine.clock.now()
        assert now >= last
        last = now


@given(STEPS)
def test_it_runs_at_half_speed_at_least(steps: list[tuple[int, int, str]]) -> None:
    """However often the wall clock is set back, windows go on ending: half of the time that passes is shown."""
    machine = Machine()
    first = machine.clock.now()
    passed = 0
    for ms, jump, what in steps:
        machine.run(ms)
        machine.wall += jump
        passed += ms
        if what == "adjust":
            machine.clock.adjust()
        assert machine.clock.now() - first >= passed // 2


def test_a_clock_that_steps_back_itself_stands() -> None:
    """Should the monotonic clock go back, the reading stands until it has caught up."""
    machine = Machine()
    machine.run(10)
    assert machine.clock.now() == T + 10
    machine.monotonic -= 5
    assert machine.clock.now() == T + 10
    machine.monotonic += 6
    assert machine.clock.now() == T + 11


@pytest.mark.parametrize("to", [0, 1, T, LAST_INSTANT])
def test_a_manual_clock_stands_until_it_is_moved(to: int) -> None:
    """A manual clock shows what it was last set to, also an earlier time, and follows nothing."""
    clock = ManualClock(T)
    assert clock.now() == clock.now() == T
    assert clock.adjust() == 0
    assert clock.move(to) == to
    assert clock.now() == to
    assert clock.manual is True


@pytest.mark.parametrize("to", [-1, LAST_INSTANT + 1, 2**63])
def test_a_manual_clock_cannot_leave_the_calendar(to: int) -> None:
    """An instant that the calendar cannot express is refused, and the clock stays."""
    clock = ManualClock(T)
    with pytest.raises(ValueError, match=r"the clock can be set to 0\.\."):
        clock.move(to)
    assert clock.now() == T
