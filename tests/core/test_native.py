"""The optional extension: found once, refused with a reason, never a requirement."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torch_cudal1.core import native


@pytest.fixture(autouse=True)
def _fresh_lookup() -> Iterator[None]:
    native._load.cache_clear()
    yield
    native._load.cache_clear()


def test_status_gives_a_reason_exactly_if_there_is_no_extension() -> None:
    present, reason = native.status()
    assert present == (reason == "") == (native.extension() is not None)


def test_an_absent_extension_says_why_it_was_not_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note = tmp_path / "_native_build.txt"
    monkeypatch.setattr(native, "_BUILD_NOTE", note)
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    assert native.status()[1].startswith("not built: no build was recorded")
    native._load.cache_clear()
    note.write_text("no C++ compiler: 'c++' is not on PATH\n")
    present, reason = native.status()
    assert not present
    assert reason.startswith("not built: no C++ compiler")
    assert "--no-build-isolation" in reason


def test_an_unreadable_build_record_is_said_not_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note = tmp_path / "_native_build.txt"
    note.write_bytes(b"\xff\xfe\xff")
    monkeypatch.setattr(native, "_BUILD_NOTE", note)
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    assert "unreadable" in native.status()[1]


def test_an_extension_that_does_not_load_is_said_not_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> ModuleType:
        raise ImportError("undefined symbol: THPVariableClass")

    monkeypatch.setattr(native, "find_spec", lambda name: name)
    monkeypatch.setattr(native, "import_module", fail)
    present, reason = native.status()
    assert not present
    assert "undefined symbol" in reason
    assert torch.__version__ in reason


def test_an_extension_of_another_torch_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("_native")
    other.TORCH_VERSION = "2.9.1"  # type: ignore[attr-defined]
    monkeypatch.setattr(native, "find_spec", lambda name: name)
    monkeypatch.setattr(native, "import_module", lambda name: other)
    assert native.extension() is None
    assert "built with torch 2.9.1" in native.status()[1]


@pytest.mark.parametrize(
    ("built", "running", "fits"),
    [
        ("2.13.0", "2.13.0+cpu", True),
        ("2.13.0", "2.13.1+cu130", True),
        ("2.13.0", "2.12.0", False),
        ("2.1.0", "2.13.0", False),
    ],
)
def test_only_the_minor_release_has_to_be_the_same(built: str, running: str, fits: bool) -> None:
    assert (native.check_torch_version(built, running) is None) is fits


def test_importing_the_package_loads_no_extension() -> None:
    code = "import sys, torch_cudal1.runtime.guard; sys.exit('torch_cudal1._native' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == 0


def test_how_it_was_built_is_told_in_one_line() -> None:
    built = native.build()
    if native.extension() is None:
        assert str(built) == f"not used: {native.status()[1]}"
    else:
        assert built.torch.split(".")[:2] == torch.__version__.split(".")[:2]
        assert str(built).startswith(f"used: {built.file}, built with torch {built.torch} by ")
        assert built.compiler


def test_a_build_for_another_torch_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("_native")
    other.TORCH_VERSION, other.COMPILER, other.__file__ = "2.9.1", "gcc 12", "/there/_native.so"  # type: ignore[attr-defined]
    monkeypatch.setattr(native, "find_spec", lambda name: name)
    monkeypatch.setattr(native, "import_module", lambda name: other)
    monkeypatch.setitem(sys.modules, native._NAME, other)
    message = str(native.build())
    assert message.startswith("not used: built with torch 2.9.1, and this is torch")
    assert message.endswith("_native.so, built with torch 2.9.1 by gcc 12")
    assert "/there" not in message


def test_an_extension_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    left_over = ModuleType("_native")
    left_over.TORCH_VERSION = torch.__version__  # type: ignore[attr-defined]
    monkeypatch.setattr(native, "find_spec", lambda name: name)
    monkeypatch.setattr(native, "import_module", lambda name: left_over)
    present, reason = native.status()
    assert not present
    assert "built from other sources (interface 1, expected" in reason
