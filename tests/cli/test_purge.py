"""`cudal1 purge` deletes what was asked for, and nothing without --yes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.cache_cases import damage, put_entry, run_command
from torch_cudal1.__main__ import main


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    put_entry(tmp_path, 4, "first")
    put_entry(tmp_path, 8, "second")
    return tmp_path


def test_purge_without_yes_deletes_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_command(capsys, "purge", "--cache-dir", str(cache))
    assert code == 0
    assert "2 files would be deleted" in out
    assert len(list(cache.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize(("options", "remaining"), [([], 0), (["--broken"], 1)])
def test_purge_with_yes_deletes_what_was_asked(
    cache: Path, options: list[str], remaining: int, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(cache)
    assert main(["purge", "--yes", *options, "--cache-dir", str(cache)]) == 0
    assert len(list(cache.rglob("*.safetensors"))) == remaining


@pytest.mark.parametrize("options", [[], ["--yes"]])
def test_purge_of_a_key_that_fits_nothing_deletes_nothing_and_is_2(
    cache: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(cache)
    assert main(["purge", "nokey", *options, "--cache-dir", str(cache)]) == 2
    assert "'nokey'; expected the start of a key of `cudal1 list`" in capsys.readouterr().err
    assert len(list(cache.rglob("*.safetensors"))) == 2


def test_purge_by_key_leaves_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry, other = put_entry(tmp_path, 4, "first"), put_entry(tmp_path, 8, "second")
    assert main(["purge", entry.region_key[:16], "--yes", "--cache-dir", str(tmp_path)]) == 0
    assert [path.stem for path in tmp_path.rglob("*.safetensors")] == [other.region_key]
