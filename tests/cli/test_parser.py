"""The table of commands: each leads to a function, and no two options of a command collide."""

from __future__ import annotations

from importlib import import_module

import pytest

from torch_cudal1.cli.command import Command
from torch_cudal1.cli.parser import _COMMANDS, parser


@pytest.mark.parametrize("command", _COMMANDS, ids=lambda command: command.name)
def test_every_command_leads_to_a_function(command: Command) -> None:
    module = import_module(command.module, "torch_cudal1.cli.commands")
    assert callable(getattr(module, command.function))


def test_names_of_commands_are_unique_and_each_has_a_summary() -> None:
    names = [command.name for command in _COMMANDS]
    assert len(names) == len(set(names))
    assert all(command.summary for command in _COMMANDS)


def test_a_command_line_becomes_its_command_and_its_options() -> None:
    args = parser().parse_args(["purge", "ab12", "--yes", "--cache-dir", "c"])
    assert (args.run.name, args.key, args.yes, str(args.cache_dir)) == (
        "purge",
        ["ab12"],
        True,
        "c",
    )


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan"])
def test_a_budget_is_a_number_of_seconds_above_zero(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["warmup", "t.py", f"--budget={value}"])
    assert "seconds above 0" in capsys.readouterr().err
