"""The benchmark's programs are all different and meant to be right or wrong, and what it says is what was measured."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import bench_evaluator
from benchmarks.bench_evaluator import Run, main, programs
from torch_cudal1.judge.contract import source_contract
from torch_cudal1.judge.pair import SourceCandidate


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("result", bench_evaluator._BODIES)
def test_programs_are_different_and_every_fourth_is_another_computation(device: str, result: str) -> None:
    found = list(islice(programs(result, device, 64), 80))
    assert len({one.source for one in found}) == len({one.program for one in found}) == 80
    for one in found:
        ast.parse(one.source)
        assert all(check.passed for check in source_contract(SourceCandidate(one.source)))
    wrong = [one.source.split("  # ")[0] for one in found[3::4]]
    right = [one.source.split("  # ")[0] for index, one in enumerate(found) if index % 4 != 3]
    assert not set(wrong) & set(right)


_INTERPRETED = """
import importlib.util
import torch
from benchmarks.bench_evaluator import _BODIES, programs
x = torch.randn(8, 48)
x[1, 3], x[2, 5], x[3, 7] = float("nan"), float("inf"), -float("inf")
for result in _BODIES:
    expected = eval(result)
    for number, one in zip(range(4), programs(result, "cuda", 64)):
        with open(f"program_{number}.py", "w") as file:
            file.write(one.source)
        spec = importlib.util.spec_from_file_location(f"program_{number}", file.name)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        same = torch.allclose(found.ModelNew()(x), expected, equal_nan=True, rtol=1e-5, atol=1e-6)
        assert same == (number != 3), one.program
"""


def test_right_programs_are_right_where_values_are_not_finite_too(tmp_path: Path) -> None:
    # Triton's own maximum drops NaN: a quarter of a benchmark's programs was refused for that, and nobody saw why
    script = tmp_path / "interpreted.py"
    script.write_text(_INTERPRETED)
    root = str(Path(__file__).parents[2])
    surroundings = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root}
    subprocess.run([sys.executable, str(script)], check=True, cwd=tmp_path, env=surroundings)


@pytest.mark.parametrize(
    ("batches", "rate"),
    [
        ([], 0.0),
        ([(12, 40.0)], 0.3),
        ([(12, 40.0), (96, 56.0)], 6.0),
        ([(12, 40.0), (96, 70.0), (96, 82.0), (96, 90.0)], 9.6),
    ],
)
def test_the_rate_counts_when_all_processes_are_up(batches: list[tuple[int, float]], rate: float) -> None:
    assert bench_evaluator._rate(batches) == pytest.approx(rate)


def test_a_run_is_written_when_it_is_known_and_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def measured(terms: object, lanes: int, budget_s: float, shape: tuple[int, int]) -> Run:
        done.append(lanes)
        return Run(lanes, "own", 10, 2.0, 1.0, 5.0, {"ok": 10})

    monkeypatch.setattr(bench_evaluator, "measured", measured)
    out = tmp_path / "evaluator.json"
    options = ["--device", "cpu", "--trusts", "own", "--out", str(out)]
    assert main([*options, "--lanes", "2"]) == 0
    assert main([*options, "--lanes", "2,4"]) == 0
    assert done == [2, 4]
    assert [row["lanes"] for row in json.loads(out.read_text())["rows"]] == [2, 4]
    assert main([*options, "--lanes", "2", "--device", "cuda"]) == 1  # the goal of a GPU was missed


def test_where_nothing_is_right_no_rate_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_evaluator, "measured", lambda *given: Run(2, "own", 8, 2.0, 1.0, 5.0, {"run": 8}, {}, ["why"]))
    assert main(["--device", "cpu", "--out", str(tmp_path / "e.json")]) == 1
