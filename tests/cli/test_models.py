"""`warmup`, `plan` and `explain`: several targets, exit codes, JSON and the page. The package's own
work is a stand-in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_cudal1.__main__ import main
from torch_cudal1.cli.commands import doctor, models
from torch_cudal1.core.report import Explanation, Plan, PlanRow, RegionReport

SOURCE = """\
import torch
def good(): return torch.nn.Linear(3, 2), (torch.ones(4, 3),)
def bad(): return torch.nn.Linear(3, 2), (torch.ones(4, 5),)
"""
REGION = RegionReport(
    name="forward",
    key="k" * 64,
    kind="inference",
    granularity="whole",
    runs="inductor",
    origin="baseline",
    reason="nothing was faster",
    tried=(
        {
            "label": "fold -> eager",
            "decision": "rejected",
            "reason": "too slow",
            "detector": "timing",
        },
    ),
)


@dataclass(frozen=True)
class Result:
    target: str
    explanation: Explanation | None
    error: str | None
    seconds: float
    built: int
    reused: int


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    monkeypatch.setenv(
        "COLUMNS", "300"
    )  # the temporary path is long; what a narrow table does is tested in view
    monkeypatch.setattr(doctor, "as_environment", lambda settings: {"torch": torch.__version__})
    return str(path)


def stand_in(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    counters = SimpleNamespace(counters={"resolve.miss": 0})
    explanation = Explanation(
        target="Linear", device="cpu", regions=(REGION,), left_out=("the optimizer",)
    )

    def accelerate(
        module: torch.nn.Module, inputs: object, *, settings: object, progress: object
    ) -> torch.nn.Module:
        counters.counters["resolve.miss"] += 1
        return module

    defaults = {
        "accelerate": accelerate,
        "explain": lambda m: explanation,
        "report": lambda: counters,
    }
    monkeypatch.setattr(models, "cudal1", SimpleNamespace(**(defaults | functions)))


def test_explain_tells_what_runs_what_was_tried_and_why(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    assert main(["explain", f"{target}:good", "--device", "cpu"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "model.py:good on cpu: 1 region",
        "inductor",
        "nothing was faster",
        "fold -> eager",
        "too slow",
        "left to PyTorch: the optimizer",
    ):
        assert part in shown


def test_explain_under_fail_on_miss_exits_1_and_says_what_to_do(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    assert main(["explain", f"{target}:good", "--device", "cpu", "--fail-on-miss", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["misses"] == 1
    assert "cudal1 warmup" in shown.err


def test_a_bad_target_does_not_stop_the_next_one(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    assert main(["explain", f"{target}:none", f"{target}:good", "--device", "cpu", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [e["target"] for e in document["explanations"]] == [f"{target}:good"]
    assert "no callable 'none'" in document["failed"][0]


def test_inputs_that_do_not_fit_are_a_target_error(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch)
    assert main(["explain", f"{target}:bad", f"{target}:good", "--device", "cpu", "--json"]) == 2
    shown = capsys.readouterr()
    assert "calling the module with its inputs failed" in shown.err
    assert len(json.loads(shown.out)["explanations"]) == 1


def test_explain_writes_the_page(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    assert (
        main(["explain", f"{target}:good", "--device", "cpu", "--html", str(tmp_path / "p.html")])
        == 0
    )
    assert "too slow" in (tmp_path / "p.html").read_text()


def test_plan_shows_estimates_as_estimates(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (
        PlanRow(
            region="a",
            key="k",
            share_of_time=0.5,
            techniques=("fold",),
            expected_speedup=2.0,
            cached=False,
            reason="guess",
        ),
        PlanRow(
            region="b",
            key="l",
            share_of_time=None,
            techniques=(),
            expected_speedup=1.0,
            cached=True,
            reason="nothing applies",
        ),
    )
    stand_in(
        monkeypatch,
        plan=lambda module, inputs, settings: Plan(
            target="x", device="cpu", rows=rows, expected_end_to_end=1.33
        ),
    )
    assert main(["plan", f"{target}:good", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("1.33x", "50%", "2.00x", "estimate", "stored", "fold"))


@pytest.mark.parametrize(("error", "code"), [(None, 0), ("it broke", 1)])
def test_warmup_exits_1_when_a_target_failed(
    error: str | None,
    code: int,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[Any] = []

    def warmup(
        name: str,
        *,
        settings: Any,
        progress: Any,
        training: bool,
        device: str,
        recording: Path | None,
    ) -> tuple[Result, ...]:
        calls.append((name, settings.budget_s, device))
        return (
            Result(
                name,
                None if error else Explanation(target=name, device=device, regions=(REGION,)),
                error,
                1.5,
                2,
                3,
            ),
        )

    stand_in(monkeypatch, warmup=warmup)
    assert main(["warmup", f"{target}:good", "--device", "cpu", "--budget", "5"]) == code
    assert calls == [(f"{target}:good", 5.0, "cpu")]
    shown = capsys.readouterr()
    assert ("failed" if error else "inductor runs: nothing beat it") in " ".join(shown.out.split())
    assert ("it broke" in shown.err) == bool(error)


@pytest.mark.parametrize(("lacking", "code"), [({}, 0), ({"it": "its start failed"}, 1)])
def test_warmup_with_inductor_collects_for_what_was_warmed_and_tells_what_it_could_not(
    lacking: dict[str, str],
    code: int,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[Any] = []

    def collect(names: list[str], order: Any) -> dict[str, str]:
        calls.append((names, order.device, order.settings.cache_dir.is_absolute()))
        return lacking

    def warmup(name: str, **options: Any) -> tuple[Result, ...]:
        return (
            Result(
                name, Explanation(target=name, device="cpu", regions=(REGION,)), None, 1.5, 2, 3
            ),
        )

    monkeypatch.setattr(models.inductor_ahead, "collect", collect)
    stand_in(monkeypatch, warmup=warmup)
    assert main(["warmup", f"{target}:good", "--device", "cpu", "--with-inductor"]) == code
    assert calls == [([f"{target}:good"], "cpu", True)]
    assert ("nothing compiled ahead: its start failed" in capsys.readouterr().err) == bool(lacking)
    assert main(["warmup", f"{target}:good", "--with-inductor", "--recorded", "calls.jsonl"]) == 2
    assert len(calls) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_asking_for_a_gpu_that_is_not_there_is_2_with_the_reason(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{target}:good", "--device", "cuda"]) == 2
    assert "'cpu' on this machine: torch" in capsys.readouterr().err
