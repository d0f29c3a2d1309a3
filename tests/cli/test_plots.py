"""Plots take the page's colours, leave the page's style alone, and hold any value."""

from __future__ import annotations

import re

import pytest

from torch_cudal1.cli.view import plots
from torch_cudal1.cli.view.plots import Curve
from torch_cudal1.core.report import Interval


def test_plots_take_the_pages_colours_and_do_not_style_the_page() -> None:
    svg = plots.plot_speedups(
        [plots.SpeedupPair("#010203 $x$", Interval(2.05, 1.98, 2.11), None)], label="l"
    )
    assert "var(--ink)" in svg
    assert "<style" not in svg
    assert "#010203 $x$" in svg


@pytest.mark.parametrize("values", [(1.0, 1.0, 1.0), (0.4, 0.3, 0.5), (4000.0, 3000.0, 5000.0)])
def test_plots_hold_any_speed_up(values: tuple[float, float, float]) -> None:
    svg = plots.plot_speedups([plots.SpeedupPair("m", Interval(*values), None)], label="l")
    assert ">1x<" in svg


@pytest.mark.skipif(not plots.available()[0], reason=plots.available()[1])
def test_a_curve_is_drawn_in_the_pages_colours_with_its_name_as_it_is():
    drawn = plots.plot_curves(
        [Curve("$a$ <b>", (0, 1), (1.0, 2.0))], label="x", x="step", y="y", salt="s"
    )
    assert "$a$ &lt;b&gt;" in drawn
    assert "var(--first)" in drawn
    assert "#0a0b0c" not in drawn


@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (0.01, 1.5), (0.8, 5000.0)])
def test_an_axis_has_few_ticks_and_no_change_among_them(low: float, high: float) -> None:
    ticks = plots._choose_ticks(low, high)
    assert 1 in ticks
    assert 2 <= len(ticks) <= 11
    assert all(low <= tick <= high for tick in ticks)


def test_an_error_of_zero_is_not_drawn_and_costs_no_other() -> None:
    svg = plots.plot_errors(
        [plots.ErrorPair("exact", 0.0, 1e-7), plots.ErrorPair("absent", None, None)], label="errors"
    )
    assert "exact" in svg
    assert 'aria-label="errors"' in svg


def test_equal_plots_are_equal_bytes_and_two_plots_share_no_id() -> None:
    pairs = [plots.SpeedupPair("m", Interval(2.0, 1.9, 2.1), None)]
    first = plots.plot_speedups(pairs, label="l")
    assert first == plots.plot_speedups(pairs, label="l")
    errors = plots.plot_errors([plots.ErrorPair("m", 1e-7, 1e-8)], label="l")
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (first, errors)]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_without_matplotlib_the_reason_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plots, "_MATPLOTLIB", False)
    possible, reason = plots.available()
    assert not possible
    assert "torch-cudal1[report]" in reason
