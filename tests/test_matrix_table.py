"""What `make test` leaves to `make test-all`, and that every file keeps something."""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix_table import (
    choose_evenly,
    find_cases_outside_share,
    make_table,
    read_table,
)


def test_cases_are_spread_evenly() -> None:
    assert choose_evenly(10, 3) == {0, 3, 6}
    assert choose_evenly(3, 5) == {0, 1, 2}
    assert choose_evenly(7, 0) == frozenset()


def test_an_expensive_matrix_keeps_what_fits_and_cheap_tests_stay_whole() -> None:
    seconds = {"a.py::dear": [0.5] * 20, "a.py::cheap": [0.1] * 20, "b.py::only": [40.0, 50.0]}
    assert make_table(seconds) == {"a.py::dear": 2, "b.py::only": 1}


def test_counts_of_the_table_are_counts() -> None:
    assert all(count >= 0 and "::" in name for name, count in read_table().items())


class Case:
    """A stand-in for a test's case."""

    def __init__(self, number: int) -> None:
        self.number = number

    def get_closest_marker(self, name: str) -> bool:
        return name == "matrix" and self.number % 3 > 0


def test_shares_have_every_case_of_the_matrices_exactly_once() -> None:
    cases: list[Any] = [Case(number) for number in range(100)]
    matrix = [case for case in cases if case.get_closest_marker("matrix")]
    shares = []
    for position in range(4):
        left_out = find_cases_outside_share(cases, f"{position}/4")
        assert set(left_out) < set(matrix)
        shares.append([case for case in matrix if case not in left_out])
    assert sorted(case.number for share in shares for case in share) == [
        case.number for case in matrix
    ]
    assert {len(share) for share in shares} == {16, 17}
    assert find_cases_outside_share(cases, "0/1") == []


@pytest.mark.parametrize("share", ["", "1", "1/0", "4/4", "-1/4", "a/4", "1/4/2"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="expected K/N"):
        find_cases_outside_share([], share)
