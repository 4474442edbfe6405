"""Counts by path and by name: what is told apart, and what is counted together."""

from __future__ import annotations

import pytest

from sidecar.tally import OTHER, Tally


def counted(tally: Tally) -> dict[str, list[int]]:
    """The owned counts of every name."""
    return {name: row.owned for name, row in tally.rows()}


def test_the_first_names_have_rows_of_their_own_and_the_rest_share_one() -> None:
    """With room for two names, the third and fourth are counted together; the first two keep their rows."""
    tally = Tally(2)
    for name, hits in (("a", 1), ("b", 2), ("c", 4), ("d", 8), ("a", 16)):
        tally.row(name).owned[0] += hits
    assert counted(tally) == {"a": [17, 0, 0], "b": [2, 0, 0], OTHER: [12, 0, 0]}


@pytest.mark.parametrize("names", [0, 5])
def test_a_limit_that_is_called_other_makes_no_second_row(names: int) -> None:
    """Two series of one name would be no exposition."""
    tally = Tally(names)
    tally.row(OTHER).owned[1] += 3
    assert [name for name, _ in tally.rows()] == [OTHER]
    assert tally.other.owned == [0, 3, 0]


def test_totals_are_over_all_names_and_by_path() -> None:
    """Each path's counts, under, over and error, whatever the names."""
    tally = Tally(1)
    tally.row("a").owned[0] += 1
    tally.row("b").owned[1] += 2
    tally.other.owned[2] += 4
    tally.row("a").replica[1] += 8
    tally.row("b").fallback[0] += 16
    assert [tally.total(path) for path in ("owned", "replica", "fallback")] == [[1, 2, 4], [0, 8, 0], [16, 0, 0]]
