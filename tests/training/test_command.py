"""`cudal1 train` from its command line, on the CPU landscape of the package: real programs, real
measurements, replayed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_cudal1.__main__ import main
from torch_cudal1.core.errors import SettingError
from torch_cudal1.training.command import _select_seed
from torch_cudal1.training.experiments.demo_plan import DEMO

FIT = {"steps": 8, "batch": 8, "learning_rate": 3e-3}
SMALL = {
    "max_new_tokens": 16,
    "collect": {"attempts": 4, "wanted": 1},
    "sft": FIT,
    "selfsup": {"rounds": 1, "samples": 2, "fit": {"steps": 2}},
    "rl": {"steps": 2, "group": 4, "groups": 2, "epochs": 1, "save_every": 1},
}
MODEL = {"hidden": 32, "layers": 1, "heads": 2, "context": 160}
PLAN = {
    **SMALL,
    "name": "smallest",
    "device": "cpu",
    "endpoint": "None: a test.",
    "arms": ["A0", "A6"],
    "seeds": [0],
    "budget": 12,
    "train_tasks": 2,
    "held_out_tasks": 1,
    "model": MODEL,
    "held_out": {"measurements": 2, "cap": 4, "round": 2, "reported": [1, 2]},
}


@pytest.fixture(autouse=True)
def room_for_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


pytestmark = pytest.mark.usefixtures("one_thread")


def write_json(path: Path, content: dict[str, Any]) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def cudal1(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["train", *map(str, arguments), "--quiet"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_run_goes_through_all_stages_and_ends_in_a_page(tmp_path, capsys):
    config, run = write_json(tmp_path / "config.json", {**SMALL, "tiny": MODEL}), tmp_path / "run"
    code, out, _ = cudal1(capsys, "collect", "--run", run, "--config", config)
    assert code == 0
    assert all(name in out for name in ("tutorial", "sloppy", "replay of"))
    for stage in ("sft", "selfsup"):
        assert cudal1(capsys, stage, "--run", run)[0] == 0
    code, out, _ = cudal1(capsys, "rl", "--run", run, "--json")
    facts = json.loads(out)
    assert code == 0
    assert len(facts["curve"]) == 2
    assert (run / "rl" / "model.safetensors").is_file()
    assert cudal1(capsys, "report", "--run", run, "--out", tmp_path / "run.html")[0] == 0
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "Stage 3, replay of" in page
    assert "<script" not in page

    code, _, err = cudal1(capsys, "rl", "--run", run)
    assert (code, "--resume" in err) == (2, True)
    assert cudal1(capsys, "rl", "--run", run, "--resume")[0] == 0
    code, _, err = cudal1(capsys, "rl", "--run", run, "--resume", "--seed", "3")
    assert (code, "'seed' is 3" in err) == (2, True)


def test_the_demonstration_shows_stages_arms_and_cheats(tmp_path, capsys):
    plan = write_json(tmp_path / "plan.json", PLAN)
    code, out, _ = cudal1(
        capsys,
        "demo",
        "--plan",
        plan,
        "--run",
        tmp_path / "run",
        "--out",
        tmp_path / "demo.html",
        "--workers",
        "1",
    )
    assert code == 0
    for expected in (
        "Stage 1 (SFT)",
        "Stage 1+2",
        "A6 GRPO + bucket exemplars",
        "naive evaluator: share of cheats",
        "guarded evaluator",
    ):
        assert expected in out
    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    for expected in (
        "replay of",
        "What may be said",
        "1 seed: intervals over so few",
        "Share of samples that are cheats",
    ):
        assert expected in page

    code, out, _ = cudal1(
        capsys,
        "report",
        "--plan",
        plan,
        "--run",
        tmp_path / "run",
        "--out",
        tmp_path / "again.html",
        "--json",
    )
    assert code == 0
    assert len(json.loads(out)["results"]) == 2


def test_an_experiment_that_is_ended_by_its_budget_says_that_it_is_not_whole(tmp_path, capsys):
    plan = write_json(tmp_path / "plan.json", PLAN)
    code, _, err = cudal1(
        capsys,
        "experiment",
        "--plan",
        plan,
        "--run",
        tmp_path / "run",
        "--out",
        tmp_path / "x.html",
        "--budget-s",
        "0.001",
    )
    assert code == 1
    assert "2 of 2 runs are missing" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("experiment",), "--plan FILE"),
        (("sft",), "train collect"),
        (("rl", "--landscape", "missing.json.gz"), "missing.json.gz"),
        (("collect", "--tasks", "folder"), "--live beside it"),
        (("collect", "--config", "missing.json"), "missing.json"),
        (("report",), "run.json"),
    ],
)
def test_wrong_usage_is_refused_with_what_to_do(tmp_path, capsys, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    code, out, err = cudal1(capsys, *arguments, "--run", "run")
    assert code in (1, 2)
    assert out == ""
    assert expected in err
    assert "Traceback" not in err


def test_one_seed_of_a_plan_belongs_to_the_same_experiment():
    plan = replace(DEMO, seeds=(0, 3))
    assert _select_seed(plan, 3).seeds == (3,)
    assert _select_seed(plan, 3).digest == plan.digest
    assert _select_seed(plan, None) == plan
    with pytest.raises(SettingError, match="one of the plan's: 0, 3"):
        _select_seed(plan, 1)
