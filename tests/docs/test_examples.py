"""The examples of README and docs: Python ones run, command lines are accepted, names and files
that are mentioned exist.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from torch_cudal1.__main__ import parser
from torch_cudal1.core.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_REGISTER = "import torch\nfrom torch_cudal1.api.backend import cudal1 as _backend\ntorch._dynamo.register_backend(_backend, 'cudal1')\n"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return [
        content
        for found, content in _FENCE.findall(page.read_text(encoding="utf-8"))
        if found == language
    ]


def commands(page: Path) -> list[list[str]]:
    """The `cudal1` command lines of a page's shell blocks, as arguments."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("cudal1 ")]


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
WITH_COMMANDS = [page for page in PAGES if commands(page)]


def script_of(page: Path, folder: Path) -> str:
    """The Python blocks of a page as one script, read on like the page; a block headed "# name.py"
    becomes that file.
    """
    parts = []
    for block in blocks(page, "python"):
        named = re.match(r"# (\w+\.py)\n", block)
        if named:
            (folder / named.group(1)).write_text(block)
        else:
            parts.append(
                re.sub(r"budget_s=[\d.]+", "budget_s=0.5", block)
            )  # enough to race the baselines, and no candidate
    return "\n".join(parts)


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_python_examples_run(page: Path, tmp_path: Path) -> None:
    # The entry point of an installed package makes the backend known by name; a checkout on the
    # path has none.
    script = script_of(page, tmp_path)
    (tmp_path / "example.py").write_text(
        (_REGISTER if 'backend="cudal1"' in script else "") + script
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment |= {
        "PYTHONPATH": str(ROOT),
        PREFIX + "CACHE_DIR": str(tmp_path / "cache"),
        PREFIX + "STRICTNESS": "error",
    }
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_command_lines_are_accepted(page: Path) -> None:
    for arguments in commands(page):
        parser().parse_args(arguments)  # SystemExit for anything that is not


def test_a_command_line_that_does_not_exist_would_be_noticed() -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["warmup", "model.py:make", "--no-such-option"])


def test_the_readme_begins_with_exactly_two_commands() -> None:
    first = blocks(ROOT / "README.md", "sh")[0].splitlines()
    assert [line.split("#")[0].strip() for line in first] == ["make demo", "make test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)


@pytest.mark.parametrize("setting", fields(Settings), ids=lambda f: f.name)
def test_every_setting_is_documented_with_its_default(setting: object) -> None:
    name = setting.name  # type: ignore[attr-defined]
    lines = (ROOT / "docs" / "settings.md").read_text().splitlines()
    own = [line for line in lines if line.startswith(f"| `{name}` |")]
    assert len(own) == 1, f"{name} belongs in the table of settings, once"
    default = getattr(Settings(), name)
    if name not in ("cache_dir", "read_only_caches") and default not in (None, ""):
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        assert f"| `{shown}` |" in own[0], f"the default of {name} is {shown}"


def test_no_page_names_a_setting_that_does_not_exist() -> None:
    known = {PREFIX + f.name.upper() for f in fields(Settings)}
    for page in PAGES:
        assert set(re.findall(PREFIX + r"[A-Z_]*[A-Z]", page.read_text())) <= known, page


def test_the_map_of_the_package_names_every_room_and_no_other() -> None:
    named = [line.split("/")[0] for line in blocks(ROOT / "README.md", "text")[0].splitlines()]
    rooms = [path.parent.name for path in (ROOT / "torch_cudal1").glob("*/__init__.py")]
    assert sorted(named) == sorted(rooms)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
