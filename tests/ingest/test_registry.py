"""The registry of published formats: each path is of one format, and the documentation lists all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_examples import ROOT
from torch_cudal1.ingest.formats.registry import FORMATS, find_format, read_tasks

PAGE = ROOT / "docs" / "from-laptop-to-fleet.md"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("release.json", "CUDA-L1 release"),
        ("release", "CUDA-L1 release"),
        ("kernel.py", "KernelBench"),
        ("kernels/a.py", "KernelBench"),
        ("trace/definitions/d.json", "FlashInfer-Trace"),
    ],
)
def test_a_path_is_of_the_first_format_that_recognises_it(
    tmp_path: Path, path: str, name: str
) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    top = tmp_path / Path(path).parts[0]
    assert find_format(top).name == name


def test_a_path_that_is_not_there_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"absent\.json"):
        list(read_tasks(tmp_path / "absent.json"))


def test_the_documentation_lists_every_format_in_the_registry() -> None:
    lines = PAGE.read_text().splitlines()
    start = lines.index("| format | what to pass |") + 2
    rows = lines[start : lines.index("", start)]
    assert rows == [f"| {each.name} | {each.layout} |" for each in FORMATS]
