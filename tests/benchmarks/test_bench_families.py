"""The families' benchmark: every case has a kernel on an H200; no row is left out, and what is
wrong has no speed-up.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import bench_families
from benchmarks.bench_families import Options, measure_case
from benchmarks.family_cases import CASES, FamilyCase, FunctionModule
from benchmarks.report import load
from benchmarks.tables import render_pages
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.kernels import Proposal

SMALL = FamilyCase(
    "softmax",
    "small softmax",
    lambda: FunctionModule(lambda x: x.softmax(1)),
    lambda: (torch.rand(8, 64),),
)
NORM = FamilyCase(
    "norm", "small batch norm", lambda: nn.BatchNorm2d(3).train(), lambda: (torch.rand(2, 3, 8, 8),)
)
NONE = FamilyCase(
    "pooling", "a view", lambda: FunctionModule(lambda x: x.flip(0)), lambda: (torch.rand(8, 64),)
)
CHOICES = (Proposal("softmax", {"rows": 1}), Proposal("softmax", {"rows": 2}))


def options(end: float = 60.0) -> Options:
    return Options(torch.device("cpu"), 90, 2, 14, time.monotonic() + end)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short samples, and nothing is compiled."""
    monkeypatch.setattr(torch, "compile", lambda module: module)
    monkeypatch.setattr("torch_cudal1.judge.benchmark.timing._SAMPLE_US", 100.0)


@pytest.fixture
def pretend(brief: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Kernels made of PyTorch's own steps: `of` says what a proposal of an island's Program
    becomes.
    """
    built: dict[str, Any] = {"of": lambda program, proposal: program}
    monkeypatch.setattr(bench_families, "propose", lambda program, sm, most: CHOICES[:most])
    monkeypatch.setattr(
        bench_families, "build", lambda program, proposal, sm: built["of"](program, proposal)
    )
    return built


def replace_by_halves(program: Program, proposal: Proposal) -> Program:
    """A wrong answer of the right form: every value a half."""
    return replace(
        program,
        steps=(
            Aten(
                "aten.full_like.default", (program.steps[0].args[0], 0.5), (), program.steps[0].outs
            ),
        ),
    )


@pytest.mark.parametrize("case", [SMALL, NORM], ids=lambda case: case.family)
def test_a_right_kernel_has_its_error_and_its_gain_over_the_better_baseline(
    case: FamilyCase, pretend: dict[str, Any]
) -> None:
    row = measure_case(case, options())
    assert row["status"] == "ok", row
    assert row["error_ratio"] <= 1.0
    assert set(row["us"]) == {"eager", "torch.compile", "copy", "kernel"}
    assert row["vs_better"]["speedup"] == min(
        row["vs_eager"]["speedup"], row["vs_compile"]["speedup"]
    )
    assert row["of_copy"]["low"] <= row["of_copy"]["speedup"] <= row["of_copy"]["high"]
    assert [fact["configs"] for fact in row["tried"]] == [[{"rows": 1}], [{"rows": 2}]]


def test_the_copy_is_of_every_input_and_result_once(pretend: dict[str, Any]) -> None:
    assert measure_case(SMALL, options())["bytes"] == 2 * 4 * 8 * 64


def test_a_wrong_kernel_has_a_reason_and_no_figures_of_its_own(pretend: dict[str, Any]) -> None:
    pretend["of"] = replace_by_halves
    row = measure_case(SMALL, options())
    assert row["status"] == "wrong"
    assert "x eager's" in row["reason"]
    assert "eager" in row["us"]
    assert not {"vs_better", "of_copy", "error_ratio"} & row.keys()
    assert "kernel" not in row["us"]


def test_what_does_not_compile_is_a_row_with_the_reason(pretend: dict[str, Any]) -> None:
    def refuse(program: Program, proposal: Proposal) -> Program:
        raise NotLowerableError(f"{proposal.config} needs more registers than there are")

    pretend["of"] = refuse
    row = measure_case(SMALL, options())
    assert (row["status"], len(row["tried"])) == ("failed", 2)
    assert "registers" in row["reason"]
    assert {"eager", "copy"} <= row["us"].keys()


def test_a_right_proposal_is_taken_where_another_is_wrong(pretend: dict[str, Any]) -> None:
    pretend["of"] = lambda program, proposal: (
        program if proposal == CHOICES[1] else replace_by_halves(program, proposal)
    )
    row = measure_case(SMALL, options())
    assert (row["status"], row["configs"]) == ("ok", [{"rows": 2}])
    assert "wrong" in row["tried"][0]


def test_a_kernel_that_turns_wrong_while_it_is_timed_loses_its_figures(
    pretend: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, answers = bench_families.compare, []

    def later(got: Any, expected: Any) -> Any:
        verdict = right(got, expected)
        answers.append(
            verdict if len(answers) < len(CHOICES) else replace(verdict, passed=False, reason="no")
        )
        return answers[-1]

    monkeypatch.setattr(bench_families, "compare", later)
    row = measure_case(SMALL, options())
    assert (row["status"], row["reason"]) == ("wrong", "after it was timed: no")
    assert "vs_better" not in row


def test_every_case_is_a_row_of_the_file_and_of_the_table(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pretend: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = FamilyCase(
        "loss", "breaks", lambda: FunctionModule(lambda x: x @ x), lambda: (torch.rand(2, 3),)
    )
    monkeypatch.setattr(bench_families, "CASES", (SMALL, NONE, broken))
    results = tmp_path / "results"
    shutil.copytree(Path(bench_families.__file__).parent / "results", results)
    out = results / "h200-families.json"
    assert bench_families.main(["--device", "cpu", "--rounds", "14", "--out", str(out)]) == 1
    document = load(out)
    assert document["kind"] == "families"
    assert [row["status"] for row in document["rows"]] == ["ok", "no kernel", "failed"]
    assert document["rows"][1]["reason"].startswith("no fusion group: aten.flip.default")
    assert "eager" in document["rows"][1]["us"]
    printed, table = capsys.readouterr().out, "\n".join(render_pages(results).values())
    section = table[table.index("`benchmarks/results/h200-families.json`") :]
    for case in (SMALL, NONE, broken):
        assert case.name in printed
        assert f"| {case.family}: {case.name} |" in section


def test_without_time_left_every_case_says_so(tmp_path: Path) -> None:
    out = tmp_path / "families.json"
    assert (
        bench_families.main(
            ["--device", "cpu", "--only", "softmax", "--budget-s", "0", "--out", str(out)]
        )
        == 1
    )
    rows = load(out)["rows"]
    assert {row["case"] for row in rows} == {case.name for case in CASES if "softmax" in case.name}
    assert {row["reason"] for row in rows} == {"the budget was spent"}


def test_on_the_cpu_a_case_is_a_row_that_says_why_there_is_no_kernel(brief: None) -> None:
    row = measure_case(SMALL, options())
    assert row["status"] == "no kernel"
    assert "cpu" in row["reason"]
