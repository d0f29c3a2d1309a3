"""`cudal1 judge --release`: every line has a result, and a second run goes on where the first stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.scripted_evaluator import KEYS, ScriptedEvaluator, patch_evaluators
from torch_cudal1.__main__ import main


@pytest.fixture(autouse=True)
def evaluator_script(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_evaluators(monkeypatch)


def line(task: int, code: str | None, reference: str = "reference", level: int = 1) -> str:
    return json.dumps(
        {
            "level_id": level,
            "task_id": task,
            "ref_code": reference,
            "custom_code": code,
            "score_default": 2.5,
        }
    )


@pytest.fixture
def release_file(tmp_path: Path) -> Path:
    path = tmp_path / "release.json"
    lines = [
        line(1, "faster"),
        line(2, "slow"),
        line(3, "wrong"),
        line(4, None),
        line(5, "None"),
        line(6, "faster", "broken", 2),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()]


def test_every_line_of_a_release_has_a_result(
    release_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert (
        main(["judge", "--release", str(release_file), "--device", "cpu", "--json", str(out)]) == 0
    )
    results = entries(out)
    outcomes = ["accepted", "not_faster", "refused", "withdrawn", "withdrawn", "reference_unusable"]
    assert [entry["outcome"] for entry in results] == outcomes
    assert [(entry["line"], entry["level_id"], entry["task_id"]) for entry in results][-1] == (
        6,
        2,
        "6",
    )
    assert all(
        {*KEYS, "line", "level_id", "task_id", "published"} == set(entry) for entry in results
    )
    assert results[3]["published"] == {"score_default": 2.5}
    table = capsys.readouterr().out
    for row in ("accepted", "not faster", "refused by numerics", "withdrawn", "reference unusable"):
        assert row in table
    assert (
        " ".join(next(row for row in table.splitlines() if row.startswith("withdrawn  ")).split())
        == "withdrawn 2 33.3% -"
    )


def test_an_interrupted_run_goes_on_where_it_stopped(release_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = ["judge", "--release", str(release_file), "--device", "cpu", "--json", str(out)]
    assert main([*command, "--limit", "2"]) == 0
    with out.open("a") as file:
        file.write('{"outcome": "acc')  # killed while it wrote
    ScriptedEvaluator.candidates = []
    assert main(command) == 0
    assert ScriptedEvaluator.candidates == ["wrong", "faster"]
    documents = [json.loads(each) for each in out.read_text().splitlines() if each.endswith("}")]
    assert [entry["line"] for entry in documents] == [1, 2, 3, 4, 5, 6]


def test_a_result_made_under_other_terms_is_no_result(release_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [
        "judge",
        "--release",
        str(release_file),
        "--device",
        "cpu",
        "--json",
        str(out),
        "--limit",
        "1",
    ]
    for more in ([], ["--inference"], ["--profile", "strict"], ["--contract", "kernelbench"]):
        assert main([*command, *more]) == 0
        assert main([*command, *more]) == 0
    assert len(ScriptedEvaluator.candidates) == 4
    release_file.write_text(line(1, "wrong"))
    assert main(command) == 0
    assert ScriptedEvaluator.candidates[4:] == ["wrong"]


def test_level_and_limit_choose_lines(
    release_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "judge",
                "--release",
                str(release_file),
                "--device",
                "cpu",
                "--level",
                "2",
                "--limit",
                "5",
                "--json",
            ]
        )
        == 0
    )
    assert [entry["line"] for entry in json.loads(capsys.readouterr().out)] == [6]


@pytest.mark.parametrize(
    "content", ["{", "[1]", '{"level_id": 1}', '{"task_id": 1, "ref_code": 3, "custom_code": "x"}']
)
def test_a_release_file_with_a_line_that_is_no_task_is_refused_by_its_number(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "release.json"
    path.write_text(line(1, "wrong") + "\n\n" + content + "\n")
    assert main(["judge", "--release", str(path), "--device", "cpu"]) == 2
    assert "line 3" in capsys.readouterr().err
    assert ScriptedEvaluator.candidates == []
