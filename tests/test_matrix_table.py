"""What `make test` leaves to `make test-all`, and that every file keeps something."""

from __future__ import annotations

from tests.matrix_table import choose_evenly, make_table, read_table


def test_cases_are_spread_evenly() -> None:
    assert choose_evenly(10, 3) == {0, 3, 6}
    assert choose_evenly(3, 5) == {0, 1, 2}
    assert choose_evenly(7, 0) == frozenset()


def test_an_expensive_matrix_keeps_what_fits_and_cheap_tests_stay_whole() -> None:
    seconds = {"a.py::dear": [0.5] * 20, "a.py::cheap": [0.1] * 20, "b.py::only": [40.0, 50.0]}
    assert make_table(seconds) == {"a.py::dear": 2, "b.py::only": 1}


def test_counts_of_the_table_are_counts() -> None:
    assert all(count >= 0 and "::" in name for name, count in read_table().items())
