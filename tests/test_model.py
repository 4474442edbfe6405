"""The table against the slow model: random histories of requests, with every answer compared."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import event, given, settings
from hypothesis import strategies as st

from sidecar.messages import Verdict
from sidecar.table import Table
from tests.helpers import DRAIN, GREGORIAN, INT64_MAX, INT64_MIN, LEAKY, O, T, U, decide, epoch_ms
from tests.model import Model

SKEW = 20
STARTS = (T, epoch_ms("2024-02-28T23:59:59.950+00:00"), epoch_ms("2024-12-31T23:59:59.990+00:00"))
SOME = settings(max_examples=250)
DAY = 86_400_000


@dataclass(frozen=True)
class Step:
    """One request, `wait` ms after the one before; `lag` is created_at before the clock; `sweep` is a budget."""

    wait: int
    name: str
    unique_key: str
    hits: int
    limit: int
    duration: int
    algorithm: int
    behavior: int
    burst: int
    lag: int | None
    sweep: int

    def request(self, now: int) -> tuple[str, str, int, int, int, int, int, int, int | None]:
        """The nine values at `now`."""
        created_at = None if self.lag is None else now - self.lag
        return (
            self.name,
            self.unique_key,
            self.hits,
            self.limit,
            self.duration,
            self.algorithm,
            self.behavior,
            self.burst,
            created_at,
        )


@st.composite
def _steps(draw: st.DrawFn, extreme: bool = False) -> Step:
    if extreme:
        limits = bursts = durations = st.sampled_from([0, 1, 3, 2**31, 2**62, INT64_MAX - 1, INT64_MAX])
        hits = st.sampled_from([INT64_MIN, INT64_MIN + 1, -(2**62), -1, 0, 1, 2**62, INT64_MAX - 1, INT64_MAX])
        waits = st.sampled_from([0, 1, 1000, DAY, 40_000 * DAY])
    else:
        limits = st.sampled_from([0, 1, 2, 3, 5, 7, 10, 10, 10])
        bursts = st.sampled_from([0, 0, 0, 1, 4, 12])
        durations = st.sampled_from([0, 1, 3, 10, 10, 100, 100, 1000])
        hits = st.one_of(st.integers(-4, 12), st.sampled_from([0, 1, 1, 3, 5, 10]))
        waits = st.one_of(
            st.sampled_from([0, 0, 0, 1, 10, 20, 99, 100, 101, 60_000, DAY, 31 * DAY]), st.integers(0, 150)
        )
    flags = draw(st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, 1, 8, 16, 17]))
    flags |= draw(st.sampled_from([0, 0, DRAIN]))
    gregorian = draw(st.integers(0, 5)) == 5
    return Step(
        wait=draw(waits),
        name=draw(st.sampled_from(["a", "a", "a_b"])),
        unique_key=draw(st.sampled_from(["c", "c", "c", "b_c"])),
        hits=draw(hits),
        limit=draw(limits),
        duration=draw(st.integers(0, 5)) if gregorian else draw(durations),
        algorithm=draw(st.sampled_from([0, 1])),
        behavior=flags | (GREGORIAN if gregorian else 0),
        burst=draw(bursts),
        lag=draw(st.one_of(st.none(), st.none(), st.none(), st.integers(-SKEW - 5, SKEW + 5))),
        sweep=draw(st.integers(0, 80)),
    )


@st.composite
def _steady(draw: st.DrawFn) -> list[Step]:
    """A history of one bucket whose terms seldom change, so that levels and windows build up."""
    base = draw(_steps())
    changing = draw(st.sets(st.sampled_from(["limit", "duration", "burst", "behavior", "algorithm"]), max_size=2))
    kept = {name: value for name, value in vars(base).items() if name not in {"wait", "hits", "lag", "sweep"}}
    steps = []
    for step in draw(st.lists(_steps(), min_size=2, max_size=30)):
        same = {name: value for name, value in kept.items() if name not in changing}
        if {"duration", "behavior"} & changing:  # they are valid together only
            same = {name: value for name, value in same.items() if name not in {"duration", "behavior"}}
        steps.append(Step(**{**vars(step), **same}))
    return steps


HISTORIES = st.one_of(_steady(), st.lists(_steps(), min_size=1, max_size=30))
EXTREMES = st.lists(_steps(extreme=True), min_size=1, max_size=12)


def _check_against_the_model(start: int, steps: list[Step]) -> None:
    model = Model(SKEW)
    unswept, swept, some = (Table(max_clock_skew=SKEW) for _ in range(3))
    now = start
    for number, step in enumerate(steps):
        now += step.wait
        request = step.request(now)
        wanted = model.decide(now, *request)
        where = f"step {number} at start + {now - start}: {step}"
        assert decide(unswept, now, request) == wanted, f"never swept, {where}"
        assert decide(swept, now, request) == wanted, f"swept after every request, {where}"
        assert decide(some, now, request) == wanted, f"swept now and then, {where}"
        status, limit, remaining, reset_time, retry_after = wanted
        assert limit == step.limit
        assert 0 <= remaining <= INT64_MAX
        assert reset_time <= INT64_MAX
        assert 0 <= retry_after <= INT64_MAX
        if step.algorithm == LEAKY:
            assert remaining <= (step.burst or step.limit)
        event(f"status {status}")
        swept.sweep(now, 1000)
        some.sweep(now, step.sweep)


@given(start=st.sampled_from(STARTS), steps=HISTORIES)
@SOME
def test_every_answer_is_the_models(start: int, steps: list[Step]) -> None:
    """Whatever is asked in whatever order, and however often is swept, every field of every answer is the model's."""
    _check_against_the_model(start, steps)


@given(steps=EXTREMES)
@SOME
def test_answers_to_extreme_numbers_are_the_models(steps: list[Step]) -> None:
    """Numbers at the ends of int64 are counted exactly, and no answer leaves int64."""
    _check_against_the_model(T, steps)


def _replay(start: int, steps: list[Step], wait: int) -> Verdict:
    """The answer to the last step, asked once more `wait` ms after a whole history."""
    table = Table(max_clock_skew=SKEW)
    now = start
    for step in steps:
        now += step.wait
        decide(table, now, step.request(now))
    now += wait
    return decide(table, now, steps[-1].request(now))


@given(start=st.sampled_from(STARTS), steps=HISTORIES)
@SOME
def test_retry_after_is_exact(start: int, steps: list[Step]) -> None:
    """A refused request that could be admitted is admitted after just `retry_after` ms, and after one less is not."""
    now = start
    table = Table(max_clock_skew=SKEW)
    for number, step in enumerate(steps):
        now += step.wait
        status, limit, _, _, retry_after = decide(table, now, step.request(now))
        capacity = (step.burst or limit) if step.algorithm == LEAKY else limit
        if status == O and limit and step.hits <= capacity:
            event("refused for now")
            history = steps[: number + 1]
            assert retry_after > 0
            assert _replay(start, history, retry_after)[0] == U, f"too short a wait: {retry_after}"
            assert _replay(start, history, retry_after - 1)[0] == O, f"too long a wait: {retry_after}"
