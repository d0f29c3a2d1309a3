"""Finds the optional C++ extension `torch_cudal1._guard` once and says why it is not there.

It is an accelerator of `torch_cudal1.guard`, never a requirement: without it the plain Python guard answers the same. The extension
uses torch's C++ interface, which is only stable within one minor release, so one built with another torch is refused, not tried.
It does not build anything (`setup.py` does), and importing this module does not load the extension.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["extension", "status"]

_NAME = "torch_cudal1._guard"
_BUILD_NOTE = Path(__file__).with_name("_guard_build.txt")  # written by setup.py when it built no extension
_HINT = "with torch and a C++ compiler installed, `pip install --no-build-isolation .` builds it"


def status() -> tuple[bool, str]:
    """Whether the extension is used, and the reason if it is not. Never raises; found out once in a process."""
    module, reason = _load()
    return module is not None, reason


def extension() -> ModuleType | None:
    """The extension module, or None where `status()` gives the reason."""
    return _load()[0]


@cache
def _load() -> tuple[ModuleType | None, str]:
    if find_spec(_NAME) is None:
        return None, f"not built: {_build_note()}; {_HINT}"
    try:
        module = import_module(_NAME)
    except ImportError as error:  # also what a missing symbol of another torch looks like
        return None, f"built, but does not load with torch {torch.__version__}: {error}; {_HINT}"
    reason = mismatch(str(getattr(module, "TORCH_VERSION", "unknown")), torch.__version__)
    return (None, reason) if reason else (module, "")


def mismatch(built_with: str, running: str) -> str:
    """Why an extension built with one torch version may not be used with another; "" if it may."""
    if _minor(built_with) == _minor(running):
        return ""
    return f"built with torch {built_with}, and this is torch {running} (it must be the same minor release); {_HINT}"


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _build_note() -> str:
    try:
        return _BUILD_NOTE.read_text(encoding="utf-8").strip() or "no reason was recorded"
    except FileNotFoundError:
        return "no build was recorded"
    except (OSError, UnicodeDecodeError) as error:
        return f"its build record {_BUILD_NOTE.name} is unreadable ({error})"
