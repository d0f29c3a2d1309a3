"""Tables and page from rows: complete, labelled, escaped, and no headline where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.kernelbench.job import PROFILES, Job
from benchmarks.kernelbench.pages import render_markdown
from benchmarks.kernelbench.tables import compute_headline, group_rows

JOB = Job("cuda:0", PROFILES["quick"])
WHERE = {
    "gpu": "Some GPU",
    "torch": "2.11",
    "triton": "3.6",
    "python": "3.12",
    "version": "abc",
    "package": "1",
    "cores": 16,
    "cpu": "C",
}
BASELINES_US = {"eager": 100.0, "torch.compile": 80.0, "reduce-overhead": 160.0}


def make_ratio(value: float) -> dict[str, float]:
    return {"speedup": value, "low": value * 0.99, "high": value * 1.01, "steady": 1}


def make_columns(speedup: float, status: str) -> dict[str, Any]:
    """Columns of a task whose eager takes 100 us, torch.compile 80 and reduce-overhead 160; no CUDA
    graph could be captured.
    """
    columns: dict[str, Any] = {
        name: {"status": "ok", "reason": "", "us": us, "host_us": 5.0, "device_us": us}
        for name, us in BASELINES_US.items()
    }
    columns["CUDA graph"] = {
        "status": "failed",
        "reason": "RuntimeError: <capture> | not permitted",
    }
    columns["cudal1"] = {
        "status": status,
        "reason": "" if status == "ok" else "far off",
        "us": 80 / speedup,
        "host_us": 2.5,
        "device_us": 80 / speedup,
        "checked": {"by": "float64", "reason": "", "error_ratio": 1.25},
    }
    return columns


def make_row(
    key: str,
    speedup: float,
    *,
    status: str = "ok",
    job: Job = JOB,
    of: int = 3,
    **package_facts: Any,
) -> dict[str, Any]:
    """A task with those columns, the package's own `speedup` times as fast as the best baseline."""
    against = {
        "torch.compile": {"eager": make_ratio(1.25), "best": make_ratio(1.0)},
        "reduce-overhead": {"eager": make_ratio(0.625)},
    }
    if status == "ok":
        ratios = {base: make_ratio(speedup * us / 80) for base, us in BASELINES_US.items()}
        against["cudal1"] = ratios | {"best": make_ratio(speedup)}
    search_facts = {
        "tune_s": 12.0,
        "swapped": speedup > 1,
        "techniques": ["softmax"] if speedup > 1 else [],
        "runs": ["inductor"],
        **package_facts,
    }
    task = {"key": key, "level": int(key[0]), "number": int(key[2:]), "name": f"Task <{key}>"}
    return {
        "task": {**task, "sizes": "today", "scale": job.scale},
        "job": job.to_json(),
        "columns": make_columns(speedup, status),
        "against": against,
        "best": "torch.compile",
        "ours": search_facts,
        "arms": {},
        "demand": {"floor_us": 20.0},
        "environment": WHERE,
        "of": of,
    }


ROWS = [
    make_row("1/1", 2.0),
    make_row("1/2", 0.9, fallbacks=["bind: no"]),
    make_row("2/1", 4.0, status="wrong"),
]


def find_cells(text: str, start: str) -> list[str]:
    """The first line of any table that begins with `start`."""
    line = next(line for line in text.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_first_table_has_every_level_against_every_baseline() -> None:
    text = render_markdown(ROWS)
    # 2.0, 0.9 and a wrong one as 1.0: mean 1.3, geometric mean 1.8^(1/3), clamped 2^(1/3)
    expected = ["1.300", "2.000", "1.500", "1.000", "0.950", "2/3", "1/3", "1.216", "1.260"]
    assert find_cells(text, "| best of all | all |") == ["best of all", "all", *expected]
    assert find_cells(text, "| best of all | 2 |")[2:] == ["1.000"] * 5 + [
        "0/1",
        "0/1",
        "1.000",
        "1.000",
    ]
    assert find_cells(text, "| eager | 1 |")[-2] == f"{(2.5 * 1.125) ** 0.5:.3f}"
    # it runs nowhere
    assert find_cells(text, "| CUDA graph | all |")[2:] == ["-"] * 5 + [
        "0/0",
        "0/0",
        "-",
        "-",
    ]


def test_regressions_failures_and_wrong_results_are_listed_with_their_reasons() -> None:
    text = render_markdown(ROWS)
    trouble = text[text.index("### Slower than") : text.index("### Every task")]
    assert "| 1/2 Task <1/2> | cudal1 | slower | 0.900 [0.891, 0.909] of torch.compile |" in trouble
    assert "| 2/1 Task <2/1> | cudal1 | wrong | far off |" in trouble
    assert "| 1/2 Task <1/2> | cudal1 | fell back | bind: no |" in trouble
    assert trouble.count("CUDA graph | failed") == 3
    assert "1/1 Task <1/1> | cudal1" not in trouble


def test_kernels_that_cost_a_process_its_gpu_are_listed_whatever_runs_in_the_end() -> None:
    died = [[1, "AcceleratorError: CUDA error: an illegal memory access was encountered\nmore"]]
    text = render_markdown(
        [
            make_row("1/1", 2.0, heats=[{"failures": died}]),
            make_row("1/2", 2.0, heats=[{"failures": [[0, "not eager's"]]}]),
        ]
    )
    trouble = text[text.index("### Slower than") : text.index("### Every task")]
    assert (
        "| 1/1 Task <1/1> | cudal1 | a kernel of ours cost a judge's process its GPU | AcceleratorError: CUDA error: an"
        in trouble
    )
    assert "1/2 Task <1/2> | cudal1" not in trouble


def test_a_table_has_what_won_and_what_the_search_cost() -> None:
    text = render_markdown(ROWS)
    # the wrong one was swapped too, and is worth 1.0
    assert find_cells(text, "| softmax |") == [
        "softmax",
        "2",
        "1.414",
    ]
    assert "median 12.0, longest 12.0" in text
    assert "clock" not in text[text.index("if each search had stopped") :][:400]
    timed = render_markdown([{**row, "gpu_s": {"waited": 4.5, "held": 2.0}} for row in ROWS])
    assert (
        "Without waiting for the GPU's clock median 7.5 (3 tasks that tell); that clock was held for 2.0"
        in timed
    )
    assert find_cells(text, "| 10 |")[1] == "1.000"
    assert find_cells(text, "| 20 |")[1] == "1.260"


def test_device_and_host_clocks_have_columns_of_their_own() -> None:
    # device: 2.0, 0.9 and 4.0 (each clock alone counts what was timed); host: 5.0 over 2.5
    # throughout
    assert find_cells(render_markdown(ROWS), "| cudal1 | 1.931 |") == ["cudal1", "1.931", "2.000"]


def test_every_level_has_its_distance_to_the_lower_bound() -> None:
    # device times over 20 us: ours 40, 88.9 and 20 us, the best baseline's 80 us throughout
    assert find_cells(render_markdown(ROWS), "| cudal1 | all | 3 |")[3:] == [
        f"{(2 * 4.4444444 * 1) ** (1 / 3):.3f}",
        "4.444",
    ]
    assert find_cells(render_markdown(ROWS), "| best baseline | 2 | 1 |")[3:] == ["4.000", "4.000"]


def test_rows_of_another_precision_or_size_never_share_a_table() -> None:
    other = [
        make_row("1/1", 2.0, job=replace(JOB, rights="tf32")),
        make_row("1/1", 2.0, job=replace(JOB, scale=8)),
    ]
    groups = group_rows([*ROWS, *other])
    assert [len(group.rows) for group in groups] == [3, 1, 1]
    assert "TF32 allowed everywhere, for everyone" in groups[1].title
    assert "SIZES CUT DOWN by 8: no result" in groups[2].title
    assert all(group.title in render_markdown([*ROWS, *other]) for group in groups)


def test_a_headline_needs_every_task_at_its_own_size() -> None:
    (complete,) = group_rows(ROWS)
    assert compute_headline(complete)["best"] == pytest.approx(1.8 ** (1 / 3))
    (part,) = group_rows(ROWS[:2])
    assert "INCOMPLETE: 1 tasks have no row yet" in part.about
    with pytest.raises(ValueError, match="1 of 3 tasks have no row"):
        compute_headline(part)
    (small,) = group_rows([make_row(f"1/{n}", 2.0, job=replace(JOB, scale=4)) for n in (1, 2, 3)])
    with pytest.raises(ValueError, match="cut down by 4: that is no result"):
        compute_headline(small)
    (bare,) = group_rows([make_row(f"1/{n}", 2.0, job=replace(JOB, ours=False)) for n in (1, 2, 3)])
    with pytest.raises(ValueError, match="own column was not measured"):
        compute_headline(bare)
