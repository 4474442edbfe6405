"""Counts by path and by name: what is told apart, and what is counted together."""

from __future__ import annotations

import pytest

from sidecar.tally import _MAX_REMEMBERED, OTHER, RESULTS, Counts, Tally


def numbers(counts: Counts) -> list[int]:
    """Under the limit, over it, errors."""
    return [getattr(counts, result) for result in RESULTS]


def counted(tally: Tally) -> dict[str, list[int]]:
    """The owned counts of every name."""
    return {name: numbers(row.owned) for name, row in tally.rows()}


def test_the_first_names_have_rows_of_their_own_and_the_rest_share_one() -> None:
    """With room for two names, the third and fourth are counted together; the first two keep their rows."""
    tally = Tally(2)
    for name, hits in (("a", 1), ("b", 2), ("c", 4), ("d", 8), ("a", 16)):
        tally.row(name).owned.under_limit += hits
    assert counted(tally) == {"a": [17, 0, 0], "b": [2, 0, 0], OTHER: [12, 0, 0]}


@pytest.mark.parametrize("names", [0, 5])
def test_a_limit_that_is_called_other_makes_no_second_row(names: int) -> None:
    """Two series of one name would be no exposition."""
    tally = Tally(names)
    tally.row(OTHER).owned.over_limit += 3
    assert [name for name, _ in tally.rows()] == [OTHER]
    assert numbers(tally.other.owned) == [0, 3, 0]


def test_totals_are_over_all_names_and_by_path() -> None:
    """Each path's counts, under, over and error, whatever the names."""
    tally = Tally(1)
    tally.row("a").owned.under_limit += 1
    tally.row("b").owned.over_limit += 2
    tally.other.owned.error += 4
    tally.row("a").replica.over_limit += 8
    tally.row("b").fallback.under_limit += 16
    assert [numbers(tally.total(path)) for path in ("owned", "replica", "fallback")] == [
        [1, 2, 4],
        [0, 8, 0],
        [16, 0, 0],
    ]


def test_more_names_than_are_remembered_lose_no_count_and_no_row() -> None:
    """However many names come, those with rows keep them, and what is remembered stays bounded."""
    tally = Tally(2)
    names = ["a", "b", *(str(number) for number in range(2 * _MAX_REMEMBERED))]
    for name in names * 2:
        tally.row(name).owned.under_limit += 1
        assert tally.owned[name] is tally.row(name).owned
    assert counted(tally) == {"a": [2, 0, 0], "b": [2, 0, 0], OTHER: [4 * _MAX_REMEMBERED, 0, 0]}
    assert len(tally.owned) <= _MAX_REMEMBERED


def test_each_status_has_its_own_count() -> None:
    """Also as a number of another kind, since msgpack has several."""
    counts = Counts()
    for status in (0, 1, 1, 2, 2, 2, False, True, 1.0, 2.0):
        counts.see(status)
    assert numbers(counts) == [2, 4, 4]
