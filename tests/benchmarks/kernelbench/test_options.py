"""Options become a run's job and plan; a wrong one ends the command with a message."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.kernelbench.options import make_parser


def parse(*words: str) -> argparse.Namespace:
    commands = ("run", "report", "plan", "compile")
    numbers = {name: number for number, name in enumerate(commands)}
    actions = {name: lambda args, number=number: number for name, number in numbers.items()}
    return make_parser("KernelBench", actions).parse_args(words)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("run", "tasks", "--out", "rows.jsonl"), 0),
        (("report", "rows.jsonl"), 1),
        (("plan", "tasks"), 2),
        (("compile", "tasks"), 3),
    ],
)
def test_every_command_has_its_action(words: tuple[str, ...], number: int) -> None:
    args = parse(*words)
    assert args.action(args) == number


def test_a_shard_is_a_pair_of_numbers() -> None:
    args = parse("run", "tasks", "--out", "rows.jsonl", "--shard", "1/4")
    assert args.shard == (1, 4)
    assert args.out == Path("rows.jsonl")


@pytest.mark.parametrize("shard", ["4/4", "1", "-1/4", "a/b"])
def test_a_shard_that_does_not_exist_is_refused(
    shard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("run", "tasks", "--out", "rows.jsonl", f"--shard={shard}")
    assert "expected I/N with 0 <= I < N" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("run", "tasks"), ("run", "tasks", "--out", "rows.jsonl", "--level", "4"), ()]
)
def test_wrong_usage_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        parse(*words)
    assert refusal.value.code == 2
    assert "usage:" in capsys.readouterr().err
