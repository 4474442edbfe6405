"""Frames, slots and deadlines by themselves: what is late falls back, once, and nothing else does."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.forward import Deadlines, Frame, Slot
from tests.fakes import FakeAsker, FakeClock
from tests.helpers import fields


def waiting(indices: Sequence[int] = (0,), asker: FakeAsker | None = None) -> tuple[FakeAsker, list[Slot]]:
    """A frame of three places, of which slots at `indices` are to come; a slot that fails answers why."""
    asker = asker or FakeAsker()
    frame = Frame(asker, ["own"] * 3, len(indices), lambda answers: tuple(answers))
    return asker, [Slot(frame, index, fields(), lambda _, why: why) for index in indices]


def test_a_frame_is_sent_when_the_last_of_its_slots_is_settled() -> None:
    """Places that were answered already stay as they are."""
    asker, slots = waiting((2, 0))
    slots[1].failed("no", True)
    assert not asker.sent
    assert slots[0].waiting
    slots[0].answered((0, 10, 9, 0, 0), "near")
    slots[0].failed("late", True)
    assert asker.sent == [("no", "own", (0, 10, 9, 0, 0, "near"))]


def test_deadlines_fail_what_is_late_and_nothing_else() -> None:
    """Each at its own time, whatever order they were added in; what was settled before is left alone."""
    clock = FakeClock()
    deadlines = Deadlines(clock.later, clock.now)
    askers: dict[tuple[int, float], FakeAsker] = {}
    for seconds in (0.3, 0.1, 0.2, 0.1):
        askers[len(askers), seconds], slots = waiting()
        deadlines.add(seconds, slots)
    settled, slots = waiting()
    deadlines.add(0.1, slots)
    slots[0].answered((0, 10, 9, 0, 0), "near")
    for instant in (0.09, 0.12, 0.22, 0.32):
        clock.pass_by(1_000 + instant - clock.seconds)
        late = {key for key, asker in askers.items() if asker.sent}
        assert late == {key for key in askers if key[1] < instant}
    assert settled.sent == [((0, 10, 9, 0, 0, "near"), "own", "own")]
    assert [asker.sent for asker in askers.values()] == [[("no answer in time", "own", "own")]] * 4


def test_deadlines_tick_only_while_something_waits() -> None:
    """An idle daemon is not woken; one timer serves all, and what comes after a pause is watched again."""
    clock = FakeClock()
    deadlines = Deadlines(clock.later, clock.now)
    assert not clock.timers
    for _ in range(3):
        for seconds in (0.1, 0.2, 0.1):
            deadlines.add(seconds, waiting()[1])
            assert len(clock.timers) == 1
        clock.pass_by(0.15)
        assert len(clock.timers) == 1
        clock.pass_by(0.15)
        assert not clock.timers
    asker, slots = waiting()
    deadlines.add(0.1, slots)
    clock.pass_by(0.12)
    assert asker.sent


def test_deadlines_catch_up_after_a_stall() -> None:
    """A loop that stood still for seconds fails everything that is late at its next tick."""
    clock = FakeClock()
    deadlines = Deadlines(clock.later, clock.now)
    frames = [waiting() for _ in range(5)]
    for number, (_, slots) in enumerate(frames):
        deadlines.add(0.1 * number, slots)
    clock.seconds += 60
    clock.pass_by(0.01)
    assert all(asker.sent for asker, _ in frames)
    assert not clock.timers


def test_a_fallback_that_raises_costs_no_other_request_its_deadline() -> None:
    """A fault in one request's fallback must not stop the clock of all others."""
    clock = FakeClock()
    deadlines = Deadlines(clock.later, clock.now)
    good, slots = waiting()

    def fall_back(request: object, why: str) -> object:
        raise KeyError(why)

    bad = Slot(Frame(FakeAsker(), [None], 1, bytes), 0, fields(), fall_back)
    deadlines.add(0.1, [bad])
    deadlines.add(0.2, slots)
    for _ in range(20):
        try:
            clock.pass_by(0.05)
        except KeyError:
            pass  # a loop reports it and goes on
    assert good.sent
