"""The benchmark's programs are all different and meant to be right or wrong, and what it says is
what was measured.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from itertools import islice
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks import bench_evaluator
from benchmarks.bench_evaluator import EvaluatorRun, generate_programs, main
from torch_cudal1.judge.checks.static.contract import check_source_contract
from torch_cudal1.judge.reference.source_reference import SourceCandidate


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("result", bench_evaluator._BODIES)
def test_programs_are_different_and_every_fourth_is_another_computation(
    device: str, result: str
) -> None:
    programs = list(islice(generate_programs(result, device, 64), 80))
    assert (
        len({program.source for program in programs})
        == len({program.program for program in programs})
        == 80
    )
    for program in programs:
        ast.parse(program.source)
        assert all(check.passed for check in check_source_contract(SourceCandidate(program.source)))
    wrong = [program.source.split("  # ")[0] for program in programs[3::4]]
    right = [
        program.source.split("  # ")[0] for index, program in enumerate(programs) if index % 4 != 3
    ]
    assert not set(wrong) & set(right)


def test_the_chain_keeps_nan_on_a_gpu(tmp_path: Path) -> None:
    # Triton's maximum drops NaN there, though not in its interpreter: the judge refused these
    # programs and nobody saw why
    file = tmp_path / "chain.py"
    file.write_text(next(generate_programs(bench_evaluator._CHAIN, "cuda", 64)).source)
    spec = importlib.util.spec_from_file_location("chain", file)
    assert spec is not None
    assert spec.loader is not None
    chain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chain)
    types = {"x": "*fp32", "y": "*fp32", "width": "i32", "BLOCK": "constexpr"}
    compiled = triton.compile(
        ASTSource(chain.kernel, types, {"BLOCK": 64}), target=GPUTarget("cuda", 90, 32)
    )
    maxima = re.findall(r"max[.a-zA-Z]*[.]f32", compiled.asm["ptx"])
    assert maxima
    assert set(maxima) == {"max.NaN.f32"}


@pytest.mark.parametrize(
    ("batches", "rate"),
    [
        ([], 0.0),
        ([(12, 40.0)], 0.3),
        ([(12, 40.0), (96, 56.0)], 6.0),
        ([(12, 40.0), (96, 70.0), (96, 82.0), (96, 90.0)], 9.6),
    ],
)
def test_the_rate_counts_when_all_processes_are_up(
    batches: list[tuple[int, float]], rate: float
) -> None:
    assert bench_evaluator._compute_rate(batches) == pytest.approx(rate)


def test_a_run_is_written_when_it_is_known_and_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_lanes: list[int] = []

    def run_batches(
        terms: object, lanes: int, budget_s: float, shape: tuple[int, int]
    ) -> EvaluatorRun:
        measured_lanes.append(lanes)
        return EvaluatorRun(lanes, "own", 10, 2.0, 1.0, 5.0, {"ok": 10})

    monkeypatch.setattr(bench_evaluator, "run_batches", run_batches)
    out = tmp_path / "evaluator.json"
    options = ["--device", "cpu", "--trusts", "own", "--out", str(out)]
    assert main([*options, "--lanes", "2"]) == 0
    assert main([*options, "--lanes", "2,4"]) == 0
    assert measured_lanes == [2, 4]
    assert [row["lanes"] for row in json.loads(out.read_text())["rows"]] == [2, 4]
    assert main([*options, "--lanes", "2", "--device", "cuda"]) == 1  # the goal of a GPU was missed


def test_where_nothing_is_right_no_rate_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench_evaluator,
        "run_batches",
        lambda *arguments: EvaluatorRun(2, "own", 8, 2.0, 1.0, 5.0, {"run": 8}, {}, ["why"]),
    )
    assert main(["--device", "cpu", "--out", str(tmp_path / "e.json")]) == 1
