"""Finds the optional C++ extension `torch_cudal1._native` once and says why it is not there.

It makes guard, programs and graph replays faster and is never a requirement: without it plain
Python answers the same. It uses torch's C++ interface, which is only stable within one minor
release, so one built with another torch is refused, not tried. It does not build anything
(`setup.py` does), and importing this module does not load the extension.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from torch_cudal1.core.refusal import Refusal

__all__ = ["Build", "build", "extension", "status"]

_NAME = "torch_cudal1._native"
# INTERFACE of csrc/module.cpp: an extension left over from other sources may lack what Python calls.
_INTERFACE = 6
# Written by setup.py when it built no extension.
_BUILD_NOTE = Path(__file__).parents[1] / "_native_build.txt"
_HINT = "with torch and a C++ compiler installed, `pip install --no-build-isolation .` builds it"


def status() -> tuple[bool, str]:
    """Whether the extension is used, and the reason if it is not. Never raises; looked up once in a
    process.
    """
    module, reason = _load()
    return module is not None, reason


@dataclass(frozen=True)
class Build:
    """How the extension came to be: file name, torch and compiler that it was built with ("" where
    there is none), and its use.
    """

    used: bool
    reason: str
    file: str = ""
    torch: str = ""
    compiler: str = ""

    def __str__(self) -> str:
        built = (
            f"{self.file}, built with torch {self.torch} by {self.compiler}" if self.file else ""
        )
        return (
            f"used: {built}"
            if self.used
            else "; ".join(part for part in (f"not used: {self.reason}", built) if part)
        )


def build() -> Build:
    """Whether and how the extension was built. Never raises."""
    used, reason = status()
    module = sys.modules.get(_NAME)  # also one that loaded and was refused
    if module is None:
        return Build(used, reason)
    facts = (str(getattr(module, name, "unknown")) for name in ("TORCH_VERSION", "COMPILER"))
    return Build(used, reason, Path(str(module.__file__)).name, *facts)


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
    built_with = str(getattr(module, "TORCH_VERSION", "unknown"))
    refusal = check_torch_version(built_with, torch.__version__) or check_interface(module)
    return (module, "") if refusal is None else (None, str(refusal))


def check_torch_version(built_with: str, running: str) -> Refusal | None:
    """Why an extension built with one torch version may not be used with another."""
    if _minor(built_with) == _minor(running):
        return None
    return Refusal(
        f"built with torch {built_with}, and this is torch {running} "
        f"(it must be the same minor release); {_HINT}"
    )


def check_interface(module: object) -> Refusal | None:
    """Why an extension built from other sources of this package may not be used."""
    interface = getattr(module, "INTERFACE", 1)
    if interface == _INTERFACE:
        return None
    return Refusal(
        f"built from other sources (interface {interface}, expected {_INTERFACE}); {_HINT}"
    )


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _build_note() -> str:
    try:
        return _BUILD_NOTE.read_text(encoding="utf-8").strip() or "no reason was recorded"
    except FileNotFoundError:
        return "no build was recorded"
    except (OSError, UnicodeDecodeError) as error:
        return f"its build record {_BUILD_NOTE.name} is unreadable ({error})"
