"""Finds the optional C++ extension `torch_cudal1._native` once and says why it is not there.

The extension makes guards, Programs and graph replays faster and is never required: without it
plain Python gives the same answers. This module builds nothing (`setup.py` does), and importing it
does not load the extension.
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
# INTERFACE of csrc/module.cpp. An extension left over from other sources may lack functions that
# Python calls.
_INTERFACE = 8
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
    """How the extension was built: file name, and the torch and compiler that it was built with (""
    where there is no extension). `used` and `reason` are those of `status()`.
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
    # Also an extension that was loaded and then refused: how it was built says why.
    module = sys.modules.get(_NAME)
    if module is None:
        return Build(used, reason)
    facts = (str(getattr(module, name, "unknown")) for name in ("TORCH_VERSION", "COMPILER"))
    return Build(used, reason, Path(str(module.__file__)).name, *facts)


def extension() -> ModuleType | None:
    """The extension module, or None where `status()` gives the reason."""
    return _load()[0]


# Once in a process: the answer does not change, and a failed import would be tried at every call.
@cache
def _load() -> tuple[ModuleType | None, str]:
    # Looked for before it is imported, to tell "not built" from "does not load".
    if find_spec(_NAME) is None:
        return None, f"not built: {_build_note()}; {_HINT}"
    try:
        module = import_module(_NAME)
    except ImportError as error:
        # A symbol that another torch lacks is an ImportError as well.
        return None, f"built, but does not load with torch {torch.__version__}: {error}; {_HINT}"
    built_with = str(getattr(module, "TORCH_VERSION", "unknown"))
    refusal = check_torch_version(built_with, torch.__version__) or check_interface(module)
    return (module, "") if refusal is None else (None, str(refusal))


def check_torch_version(built_with: str, running: str) -> Refusal | None:
    """Why an extension built with one torch version may not be used with another."""
    # torch's C++ interface is stable within one minor release only. Calling another one is
    # undefined behaviour, so such an extension is not tried.
    if _read_minor_version(built_with) == _read_minor_version(running):
        return None
    return Refusal(
        f"built with torch {built_with}, and this is torch {running} "
        f"(it must be the same minor release); {_HINT}"
    )


def check_interface(module: object) -> Refusal | None:
    """Why an extension built from other sources of this package may not be used."""
    # Builds from before there was an INTERFACE count as 1.
    interface = getattr(module, "INTERFACE", 1)
    if interface == _INTERFACE:
        return None
    return Refusal(
        f"built from other sources (interface {interface}, expected {_INTERFACE}); {_HINT}"
    )


def _read_minor_version(version: str) -> list[str]:
    # Without the local part (+cu128, +cpu): the extension is built without CUDA and serves each of
    # them.
    return version.split("+")[0].split(".")[:2]


def _build_note() -> str:
    try:
        return _BUILD_NOTE.read_text(encoding="utf-8").strip() or "no reason was recorded"
    except FileNotFoundError:
        return "no build was recorded"
    # A note for people: if it cannot be read, that is said in its place.
    except (OSError, UnicodeDecodeError) as error:
        return f"its build record {_BUILD_NOTE.name} is unreadable ({error})"
