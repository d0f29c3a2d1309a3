"""One task from its text to its row: tuned, measured, checked before and after, whatever a column
does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.kernelbench import baselines, child, contenders
from benchmarks.kernelbench.child import Bench
from benchmarks.kernelbench.job import COMPILE, EAGER, OURS, RELEASE, Job
from benchmarks.kernelbench.loading import (
    Demand,
)
from tests.benchmarks.kernelbench.examples import DIAGONAL, JOB, load_source


class RecordingChannel:
    """Keeps what was told, and grants everything."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.asked: list[int | None] = []

    def stage(self, name: str, column: str = "") -> None:
        self.stages.append(name)

    def memory(self, size_bytes: int | None, kept_bytes: int = 0) -> None:
        self.asked.append(size_bytes)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        self.stages.append("quiet")
        yield
        self.stages.append("loud")


def bench(tmp_path: Path, source: str = DIAGONAL, job: Job = JOB, **spec: Any) -> Bench:
    return Bench(
        load_source(tmp_path, source),
        job,
        RecordingChannel(),
        {"cache": str(tmp_path / "cudal1"), "source": source, **spec},
    )  # type: ignore[arg-type]


def measure_row(task_bench: Bench) -> dict[str, Any]:
    with torch.no_grad():
        child._prepare(task_bench, 1000)
        row = child._measure_task(task_bench, Demand(1_000, 500, 0, 300))
    json.dumps(row, allow_nan=False)
    return row


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No column needs a compiler: torch.compile is eager under another name."""
    monkeypatch.setattr(child, "STARTS", {**baselines.STARTS, COMPILE: lambda module, _: module})


def patch_tuning(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tuned(
        name: str, module: nn.Module, inputs: object, job: Job, cache: Path, say: Any
    ) -> contenders.TunedModule:
        say("judging", 0.5)
        return contenders.TunedModule(
            lambda *inputs: call(module, *inputs),
            {"tune_s": 1.0, "swapped": True, "techniques": ["t"]},
        )

    monkeypatch.setattr(contenders, "tune_module", tuned)


def test_a_search_wins_a_task_and_the_row_has_all_of_it(tmp_path: Path, fast: None) -> None:
    # an arm is searched as the package's own column is, here without Inductor's long compilations
    arm = "without compile"
    task_bench = bench(tmp_path, job=replace(JOB, ours=False, arms=(arm,)))
    row = measure_row(task_bench)
    facts, column = row["arms"][arm], row["columns"][arm]
    assert column["checked"]["by"] == ("float64" if facts["swapped"] else "eager")
    assert (column["checked"]["reason"], (column["checked"]["error_ratio"] or 0) <= 2) == ("", True)
    assert {name: cell["status"] for name, cell in row["columns"].items()} == {
        EAGER: "ok",
        COMPILE: "ok",
        arm: "ok",
    }
    assert facts["counters"]["regions_tuned"] == 1
    assert facts["tune_s"] > 0
    assert facts["tried"][0]["techniques"] == ["diag_matmul"]
    assert row["against"][arm]["best"].keys() == {"speedup", "low", "high", "steady"}
    assert row["columns"][EAGER]["us"] > 0
    assert row["columns"][EAGER]["host_us"] > 0
    line: Any = task_bench.line
    assert line.asked == [3000, 30_000]
    measured = line.stages[line.stages.index("measure") :]
    assert measured[:3] == ["measure", "quiet", "loud"]


def test_a_wrong_answer_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    patch_tuning(lambda module, *inputs: module(*inputs) + 1e-3, monkeypatch)
    row = measure_row(bench(tmp_path))
    column = row["columns"][OURS]
    assert (column["status"], "us" in column) == ("wrong", False)
    assert "the limit is" in column["reason"]
    assert OURS not in row["against"]


def test_an_answer_that_goes_wrong_while_it_is_timed_counts_as_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    calls = []

    def tires(module: nn.Module, *inputs: Any) -> Any:
        calls.append(1)
        return module(*inputs) * (1.0 if len(calls) < 6 else 1.01)

    patch_tuning(tires, monkeypatch)
    row = measure_row(bench(tmp_path))
    assert row["columns"][OURS]["status"] == "wrong"
    assert OURS not in row["against"]


def test_a_column_that_raises_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    def raises(module: nn.Module, *inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    patch_tuning(raises, monkeypatch)
    row = measure_row(bench(tmp_path))
    assert row["columns"][OURS]["reason"] == "RuntimeError: no such kernel"
    assert (row["best"] in (EAGER, COMPILE), row["columns"][EAGER]["status"]) == (True, "ok")


def test_a_baseline_that_computes_something_else_is_no_denominator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = {
        **baselines.STARTS,
        COMPILE: lambda module, _: lambda *inputs: torch.zeros_like(module(*inputs)),
    }
    monkeypatch.setattr(child, "STARTS", starts)
    patch_tuning(lambda module, *inputs: module(*inputs), monkeypatch)
    row = measure_row(bench(tmp_path))
    assert row["columns"][COMPILE]["status"] == "wrong"
    assert (row["best"], list(row["against"][OURS])) == (EAGER, [EAGER, "best"])


def test_a_task_that_draws_numbers_keeps_its_compiled_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reseed_and_call(module: nn.Module, *inputs: Any) -> Any:
        torch.manual_seed(12345)  # as Inductor, which draws other numbers than eager
        return module(*inputs)

    starts = {
        **baselines.STARTS,
        COMPILE: lambda module, _: lambda *inputs: reseed_and_call(module, *inputs),
    }
    monkeypatch.setattr(child, "STARTS", starts)
    patch_tuning(lambda module, *inputs: module(*inputs), monkeypatch)
    row = measure_row(
        bench(
            tmp_path,
            DIAGONAL.replace("torch.diag(a) @ b", "torch.rand(64, dtype=torch.float32) + a[:64]"),
        )
    )
    assert {name: column["status"] for name, column in row["columns"].items()} == {
        EAGER: "ok",
        COMPILE: "ok",
        OURS: "ok",
    }
    # of the package's own column eager's very numbers are expected
    patch_tuning(reseed_and_call, monkeypatch)
    assert (
        measure_row(
            bench(tmp_path, DIAGONAL.replace("torch.diag(a) @ b", "torch.rand(64) + a[:64]"))
        )["columns"][OURS]["status"]
        == "wrong"
    )


def test_a_task_that_eager_cannot_run_has_no_times_and_says_why(tmp_path: Path, fast: None) -> None:
    row = measure_row(bench(tmp_path, DIAGONAL.replace("torch.diag(a) @ b", "a @ a @ b")))
    assert {column["status"] for column in row["columns"].values()} == {"failed"}
    assert (row["best"], row["against"]) == (None, {})


def test_a_release_candidates_judged_ratio_is_carried_over_to_every_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: None
) -> None:
    paired = {"over": EAGER, "speedup": 2.0, "low": 1.9, "high": 2.1}
    monkeypatch.setattr(
        contenders,
        "judge_candidate",
        lambda *arguments: {"status": "ok", "reason": "", "paired": paired, "error_ratio": 1.0},
    )
    row = measure_row(
        bench(tmp_path, job=replace(JOB, ours=False, judged="h100 0123"), candidate="code")
    )
    us, ratios = (
        {name: column["us"] for name, column in row["columns"].items()},
        row["against"][RELEASE],
    )
    assert us[RELEASE] == pytest.approx(us[EAGER] / 2)
    assert ratios[EAGER]["speedup"] == pytest.approx(2.0)
    assert ratios[COMPILE]["speedup"] == pytest.approx(2.0 * us[COMPILE] / us[EAGER])
    assert ratios["best"] == ratios[row["best"]]


@pytest.mark.parametrize(
    ("answer", "candidate", "status"),
    [
        ({"status": "refused", "reason": "numerics: far off"}, "code", "refused"),
        ({}, None, "withdrawn"),
    ],
)
def test_a_release_candidate_that_is_refused_or_withdrawn_has_no_ratio(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fast: None,
    answer: Mapping[str, Any],
    candidate: str | None,
    status: str,
) -> None:
    monkeypatch.setattr(contenders, "judge_candidate", lambda *arguments: dict(answer))
    row = measure_row(
        bench(tmp_path, job=replace(JOB, ours=False, judged="h100 0123"), candidate=candidate)
    )
    assert row["columns"][RELEASE]["status"] == status
    assert RELEASE not in row["against"]
