"""The command line: arguments, exit codes, and what it costs to ask for help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torch_cudal1.__main__ import main, parser
from torch_cudal1.cli.commands import entries
from torch_cudal1.core.errors import CacheMissError, DriverError, SettingError, TargetError

COMMANDS = ("demo", "doctor", "warmup", "plan", "explain", "list", "show", "verify", "purge")


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from torch_cudal1.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
    for word in (*COMMANDS, "exit codes", "TARGET"):
        assert word in process.stdout


def test_the_module_runs_as_a_program_and_its_exit_code_is_the_processs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch_cudal1", "show", "abcdef", "--cache-dir", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    assert process.stderr.startswith(
        "cudal1: setting 'KEY' is 'abcdef'; expected the start of exactly one key"
    )
    assert process.stderr.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--json" in shown
    assert "exit codes" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["warmup"],
        ["show"],
        ["doctor", "--no-such-option"],
        ["demo", "--budget-s", "0"],
        ["demo", "--budget-s", "soon"],
        ["warmup", "t", "--precision", "loose"],
        ["explain", "t", "--device", "tpu"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: cudal1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (TargetError("x", "y"), 2),
        (SettingError("x", 1, "2"), 2),
        (PermissionError(13, "Permission denied", "/x"), 2),
        (FileNotFoundError(2, "No such file or directory", "x"), 2),
        (OSError(28, "No space left on device"), 2),
        (CacheMissError("k" * 20, "r"), 1),
        (DriverError("cuInit", "CUDA_ERROR_NO_DEVICE", "install a driver"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_outcomes_become_exit_codes_and_one_line(
    raised: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> int:
        raise raised

    monkeypatch.setattr(entries, "verify", fail)
    assert main(["verify"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("cudal1: ")
    assert shown.err.count("\n") == 1


def test_a_path_that_is_not_there_is_told_with_what_it_was_taken_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["import", "nothing.bundle", "--cache-dir", "cache"]) == 2
    errors = capsys.readouterr().err
    assert "'nothing.bundle': No such file or directory; expected a path that exists" in errors
    assert str(tmp_path / "nothing.bundle") in errors


def test_traceback_is_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise TargetError("x", "y")

    monkeypatch.setattr(entries, "verify", fail)
    with pytest.raises(TargetError):
        main(["verify", "--traceback"])


def test_an_error_of_ours_is_not_hidden_as_a_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "verify", lambda *_: None)
    with pytest.raises(TypeError, match="expected an exit code"):
        main(["verify"])


def test_a_misspelt_variable_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_CUDAL1_CACHEDIR", "/x")
    assert main(["list"]) == 2
    assert "TORCH_CUDAL1_CACHEDIR" in capsys.readouterr().err


def test_options_reach_the_settings_and_win_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_used = []
    monkeypatch.setenv("TORCH_CUDAL1_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TORCH_CUDAL1_PRECISION", "strict")
    monkeypatch.setattr(
        entries, "verify", lambda args, settings, screen: settings_used.append(settings) or 0
    )
    assert main(["verify", "--cache-dir", str(tmp_path)]) == 0
    assert settings_used[0].cache_dir == tmp_path
    assert settings_used[0].precision == "strict"


def test_search_options_are_settings_by_name() -> None:
    args = parser().parse_args(
        ["warmup", "a", "b", "--budget", "7", "--on-miss", "tune", "--precision", "strict"]
    )
    assert (args.target, args.budget_s, args.on_miss, args.precision) == (
        ["a", "b"],
        7.0,
        "tune",
        "strict",
    )


def test_a_target_that_leads_nowhere_is_2_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "no_such_file.py:build", "--json"]) == 2
    shown = capsys.readouterr()
    assert "there is no file 'no_such_file.py'" in shown.err
    assert json.loads(shown.out)["explanations"] == []
