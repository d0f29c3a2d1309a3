"""`cudal1 judge`: exit codes, document, screen, and release files that go on where they stopped.
Verdicts are made up here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torch_cudal1.__main__ import main
from torch_cudal1.cli.commands import judge, release
from torch_cudal1.cli.commands.verdicts import EXIT_CODES, SCHEMA
from torch_cudal1.ir.records import Accepted, CheckResult, Rejected, Timing, Verdict
from torch_cudal1.judge.evaluate.source_baselines import Baselines
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluation, SourceEvaluationConfig
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceCandidate

RIGHT = Verdict(
    (CheckResult("numerics", True, 1.01, 2.0, "normal inputs"), CheckResult("special", True))
)
WRONG = Verdict((CheckResult("numerics", False, 7.0, 2.0, "a bias is missing"),))
KEYS = {
    *(
        "schema",
        "package",
        "profile",
        "contract",
        "gradients",
        "device",
        "target",
        "sha256",
        "outcome",
        "reason",
        "detector",
    ),
    *("numbers", "checks", "error_ratio", "timing", "baselines", "confinement", "elapsed_s"),
}


def timing(low: float) -> Timing:
    return Timing(
        RIGHT,
        "inductor",
        100.0,
        150.0,
        1.5,
        low,
        1.6,
        56,
        {"eager": 200.0, "inductor": 150.0},
        score=low,
    )


JUDGED = {  # a candidate's text, and what becomes of it
    "faster": (Accepted(timing(1.4)), RIGHT),
    "slow": (
        Rejected(
            "speed-up over inductor is 1.500, at least 1.000", "timing", {"low": 1.0}, timing(1.0)
        ),
        RIGHT,
    ),
    "wrong": (Rejected("a bias is missing", "numerics", {"value": 7.0, "limit": 2.0}), WRONG),
    "odd": (
        Rejected("eager refuses the inputs made for it", "inputs"),
        Verdict((CheckResult("inputs", False),)),
    ),
}


class StandIn:
    """A evaluator that answers by the candidate's text."""

    asked: list[str]

    def __init__(
        self, job: SourceEvaluationConfig, progress: Any = None, *, ahead: bool = False
    ) -> None:
        self.config = job

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def evaluate(self, reference: str, candidate: str) -> SourceEvaluation:
        StandIn.asked.append(candidate)
        if reference == "broken":
            raise ReferenceFailure("reading the reference", "it defines no Model")
        decision, verdict = JUDGED[candidate]
        baselines = (
            Baselines("inductor", {"eager": 200.0, "inductor": 150.0}, {"inductor+graph": "no GPU"})
            if verdict is RIGHT
            else None
        )
        return SourceEvaluation(
            SourceCandidate(candidate),
            decision,
            verdict,
            baselines,
            elapsed_s={"start": 3.0, "numerics": 0.2},
        )


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn.asked = []
    monkeypatch.setattr(release, "SourceEvaluator", StandIn)
    monkeypatch.setattr(
        judge,
        "evaluate_source",
        lambda reference, candidate, job, progress: StandIn(job).evaluate(reference, candidate),
    )
    monkeypatch.setenv("COLUMNS", "200")


def files(folder: Path, candidate: str, reference: str = "reference") -> list[str]:
    for name, content in (("ref.py", reference), ("new.py", candidate)):
        (folder / name).write_text(content)
    return [str(folder / "ref.py"), str(folder / "new.py")]


OUTCOMES = {
    "faster": "accepted",
    "slow": "not_faster",
    "wrong": "refused",
    "odd": "reference_unusable",
}


@pytest.mark.parametrize("candidate", JUDGED)
def test_exit_code_document_and_screen_say_the_same(
    candidate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = files(tmp_path, candidate)
    code = main(
        ["judge", *pair, "--device", "cpu", "--quiet", "--json", str(tmp_path / "out.json")]
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["outcome"], code) == (OUTCOMES[candidate], EXIT_CODES[OUTCOMES[candidate]])
    assert {*KEYS, "files"} == set(found)
    assert found["schema"] == SCHEMA
    shown = capsys.readouterr().out
    for check in found["checks"]:
        assert check["name"] in shown
        assert check["value"] is None or f"{check['value']:.3g}" in shown
    assert found["reason"] in shown
    if candidate == "faster":
        assert "1.50x [1.40, 1.60]" in shown.splitlines()[0]
        assert found["timing"]["saved_us"] == 50.0
    assert ("150 us" in shown) == (found["baselines"] is not None)


def test_json_without_a_file_is_all_of_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["judge", *files(tmp_path, "wrong"), "--device", "cpu", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["detector"] == "numerics"


def test_a_reference_that_cannot_be_used_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["judge", *files(tmp_path, "faster", "broken"), "--device", "cpu"]) == 2
    assert "the reference cannot be used: it defines no Model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "two Python files"),
        (["only.py"], "two Python files"),
        (["absent.py", "absent.py"], "No such file"),
        (["a.py", "b.py", "--release", "f.json"], "nothing beside --release"),
        (["--release", "absent.json"], "No such file"),
    ],
)
def test_wrong_usage_is_2_and_one_line(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["judge", *arguments, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_candidate_that_is_no_text_is_still_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = files(tmp_path, "")
    Path(pair[1]).write_bytes(b"\xff\x00class ModelNew")
    monkeypatch.setitem(JUDGED, "\ufffd\x00class ModelNew", JUDGED["wrong"])
    assert main(["judge", *pair, "--device", "cpu"]) == 3


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
def published(tmp_path: Path) -> Path:
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
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["judge", "--release", str(published), "--device", "cpu", "--json", str(out)]) == 0
    found = entries(out)
    outcomes = ["accepted", "not_faster", "refused", "withdrawn", "withdrawn", "reference_unusable"]
    assert [entry["outcome"] for entry in found] == outcomes
    assert [(entry["line"], entry["level_id"], entry["task_id"]) for entry in found][-1] == (
        6,
        2,
        "6",
    )
    assert all({*KEYS, "line", "level_id", "task_id", "published"} == set(entry) for entry in found)
    assert found[3]["published"] == {"score_default": 2.5}
    table = capsys.readouterr().out
    for row in ("accepted", "not faster", "refused by numerics", "withdrawn", "reference unusable"):
        assert row in table
    assert (
        " ".join(next(row for row in table.splitlines() if row.startswith("withdrawn  ")).split())
        == "withdrawn 2 33.3% -"
    )


def test_an_interrupted_run_goes_on_where_it_stopped(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = ["judge", "--release", str(published), "--device", "cpu", "--json", str(out)]
    assert main([*command, "--limit", "2"]) == 0
    with out.open("a") as file:
        file.write('{"outcome": "acc')  # killed while it wrote
    StandIn.asked = []
    assert main(command) == 0
    assert StandIn.asked == ["wrong", "faster"]
    whole = [json.loads(each) for each in out.read_text().splitlines() if each.endswith("}")]
    assert [entry["line"] for entry in whole] == [1, 2, 3, 4, 5, 6]


def test_a_result_made_under_other_terms_is_no_result(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [
        "judge",
        "--release",
        str(published),
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
    assert len(StandIn.asked) == 4
    published.write_text(line(1, "wrong"))
    assert main(command) == 0
    assert StandIn.asked[4:] == ["wrong"]


def test_level_and_limit_choose_lines(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "judge",
                "--release",
                str(published),
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
    assert StandIn.asked == []


@pytest.mark.parametrize(
    "given", [["--limit", "0"], ["--profile", "quick"], ["--contract", "loose"]]
)
def test_values_that_do_not_exist_are_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["judge", "a.py", "b.py", *given])
