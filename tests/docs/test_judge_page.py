"""The page about the judge: its tables are the code's, and its example runs as it says."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversarial.case import DETECTORS
from tests.docs.test_examples import ROOT, blocks
from torch_cudal1.__main__ import main
from torch_cudal1.cli.commands.verdicts import EXIT_CODES
from torch_cudal1.judge.checks.profiles import TIMING_PLANS
from torch_cudal1.judge.checks.validate import PROTOCOL

PAGE = ROOT / "docs" / "judge.md"
ABOUT_TIME = {
    "timing",
    "timing_state",
    "unstable",
    "wall_slope",
    "jump",
}  # a busy machine may not be able to tell
NAMED_AT = {
    "Check": 0,
    "Rejected": 1,
    "CandidateFailure": 2,
}  # where the name of a detector stands among the arguments


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first column is `heading`."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    table = lines[start + 2 : lines.index("", start)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def constants(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def named(tree: ast.AST) -> Iterator[str]:
    """Names of detectors that stand where a check or a failure is made."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in NAMED_AT
        ):
            given = node.args[NAMED_AT[node.func.id] : NAMED_AT[node.func.id] + 1]
            yield from (
                each.value
                for each in given
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value
            )


def test_every_detector_of_the_code_is_on_the_page_and_no_other() -> None:
    trees = [
        ast.parse(path.read_text()) for path in (ROOT / "torch_cudal1" / "judge").rglob("*.py")
    ]
    written = {text for tree in trees for text in constants(tree)}
    functions = {step.detector.__name__ for step in PROTOCOL}
    there = (
        {name for tree in trees for name in named(tree)}
        | {name for name in DETECTORS if name in written | functions}
        | {"run"}
    )
    documented = [row[0].strip("`") for row in rows("check")]
    assert len(documented) == len(set(documented))
    assert set(documented) - there == set(), "on the page, but not in the code"
    assert there - set(documented) == set(), "in the code, but not on the page"


def test_the_profiles_are_the_codes() -> None:
    assert [row[0].strip("`") for row in rows("profile")] == list(TIMING_PLANS)


def test_the_exit_codes_are_the_codes() -> None:
    assert {int(row[0]) for row in rows("exit code")} == set(EXIT_CODES.values())


def test_the_page_promises_no_detector_earlier_than_the_protocol_asks_it() -> None:
    since = {step.detector.__name__: step.since for step in PROTOCOL}
    for name, profile, _ in rows("check"):
        asked = since.get(name.strip("`"))
        assert asked is None or name == "`mode`" or profile == f"`{asked}`", name


def test_the_example_is_judged_right_and_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine not at the first try: the sort is several times slower, whatever else runs."""
    for block in blocks(PAGE, "python"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    command = [
        "judge",
        str(tmp_path / "reference.py"),
        str(tmp_path / "candidate.py"),
        "--device",
        "cpu",
        "--quiet",
    ]
    for _ in range(3):
        code = main([*command, "--json", str(tmp_path / "verdict.json")])
        found = json.loads((tmp_path / "verdict.json").read_text())
        if code == 0:
            break
        assert found["detector"] in ABOUT_TIME, found["reason"]
    assert (code, found["outcome"]) == (0, "accepted")
    assert found["timing"]["low"] >= 1.05
    assert found["confinement"]["level"] >= 2
    assert capsys.readouterr().out.startswith("accepted: ") or found["checks"]
