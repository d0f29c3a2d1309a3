"""Files of Inductor's cache travel whole, into their folder and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.cache import inductor_files
from torch_cudal1.store.cache.inductor_files import pack_folder, unpack_folder


def folder(root: Path) -> Path:
    (root / "fxgraph" / "ab").mkdir(parents=True)
    (root / "fxgraph" / "ab" / "graph").write_bytes(b"a pickle")
    (root / "cd.so").write_bytes(b"machine code")
    (root / "cd.lock").touch()
    return root


def pack_sample(root: Path) -> dict[str, Any]:
    files = pack_folder(folder(root))
    assert isinstance(files, dict)
    return files


def test_what_was_packed_is_there_again_without_locks(tmp_path: Path) -> None:
    assert unpack_folder(pack_sample(tmp_path / "made"), tmp_path / "out") == 2
    unpacked = {
        path.relative_to(tmp_path / "out").as_posix(): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert unpacked == {"fxgraph/ab/graph": b"a pickle", "cd.so": b"machine code"}
    assert unpack_folder(pack_sample(tmp_path / "again"), tmp_path / "out") == 0


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "cd.so").write_bytes(b"mine")
    assert unpack_folder(pack_sample(tmp_path / "made"), tmp_path / "out") == 1
    assert (tmp_path / "out" / "cd.so").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "name",
    [
        "../out.so",
        "/etc/x",
        "a/../../x",
        "a//b",
        "a/./b",
        "..",
        "a\\b",
        "a\nb",
        "",
        "a/" * 12 + "b",
    ],
)
def test_a_path_that_leaves_the_folder_is_refused_and_nothing_is_written(
    tmp_path: Path, name: str
) -> None:
    files = pack_sample(tmp_path / "made")
    refused = unpack_folder({**files, name: files["cd.so"]}, tmp_path / "out")
    assert isinstance(refused, Refusal)
    assert "no path inside the folder" in refused.reason
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "record", [["0" * 64, "bWFjaGluZSBjb2Rl"], ["x"], 5, ["a", "not base64!"], None]
)
def test_a_file_that_is_not_the_one_that_was_packed_is_refused_by_name(
    tmp_path: Path, record: Any
) -> None:
    refused = unpack_folder({**pack_sample(tmp_path / "made"), "cd.so": record}, tmp_path / "out")
    assert isinstance(refused, Refusal)
    assert "cd.so" in refused.reason
    assert not (tmp_path / "out").exists()


def test_links_are_neither_packed_nor_written_through(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a key")
    root = folder(tmp_path / "made")
    (root / "link").symlink_to(tmp_path / "secret")
    files = pack_folder(root)
    assert isinstance(files, dict)
    assert "link" not in files
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "cd.so").symlink_to(tmp_path / "secret")
    assert unpack_folder(files, tmp_path / "out") == 1
    assert (tmp_path / "secret").read_text() == "a key"


def test_too_much_is_refused_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = pack_sample(tmp_path / "made")
    monkeypatch.setattr(inductor_files, "LIMIT_BYTES", 15)
    for refused in (pack_folder(tmp_path / "made"), unpack_folder(files, tmp_path / "out")):
        assert isinstance(refused, Refusal)
        assert "15 bytes" in refused.reason
    assert not (tmp_path / "out").exists()
