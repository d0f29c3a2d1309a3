"""The judge's benchmark counts judging, not starting, and takes no refusal for speed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from benchmarks import bench_judge
from benchmarks.bench_judge import Layer, Source
from tests.benchmarks.evaluators import patch_evaluator

LAYER = Layer("relu", nn.ReLU, (4, 8))
PASSED = SimpleNamespace(passed=True, failure=None)
REFUSED = SimpleNamespace(passed=False, failure="numerics")


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Programs are judged by a stand-in, which answers what is in the list."""
    answers: list[Any] = []
    monkeypatch.setattr(bench_judge, "rank_baselines", lambda *arguments: "ranking")
    monkeypatch.setattr(
        bench_judge,
        "evaluate_candidate",
        lambda *arguments: SimpleNamespace(verdict=answers.pop(0), timing=None),
    )
    return answers


@pytest.fixture
def evaluator(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return patch_evaluator(monkeypatch, bench_judge)


def test_a_layer_is_judged_once_and_again(judged: list[Any]) -> None:
    judged += [PASSED] * 4
    (row,) = bench_judge.measure_programs([LAYER], bench_judge.torch.device("cpu"), "fast", 3)
    assert row["status"] == "ok"
    assert min(row["first_s"], row["next_s"]) >= 0
    assert not judged


def test_a_refusal_is_a_failed_row(judged: list[Any], evaluator: list[Any]) -> None:
    judged += [PASSED, REFUSED]
    evaluator += [SimpleNamespace(verdict=REFUSED, elapsed_s={})]
    (row,) = bench_judge.measure_programs([LAYER], bench_judge.torch.device("cpu"), "fast", 3)
    (other,) = bench_judge.measure_sources(
        bench_judge.SOURCES[:1], bench_judge.torch.device("cpu"), "fast", 3
    )
    assert [(r["status"], r["reason"]) for r in (row, other)] == [
        ("failed", "refused: numerics")
    ] * 2


def test_what_candidates_share_is_not_counted_as_judging(evaluator: list[Any]) -> None:
    first = {"start": 3.0, "reference": 1.0, "baselines": 9.0, "numerics": 0.5, "timing": 1.5}
    evaluator += [
        SimpleNamespace(verdict=PASSED, elapsed_s=first),
        SimpleNamespace(verdict=PASSED, elapsed_s={"start": 2.0, "timing": 1.0}),
    ]
    (row,) = bench_judge.measure_sources(
        bench_judge.SOURCES[:1], bench_judge.torch.device("cpu"), "fast", 1
    )
    assert (row["first_s"], row["next_s"], row["shared_s"]) == (2.0, 1.0, 13.0)


@pytest.mark.parametrize(("seconds", "code"), [(9.0, 0), (11.0, 1)])
def test_the_exit_code_says_whether_the_goal_is_reached(
    monkeypatch, tmp_path, seconds: float, code: int
) -> None:
    row = {
        "candidate": "x",
        "form": "source",
        "status": "ok",
        "first_s": seconds,
        "next_s": 1.0,
        "shared_s": 1.0,
    }
    monkeypatch.setattr(bench_judge, "measure_programs", lambda *arguments: [row])
    monkeypatch.setattr(bench_judge, "measure_sources", lambda *arguments: [])
    out = tmp_path / "judge.json"
    assert bench_judge.main(["--device", "cpu", "--out", str(out)]) == code
    saved = json.loads(out.read_text())
    assert (saved["kind"], saved["rows"], saved["summary"]["worst_first_s"]) == (
        "judge",
        [row],
        seconds,
    )


def test_the_texts_are_python_that_makes_a_module() -> None:
    source = Source("relu", "self.size = 3", "torch.relu(x)", (2, 3))
    names: dict[str, Any] = {}
    exec(source.text("ModelNew"), names)
    assert names["ModelNew"](*names["get_init_inputs"]())(*names["get_inputs"]()).shape == (2, 3)
