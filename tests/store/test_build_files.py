"""Compiled kernels lie in a folder of the versions that compiled them, and are counted."""

from __future__ import annotations

from pathlib import Path

from torch_cudal1.core.version import __version__
from torch_cudal1.store.cache.build_files import (
    BuildCount,
    build_folder,
    build_path,
    count_builds,
    name_versions,
)

KEY = "ab" * 32


def test_a_kernel_lies_below_the_versions_that_are_installed(tmp_path: Path) -> None:
    path = build_path(tmp_path, KEY)
    assert path == build_folder(tmp_path) / name_versions() / "ab" / f"{KEY}.safetensors"
    assert name_versions().startswith(f"{__version__}-torch")


def test_kernels_of_all_versions_are_counted(tmp_path: Path) -> None:
    assert count_builds(tmp_path) == BuildCount(0, 0)
    for path in (build_path(tmp_path, KEY), build_folder(tmp_path) / "old" / "ab" / f"{KEY}.json"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"12345")
    assert count_builds(tmp_path) == BuildCount(2, 10)
