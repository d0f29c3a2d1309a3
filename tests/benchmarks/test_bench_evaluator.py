"""The benchmark's programs are all different and meant to be right or wrong, and what it says is what was measured."""

from __future__ import annotations

import ast
import json
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
