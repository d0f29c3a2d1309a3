"""The suite's driver: every expected row arrives, whatever happens to the process that measures it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks import bench_models
from benchmarks.bench_models import main, make_contenders, run_model
from benchmarks.models import Inputs
from benchmarks.report import load
from benchmarks.runner import Contender
from torch_cudal1.core.telemetry import Event


def _args(tmp_path: Path, *more: str) -> argparse.Namespace:
    out = [
        "--sizes",
        "small",
        "--device",
        "cpu",
        "--rounds",
        "14",
        "--out",
        str(tmp_path / "rows.json"),
    ]
    return bench_models._parser().parse_args([*out, *more])


def _raises(module: nn.Module, inputs: Inputs) -> Any:
    raise RuntimeError("no")


def _few(phase: str, options: object) -> tuple[list[Contender], list[Contender]]:
    return [Contender("eager", lambda module, _: module, baseline=True)], [
        Contender("cudal1 backend", _raises)
    ]


def test_training_has_no_reduce_overhead_and_both_phases_have_both_of_the_package() -> None:
    names = {
        phase: [c.name for group in make_contenders(phase, {}) for c in group]
        for phase in ("inference", "train")
    }
    assert names["inference"] == [
        "eager",
        "torch.compile",
        "reduce-overhead",
        "cudal1.accelerate",
        "cudal1 backend",
    ]
    assert names["train"] == ["eager", "torch.compile", "cudal1.accelerate", "cudal1 backend"]


def test_a_models_process_writes_the_rows_of_every_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_models, "make_contenders", _few)
    run_model(_args(tmp_path, "--child", "lstm"))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    outcomes = [(row["phase"], row["contender"], row["status"]) for row in rows]
    assert sorted(outcomes) == [
        ("inference", "cudal1 backend", "failed"),
        ("inference", "eager", "ok"),
        ("train", "cudal1 backend", "failed"),
        ("train", "eager", "ok"),
    ]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import time; time.sleep(60)", "time limit of 6 s"),
        ("raise SystemExit('out of memory')", "code 1: out of memory"),
    ],
)
def test_a_process_that_hangs_or_dies_becomes_failed_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    def popen(
        arguments: object, scratch: object, stderr: Any, threads: int = 0
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", script], stderr=stderr, start_new_session=True
        )

    monkeypatch.setattr(bench_models, "_start_process", popen)
    monkeypatch.setattr("benchmarks.report.environment", dict)
    begin = time.monotonic()
    code = main(
        [
            "--models",
            "lstm",
            "--time-limit-s",
            "6",
            "--out",
            str(tmp_path / "models.json"),
            "--no-prefill",
        ]
    )
    assert time.monotonic() - begin < 30
    value = load(tmp_path / "models.json")
    assert code == 1
    assert len(value["rows"]) == 9
    assert all(row["status"] == "failed" and reason in row["reason"] for row in value["rows"])
    assert all(summary["measured"] == 0 for summary in value["summary"])


def test_what_does_not_fit_into_the_total_limit_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(
        [
            "--models",
            "lstm,unet",
            "--total-limit-s",
            "0",
            "--out",
            str(tmp_path / "models.json"),
            "--no-prefill",
        ]
    )
    rows = load(tmp_path / "models.json")["rows"]
    assert {row["model"] for row in rows} == {"lstm", "unet"}
    assert {row["reason"] for row in rows} == {"not started: the total limit was reached"}
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [summary["contender"] for summary in last["summary"]] == [
        "cudal1.accelerate",
        "cudal1 backend",
    ]


def test_an_unknown_model_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--models", "alexnet"])
    assert "alexnet" in capsys.readouterr().err


def test_a_row_of_the_package_has_its_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cudal1

    def few(phase: str, options: object) -> tuple[list[Contender], list[Contender]]:
        contender = Contender(
            "cudal1.accelerate",
            lambda module, inputs: cudal1.accelerate(module, inputs, on_miss="baseline"),
        )
        return [Contender("eager", lambda module, _: module, baseline=True)], [contender]

    monkeypatch.setattr(bench_models, "make_contenders", few)
    run_model(_args(tmp_path, "--child", "lstm", "--phases", "inference"))
    rows = {
        row["contender"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]
    }
    assert rows["eager"]["decisions"] == []
    decisions = rows["cudal1.accelerate"]["decisions"]
    assert [
        decision["runs"]
        for decision in decisions
        if decision["stage"] == "explain" and "runs" in decision
    ] == ["the module's own forward"]


def test_a_graph_that_is_left_out_is_listed_like_a_failure() -> None:
    """Half-precision models were left out once, and every table showed eager's time as if nothing
    had been there to gain.
    """
    events = [
        Event("capture", "left_out", facts={"reason": "operator yields a number"}),
        Event("bind", "fallback", facts={"reason": "RuntimeError: no"}),
        Event("swap", "runs", facts={"what": "eager"}),
        Event("shadow", "left_out", facts={"reason": "it is served, and not watched"}),
    ]
    assert bench_models.list_fallbacks(events) == (
        "left out: operator yields a number",
        "RuntimeError: no",
    )
