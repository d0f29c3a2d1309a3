"""The numbers of the tables, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.kernelbench.statistics import (
    Ratio,
    compute_fast_p,
    compute_geomean,
    compute_quartiles,
    compute_ratios,
    compute_tuning_curve,
    summarise,
)


def make_row(
    key: str,
    speeds: dict[str, float] | None,
    *,
    status: str = "ok",
    tune_s: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A row whose contender has these speed-ups over each baseline; None: it has none."""
    columns = {name: {"status": "ok", "us": 10.0} for name in ("eager", "torch.compile")} | {
        "cudal1": {"status": status}
    }
    ratios_by_column = (
        {}
        if speeds is None
        else {
            "cudal1": {
                name: {"speedup": s, "low": s, "high": s * 1.01} for name, s in speeds.items()
            }
        }
    )
    task = {"key": key, "level": int(key[0]), "number": int(key[2:]), "name": "T"}
    return {
        "task": task,
        "columns": columns,
        "against": ratios_by_column,
        "ours": {"tune_s": tune_s},
        "best": "eager",
    }


def test_the_statistics_are_those_of_the_papers_tables() -> None:
    summary = summarise(
        [Ratio(f"1/{n}", 1, speed, speed, True) for n, speed in enumerate((0.5, 1.0, 2.0, 4.0), 1)]
    )
    assert (summary.mean, summary.most) == (1.875, 4.0)
    assert (summary.p25, summary.p50, summary.p75) == (0.875, 1.5, 2.5)
    assert (summary.tasks, summary.success, summary.counted) == (4, 4, 2)
    assert summary.geomean == pytest.approx(math.sqrt(2))
    assert summary.clamped == pytest.approx(8 ** (1 / 4))
    assert summary.slower == ("1/1",)


def test_quartiles_are_those_of_the_published_file_of_scores() -> None:
    # Of 1..5 the middle is 3 and the quarters 2 and 4; of two values the quarters lie a quarter of
    # the way in (numpy's rule).
    assert compute_quartiles([5.0, 1.0, 4.0, 2.0, 3.0]) == (2.0, 3.0, 4.0)
    assert compute_quartiles([1.0, 2.0]) == (1.25, 1.5, 1.75)
    assert compute_quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert compute_quartiles([]) == (None, None, None)


@pytest.mark.parametrize("status", ["failed", "wrong", "refused", "withdrawn"])
def test_what_has_no_right_answer_counts_as_one_and_is_never_dropped(status: str) -> None:
    rows = [make_row("1/1", {"best": 4.0}), make_row("1/2", None, status=status)]
    summary = summarise(compute_ratios(rows, "cudal1"))
    assert (summary.tasks, summary.success, summary.mean, summary.geomean) == (2, 1, 2.5, 2.0)
    assert summary.failed == ("1/2",)
    assert summary.clamped == 2.0


def test_a_wrong_answer_keeps_no_speed_even_if_it_was_timed() -> None:
    assert [
        r.speedup
        for r in compute_ratios([make_row("1/1", {"best": 9.0}, status="wrong")], "cudal1")
    ] == [1.0]


def test_a_task_whose_process_died_counts_as_one_against_every_baseline() -> None:
    died = {**make_row("1/2", None), "columns": {}, "best": None}
    for base in ("best", "eager", "torch.compile"):
        assert [r.speedup for r in compute_ratios([died], "cudal1", base)] == [1.0]


def test_a_baseline_that_does_not_run_is_no_denominator_for_that_task_alone() -> None:
    rows = [make_row("1/1", {"best": 2.0, "CUDA graph": 3.0}), make_row("1/2", {"best": 2.0})]
    assert [r.key for r in compute_ratios(rows, "cudal1", "CUDA graph")] == ["1/1"]
    assert [r.key for r in compute_ratios(rows, "cudal1")] == ["1/1", "1/2"]
    lost = make_row("1/3", None, status="failed")
    # nor does a failure get a ratio to what is not there
    assert compute_ratios([lost], "cudal1", "CUDA graph") == []


def test_a_regression_beyond_noise_is_one_whose_whole_interval_is_below() -> None:
    summary = summarise(
        [
            Ratio("1/1", 1, 0.97, 1.02, True),
            Ratio("1/2", 1, 0.9, 0.95, True),
            Ratio("1/3", 1, 0.98, 0.98, True),
        ]
    )
    assert summary.slower == ("1/1", "1/2")
    assert summary.slower_beyond_noise == ("1/2",)


def test_fast_p_is_a_share_of_all_tasks_and_failures_are_never_fast() -> None:
    ratios = [
        Ratio("1/1", 1, 2.0, 2.0, True),
        Ratio("1/2", 1, 1.0, 1.0, False),
        Ratio("1/3", 1, 0.9, 0.9, True),
    ]
    assert compute_fast_p(ratios, (0.5, 1.0, 2.0)) == [(0.5, 2 / 3), (1.0, 1 / 3), (2.0, 0.0)]


def test_before_its_search_has_ended_a_task_counts_as_one() -> None:
    rows = [make_row("1/1", {"best": 4.0}, tune_s=10.0), make_row("1/2", {"best": 0.5}, tune_s=2.0)]
    assert compute_tuning_curve(rows, "cudal1") == [
        (0.0, 1.0),
        (2.0, 1.0),
        (10.0, pytest.approx(2.0)),
    ]


def test_there_is_no_mean_of_nothing() -> None:
    assert compute_geomean([]) is None
    assert summarise([]).geomean is None
