"""Inductor's precompiled headers lie where all children of the judge find them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor import codecache

from torch_cudal1.judge.worker.headers import keep_headers


def test_headers_lie_in_the_cache_of_inductor_and_not_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "_HEADER_DIR",
        "_HEADER_LOCK_DIR",
    ):  # without them nothing is shared, and each child compiles for seconds
        monkeypatch.setattr(codecache, name, str(tmp_path / "temporary"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    keep_headers()
    assert Path(codecache._HEADER_DIR) == tmp_path / "precompiled_headers"
    assert Path(codecache._HEADER_LOCK_DIR).parent == tmp_path / "precompiled_headers"
