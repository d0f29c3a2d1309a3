"""`cudal1 judge`: exit codes, document, screen, and release files that go on where they stopped.
Verdicts are made up here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.scripted_evaluator import DECISIONS, KEYS, patch_evaluators
from torch_cudal1.__main__ import main
from torch_cudal1.cli.commands.verdicts import EXIT_CODES, SCHEMA


@pytest.fixture(autouse=True)
def evaluator_script(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_evaluators(monkeypatch)


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


@pytest.mark.parametrize("candidate", DECISIONS)
def test_exit_code_document_and_screen_say_the_same(
    candidate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = files(tmp_path, candidate)
    code = main(
        ["judge", *pair, "--device", "cpu", "--quiet", "--json", str(tmp_path / "out.json")]
    )
    document = json.loads((tmp_path / "out.json").read_text())
    assert (document["outcome"], code) == (OUTCOMES[candidate], EXIT_CODES[OUTCOMES[candidate]])
    assert {*KEYS, "files", "other_load"} == set(document)
    assert document["schema"] == SCHEMA
    shown = capsys.readouterr().out
    for check in document["checks"]:
        assert check["name"] in shown
        assert check["value"] is None or f"{check['value']:.3g}" in shown
    assert document["reason"] in shown
    if candidate == "faster":
        assert "1.50x [1.40, 1.60]" in shown.splitlines()[0]
        assert document["timing"]["saved_us"] == 50.0
    assert ("150 us" in shown) == (document["baselines"] is not None)


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
    ("arguments", "reason"),
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
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["judge", *arguments, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_a_candidate_that_is_no_text_is_still_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = files(tmp_path, "")
    Path(pair[1]).write_bytes(b"\xff\x00class ModelNew")
    monkeypatch.setitem(DECISIONS, "\ufffd\x00class ModelNew", DECISIONS["wrong"])
    assert main(["judge", *pair, "--device", "cpu"]) == 3


@pytest.mark.parametrize(
    "options", [["--limit", "0"], ["--profile", "quick"], ["--contract", "loose"]]
)
def test_values_that_do_not_exist_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["judge", "a.py", "b.py", *options])
