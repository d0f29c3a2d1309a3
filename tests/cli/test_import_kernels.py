"""`cudal1 import-kernels` and `export-kernels`: outcomes, exit codes, resuming, damaged input. What
judges is made up here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entries import plant
from torch_cudal1.__main__ import main
from torch_cudal1.cli.commands import import_kernels
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.ingest.formats.flashinfer import Definition, FlashInferTrace, Solution
from torch_cudal1.ingest.formats.task import PublishedTask
from torch_cudal1.ingest.published.adopt import AdoptionOutcome

FATES = {
    "fast": AdoptionOutcome("accepted", "", "", "a" * 64, True, 3.0, 2.5, "x -> eager"),
    "slow": AdoptionOutcome("not_faster", "0.99x", "timing", "a" * 64, False, 0.99, 0.98),
    "wrong": AdoptionOutcome("rejected", "a bias is missing", "numerics"),
    "odd": AdoptionOutcome("not_lowerable", "state in Python"),
    "broken": AdoptionOutcome("reference_unusable", "no Model", "inputs"),
}
EXITS = {"fast": 0, "slow": 4, "wrong": 3, "odd": 3, "broken": 2}
MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2

def get_inputs(): return [torch.randn(4, 4)]
def get_init_inputs(): return []
"""


class ScriptedEvaluator:
    """Adopts by the candidate's text."""

    candidates: list[str]

    def __init__(self, place: Any, job: Any, progress: Any) -> None:
        self._progress = progress
        assert (job.trust, job.gradients) == ("foreign", False)

    def __enter__(self) -> ScriptedEvaluator:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def adopt(self, task: PublishedTask) -> AdoptionOutcome:
        self._progress("judging", 0.5)
        if task.candidate is None:
            return AdoptionOutcome("withdrawn", "no code")
        if task.candidate == "machine":
            raise SandboxError("starting", "no sandbox here")
        ScriptedEvaluator.candidates.append(task.candidate)
        if task.candidate == "ours":
            raise ValueError("a bug")
        return FATES[task.candidate]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedEvaluator.candidates = []
    monkeypatch.setattr(import_kernels, "Adoption", ScriptedEvaluator)
    monkeypatch.setenv("COLUMNS", "200")


def line(task: int, code: str | None) -> str:
    return json.dumps(
        {"level_id": 1, "task_id": task, "ref_code": "r", "custom_code": code, "score_default": 9.0}
    )


def release(folder: Path, *lines: str) -> str:
    path = folder / "release.json"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def run_import(*arguments: str, folder: Path) -> int:
    return main(
        [
            "import-kernels",
            *arguments,
            "--device",
            "cpu",
            "--quiet",
            "--cache-dir",
            str(folder / "cache"),
        ]
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()]


@pytest.mark.parametrize("fate", FATES)
def test_one_task_answers_as_judge_does(
    fate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert (
        run_import(release(tmp_path, line(1, fate)), "--json", str(out), folder=tmp_path)
        == EXITS[fate]
    )
    (result,) = read(out)
    assert (result["outcome"], result["reason"], result["low"]) == (
        FATES[fate].outcome,
        FATES[fate].reason,
        FATES[fate].low,
    )
    assert result["claims"] == {"score_default": 9.0}
    shown = capsys.readouterr().out
    assert FATES[fate].outcome.replace("_", " ") in shown
    assert FATES[fate].reason in shown


def test_one_bad_line_never_stops_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = release(tmp_path, line(1, "fast"), "{cut", line(2, None), line(3, "wrong"))
    assert run_import(path, "--json", folder=tmp_path) == 1
    results = json.loads(capsys.readouterr().out)
    assert [result["outcome"] for result in results] == [
        "accepted",
        "unreadable",
        "withdrawn",
        "rejected",
    ]
    assert results[1]["where"] == f"{path}:2"


def test_several_with_a_result_each_are_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_import(
            release(tmp_path, line(1, "fast"), line(2, "wrong"), line(3, None)), folder=tmp_path
        )
        == 0
    )
    assert "1 accepted, 1 rejected, 1 withdrawn" in capsys.readouterr().out


def test_an_interrupted_import_goes_on_where_it_stopped_and_not_under_other_terms(
    tmp_path: Path,
) -> None:
    path, out = (
        release(tmp_path, line(1, "fast"), line(2, "machine"), line(3, "odd")),
        tmp_path / "out.jsonl",
    )
    assert run_import(path, "--json", str(out), folder=tmp_path) == 1
    with out.open("a") as file:
        file.write('{"outcome": "acc')  # killed while it wrote
    release(tmp_path, line(1, "fast"), line(2, "wrong"), line(3, "odd"))
    assert run_import(path, "--json", str(out), folder=tmp_path) == 0
    assert ScriptedEvaluator.candidates == ["fast", "wrong", "odd"]
    assert run_import(path, "--json", str(out), "--precision", "strict", folder=tmp_path) == 0
    assert run_import(path, "--json", str(out), folder=tmp_path / "other") == 0
    assert ScriptedEvaluator.candidates[3:] == ["fast", "wrong", "odd"] * 2


def test_a_failure_of_ours_is_told_does_not_stop_the_rest_and_is_tried_again(
    tmp_path: Path,
) -> None:
    path, out = release(tmp_path, line(1, "ours"), line(2, "fast")), tmp_path / "out.jsonl"
    for _ in range(2):
        assert run_import(path, "--json", str(out), folder=tmp_path) == 1
    first = read(out)[0]
    assert (first["outcome"], first["reason"]) == ("failed", "ValueError: a bug")
    assert ScriptedEvaluator.candidates == ["ours", "fast", "ours"]


def test_level_and_limit_choose(tmp_path: Path) -> None:
    path = release(tmp_path, line(1, "fast"), line(2, "wrong"))
    assert run_import(path, "--level", "2", folder=tmp_path) == 1
    assert run_import(path, "--limit", "1", folder=tmp_path) == 0
    assert ScriptedEvaluator.candidates == ["fast"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["absent.json"], "a release file"), (["--reference", "absent", "release.json"], "absent")],
)
def test_a_path_that_is_not_there_is_wrong_usage(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    release(tmp_path, line(1, "fast"))
    assert run_import(*arguments, folder=tmp_path) == 2
    assert reason in capsys.readouterr().err


def test_a_stored_decision_is_written_as_flashinfer_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    space: dict[str, Any] = {}
    exec(MODEL, space)
    command = [
        "export-kernels",
        str(tmp_path / "model.py"),
        "--out",
        str(tmp_path / "trace"),
        "--device",
        "cpu",
    ]
    command += ["--cache-dir", str(tmp_path / "cache"), "--quiet", "--json"]
    assert main(command) == 0
    (exported,) = json.loads(capsys.readouterr().out)["exported"]
    assert (exported["files"], exported["reason"]) == ([], "the cache holds no decision for it")
    with torch.no_grad():
        plant(space["Model"](), space["get_inputs"](), tmp_path / "cache")
    assert main(command) == 0
    (exported,) = json.loads(capsys.readouterr().out)["exported"]
    texts = {
        path.split("/")[0]: (tmp_path / "trace" / path).read_text() for path in exported["files"]
    }
    definition, solution = (
        Definition.from_json(json.loads(texts["definitions"])),
        Solution.from_json(json.loads(texts["solutions"])),
    )
    assert solution.definition == definition.name
    assert FlashInferTrace.from_json(json.loads(texts["traces"])).solution == solution.name
    assert FlashInferTrace.from_json(json.loads(texts["workloads"])).solution is None


def test_a_target_that_cannot_be_loaded_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "export-kernels",
                str(tmp_path / "none.py"),
                "--out",
                str(tmp_path),
                "--device",
                "cpu",
                "--quiet",
            ]
        )
        == 2
    )
    assert "there is no file" in capsys.readouterr().err
