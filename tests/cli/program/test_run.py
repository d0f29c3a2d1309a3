"""`cudal1 run`: the program runs as Python would run it, and what ran is reported on stderr."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from torch_cudal1.__main__ import main

PROGRAM = """
import sys
import torch
from torch import nn
from neighbour import SIZE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return torch.tanh(self.linear(x))

def main():
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        for _ in range(3):
            y = net(torch.ones(2, SIZE))
    print(__name__, sys.argv[1:], round(float(y.sum()), 4))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The command writes its options there for the program's own processes.
    for name in [name for name in os.environ if name.startswith("TORCH_CUDAL1_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_CUDAL1_ON_MISS", "baseline")
    monkeypatch.setenv("TORCH_CUDAL1_CACHE_DIR", str(tmp_path / "default"))
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "neighbour.py").write_text("SIZE = 8\n")
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    return tmp_path


def run(*arguments: object) -> int:
    return main(["run", *map(str, arguments)])


def test_a_program_gets_its_own_arguments_and_finds_its_neighbours(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list(sys.argv), list(sys.path)
    assert run("--cache-dir", folder / "cache", folder / "program.py", "--json", "-m", "x") == 0
    printed = capsys.readouterr()
    assert printed.out == "__main__ ['--json', '-m', 'x'] -1.5732\n"
    assert "cudal1: Net, 3 calls: " in printed.err
    assert (sys.argv, sys.path) == before


def test_a_module_runs_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run("-m", "program", "1") == 0
    assert capsys.readouterr().out.startswith("__main__ ['1'] ")


def test_the_quick_tier_serves_a_program_that_knows_nothing_of_it(
    folder: Path,
    dynamo: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch_cudal1.api.quick_tier.MIN_SPEEDUP_BEYOND_NOISE", 0.0)
    options = ("--on-miss", "quick", "--cache-dir", folder / "cache")
    assert run(*options, folder / "program.py") == 0
    printed = capsys.readouterr()
    assert printed.out == "__main__ [] -1.5732\n"
    assert "cudal1: Net, 3 calls: inductor" in printed.err
    # Processes that the program starts read the options there.
    assert os.environ["TORCH_CUDAL1_ON_MISS"] == "quick"


@pytest.mark.parametrize(
    ("statement", "code", "stderr"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("raise OSError('mine')", 1, "OSError: mine"),
    ],
)
def test_the_exit_code_and_the_error_are_the_programs_own(
    statement: str, code: int, stderr: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "program.py").write_text(f"import sys\n\n{statement}\n")
    assert run("--quiet", folder / "program.py") == code
    error_text = capsys.readouterr().err
    assert stderr in error_text
    # The traceback begins in the program.
    assert "runpy" not in error_text
    assert "program/run.py" not in error_text


def test_a_program_that_is_not_there_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder / "absent.py") == 2
    error_text = capsys.readouterr().err
    assert "absent.py" in error_text
    assert "-m and the name of a module" in error_text
