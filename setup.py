"""Builds the optional C++ guard (`torch_cudal1._guard`) next to the pure Python package; metadata is in pyproject.toml.

Needs torch and a C++ compiler in the environment that builds: `pip install --no-build-isolation .` (with build isolation torch is
absent, and the package is pure Python). `CUDAL1_NO_EXTENSION=1` skips it. Whatever goes wrong, the install succeeds: the reason is
printed, and written to `torch_cudal1/_guard_build.txt`, which `torch_cudal1.native.status()` quotes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

NAME, SOURCE = "torch_cudal1._guard", "csrc/guard.cpp"
FLAGS = ["-O2", "-g0", "-fvisibility=hidden"]  # torch adds the C++ standard that its headers need


def _tools() -> tuple[type[build_ext], dict[str, Any], str]:
    """The build command and the extension's arguments that torch provides, or why they are missing."""
    if os.environ.get("CUDAL1_NO_EXTENSION", "0") not in ("", "0"):
        return build_ext, {}, "CUDAL1_NO_EXTENSION is set"
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        return build_ext, {}, f"torch cannot be imported where the package is built ({error}); build isolation hides it"
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        return build_ext, {}, f"no C++ compiler: {compiler!r} is not on PATH"
    known = CppExtension(NAME, [SOURCE], extra_compile_args=FLAGS)
    keys = ("include_dirs", "library_dirs", "libraries", "runtime_library_dirs", "extra_compile_args", "language")
    return BuildExtension.with_options(use_ninja=False), {key: getattr(known, key) for key in keys}, ""


command, arguments, missing = _tools()


class BuildOptional(command):  # type: ignore[misc, valid-type]
    """Builds the extension if it can; if not, records why and goes on."""

    def run(self) -> None:
        reason = missing
        if not reason:
            try:
                super().run()
            except (
                BaseError,
                CCompilerError,
                RuntimeError,
                OSError,
            ) as error:  # what compilers, torch's checks and missing files raise
                reason = f"the build failed: {' '.join(str(error).split())[:400]}"
        self._record(reason)

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def _record(self, reason: str) -> None:
        for root in {Path(self.build_lib), Path() if self.inplace else Path(self.build_lib)}:
            note = root / "torch_cudal1" / "_guard_build.txt"
            note.unlink(missing_ok=True)
            if reason:
                print(f"torch-cudal1: the C++ guard is not built, the Python one will be used: {reason}")
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(reason + "\n", encoding="utf-8")


setup(ext_modules=[Extension(NAME, [SOURCE], **arguments)], cmdclass={"build_ext": BuildOptional})
