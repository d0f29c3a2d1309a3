"""The file of a landscape: it holds what was written, and a damaged one is refused as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_cudal1.training.landscape.landscape_file import (
    Landscape,
    LandscapeError,
    read_landscape,
    write_landscape,
)
from torch_cudal1.training.landscape.rows import LandscapeRow

ROWS = (
    LandscapeRow("t", "a", "ok", 1.5, (1.5, 1.6), source="0123"),
    LandscapeRow("t", "b", "wrong", detail="accuracy: off", naive=2.0),
)
LANDSCAPE = Landscape({"device": "cpu", "plan": {"sets": 3}}, {"t": ROWS})


def test_a_landscape_reads_back_as_it_was_written(tmp_path: Path) -> None:
    write_landscape(tmp_path / "landscape", LANDSCAPE)
    assert read_landscape(tmp_path / "landscape") == LANDSCAPE


def test_the_same_landscape_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_landscape(tmp_path / name, LANDSCAPE)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "landscape"
    write_landscape(path, LANDSCAPE)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(LandscapeError, match="no landscape"):
        read_landscape(path)
