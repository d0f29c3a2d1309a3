"""What a results file of training says is what the experiment told; nothing is made of nothing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_training import main
from benchmarks.report import load
from benchmarks.subject_tables.training_tables import tabulate_experiment
from torch_cudal1.training.experiments.plan import read_plan

PLAN = {
    "name": "two arms",
    "device": "cpu",
    "endpoint": "which is better",
    "arms": ["A6", "A4"],
    "seeds": [0, 1],
    "held_out": {"measurements": 4, "cap": 8, "round": 4, "reported": [1, 4]},
}
EXAM = {"success": 0.5, "speedup": 0.6, "log_speedup": 0.1, "best": {"train": 1.2}}


def write_output(folder: Path, *, seeds: int = 2) -> tuple[Path, Path]:
    """A plan and what its runs are said to have found: arm A6 has 2x on the held-out task, A4 1x."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps(PLAN))
    digest = read_plan(plan).digest
    results: list[dict[str, Any]] = []
    for seed in range(seeds):
        for arm, exemplars, best in (("A6", "bucket", 2.0), ("A4", "none", 1.0)):
            test = {
                "task": {
                    "best": {"1": 1.0, "4": best},
                    "curve": [1.0, best],
                    "success": 1.0,
                    "speedup": best,
                }
            }
            identity = {
                "plan": digest,
                "label": "replay of a test",
                "arm": arm,
                "seed": seed,
                "own": exemplars,
                "kinds": {"shape": ["task"]},
            }
            stages = {"collected": {}, "sft": EXAM, "selfsup": EXAM | {"success": 0.75}}
            held_out = {"bucket": test, "none": test}
            measurements = {
                "stages": stages,
                "exam": EXAM,
                "curve": [],
                "held_out": held_out,
                "kinds": {"shape": ["task"]},
            }
            results.append({**identity, **measurements, "optimum": {"train": 2.0, "task": 2.0}})
    step = {"step": 0.0, "cheats": 0.25, "believed": 0.25, "reported": 3.0}
    out = folder / "told.json"
    out.write_text(
        json.dumps(
            {
                "plan": digest,
                "results": results,
                "cheats": {"naive": [step, step | {"cheats": 0.9}], "guarded": [step, step]},
            }
        )
    )
    return plan, out


def test_comparisons_arms_stages_and_cheats_are_in_the_file_the_tables_and_the_figure(
    tmp_path: Path,
) -> None:
    plan, out = write_output(tmp_path)
    file, picture = tmp_path / "results.json", tmp_path / "best.svg"
    assert (
        main(
            ["--plan", str(plan), "--told", str(out), "--out", str(file), "--figure", str(picture)]
        )
        == 0
    )
    document = load(file)
    assert {row["what"] for row in document["rows"]} == {
        "comparison",
        "difference",
        "arm",
        "stage",
        "evaluator",
    }
    (primary,) = [row for row in document["rows"] if row.get("primary")]
    assert primary["value"] == pytest.approx(0.6931, abs=1e-4)
    text = "\n".join(tabulate_experiment(document))
    assert (
        "| A6 - A4, held-out shape (primary) | +0.693 | [+0.693, +0.693] | 2 x 1 | A6 is better |"
        in text
    )
    assert "| naive evaluator | 0.25 | 0.90 | 0.90 | 3.00 |" in text
    assert "| success, stage 2 - stage 1 | +0.250 |" in text
    assert all(str(row["name"]) in text for row in document["rows"])
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")
    assert "var(" not in picture.read_text()


def test_there_is_no_figure_of_policies_that_wrote_nothing_there(tmp_path: Path) -> None:
    plan, out = write_output(tmp_path)
    data = json.loads(out.read_text())
    for result in data["results"]:
        for test in result["held_out"].values():
            test["task"] |= {"curve": [], "best": {"1": None, "4": None}}
    out.write_text(json.dumps(data))
    picture = tmp_path / "best.svg"
    assert (
        main(
            [
                "--plan",
                str(plan),
                "--told",
                str(out),
                "--out",
                str(tmp_path / "r.json"),
                "--figure",
                str(picture),
            ]
        )
        == 0
    )
    assert not picture.exists()


def test_missing_runs_show_in_the_exit_code_and_no_file_is_written_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = write_output(tmp_path, seeds=1)
    file = tmp_path / "results.json"
    assert main(["--plan", str(plan), "--told", str(out), "--out", str(file)]) == 1
    assert load(file)["runs"] == [2, 4]
    other_plan = json.dumps(json.loads(out.read_text()) | {"plan": "another"})
    for text in ('{"results": []}', "", '{"other": 1}', other_plan):
        out.write_text(text)
        file.unlink(missing_ok=True)
        assert main(["--plan", str(plan), "--told", str(out), "--out", str(file)]) == 1
        assert "--json" in capsys.readouterr().err
        assert not file.exists()


def test_seeds_may_be_of_different_gpus_and_a_seed_may_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = write_output(tmp_path)
    data, file = json.loads(out.read_text()), tmp_path / "results.json"
    gpus = ("NVIDIA H100", "NVIDIA H200")

    def save_and_run(**changes: str) -> int:
        for result in data["results"]:
            result["machine"] = {
                "gpu": gpus[result["seed"]],
                "driver": "580.1",
                "torch": "2.13.0",
            } | changes
        out.write_text(json.dumps(data))
        return main(["--plan", str(plan), "--told", str(out), "--out", str(file)])

    assert save_and_run() == 0
    assert load(file)["environment"]["gpu"] == "NVIDIA H100 (seed 0), NVIDIA H200 (seed 1)"
    assert load(file)["environment"]["gpu_state"] == {"driver_version": "580.1"}
    assert save_and_run(gpu="NVIDIA H200") == 0
    assert load(file)["environment"]["gpu"] == "NVIDIA H200"
    data["results"][0]["machine"]["gpu"] = "NVIDIA A100"
    out.write_text(json.dumps(data))
    assert main(["--plan", str(plan), "--told", str(out), "--out", str(file)]) == 1
    assert "several machines" in capsys.readouterr().err
    for result in data["results"]:
        result["machine"] = {"gpu": "NVIDIA H200", "torch": f"2.{result['seed']}"}
    out.write_text(json.dumps(data))
    assert main(["--plan", str(plan), "--told", str(out), "--out", str(file)]) == 1
    assert "several versions" in capsys.readouterr().err
