"""Builds the optional C++ extension `torch_cudal1._native` next to the pure Python package;
metadata is in pyproject.toml.

Needs torch and a C++ compiler in the environment that builds: `pip install --no-build-isolation .`
(with build isolation torch is absent, and the package is pure Python). `CUDAL1_NO_EXTENSION=1`
skips it. Whatever goes wrong, the install succeeds: the reason is printed, and written to
`torch_cudal1/_native_build.txt`, which `torch_cudal1.core.native.status()` quotes.
"""

from __future__ import annotations

import os
import shutil
from glob import glob
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CCompilerError

NAME, SOURCES, HEADERS = (
    "torch_cudal1._native",
    sorted(glob("csrc/*.cpp")),
    sorted(glob("csrc/*.h")),
)
SHIPPED = "kernels_cache"
FLAGS = ["-O2", "-g0", "-fvisibility=hidden"]  # torch adds the C++ standard that its headers need


def _tools() -> tuple[type[build_ext], list[Extension], str]:
    """torch's build command and the extension, or why one of its needs is missing."""
    if os.environ.get("CUDAL1_NO_EXTENSION", "0") not in ("", "0"):
        return build_ext, [], "CUDAL1_NO_EXTENSION is set"
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension, is_ninja_available
    except ImportError as error:
        return (
            build_ext,
            [],
            f"torch cannot be imported where the package is built ({error}); build isolation hides it",
        )
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        return build_ext, [], f"no C++ compiler: {compiler!r} is not on PATH"
    extension = CppExtension(NAME, SOURCES, depends=HEADERS, extra_compile_args=FLAGS)
    # Ninja compiles the files side by side; without it they take minutes.
    return BuildExtension.with_options(use_ninja=is_ninja_available()), [extension], ""


def _record(reason: str, root: str) -> None:
    """Leave `reason` beside the package's modules under `root`, or nothing if there is none."""
    note = Path(root) / "torch_cudal1" / "_native_build.txt"
    note.unlink(missing_ok=True)
    if reason:
        print(f"torch-cudal1: the C++ extension is not built, plain Python will be used: {reason}")
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(reason + "\n", encoding="utf-8")


command, extensions, missing = _tools()


class BuildModules(build_py):
    """Copies the modules and the entries that come with them. Without an extension to build, the
    reason is recorded here.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install reads them where they are
            shutil.copytree(
                SHIPPED, os.path.join(self.build_lib, "torch_cudal1", SHIPPED), dirs_exist_ok=True
            )
        if missing:
            _record(missing, "." if self.editable_mode else self.build_lib)


class BuildOptional(command):  # type: ignore[misc, valid-type]
    """Builds the extension if it can; if not, records why and goes on."""

    def run(self) -> None:
        reason, root = (
            missing,
            "." if self.inplace else self.build_lib,
        )  # asked now: a build that fails leaves inplace cleared
        try:
            super().run()
        except (
            BaseError,
            CCompilerError,
            SubprocessError,
            RuntimeError,
            OSError,
        ) as error:  # compilers, torch's checks, files
            words = " ".join(
                str(error).split()
            )  # a compiler's is its command line: the two ends tell most
            reason = f"the build failed: {words if len(words) < 200 else words[:60] + ' ... ' + words[-100:]}"
        _record(reason, root)

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def get_output_mapping(self) -> dict[str, str]:
        return {
            built: source
            for built, source in super().get_output_mapping().items()
            if os.path.exists(built)
        }


commands: dict[str, Any] = {"build_py": BuildModules, "build_ext": BuildOptional}
setup(ext_modules=extensions, cmdclass=commands)
