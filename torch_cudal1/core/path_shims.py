"""Puts scripts on PATH in place of programs that a machine lacks and that compilers call.

The output of such a program, a fact about the machine, becomes part of the names of cached files. A
compiler's cache finds a file only under the name that it got where it was compiled.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from torch_cudal1.core.settings import append_to_path

__all__ = ["file_program_shim", "script_on_path"]

# platform.architecture() calls it for the format of Python's own executable, and Triton puts that
# answer into the names of its files.
_FILE_PROGRAM = "file"
# -S and -E: the script needs neither site-packages nor the user's PYTHON* variables.
_FILE_SCRIPT = """#!{python} -SE
print("ELF {bits}-bit LSB shared object")
"""
# PATH belongs to the whole process. Reentrant, because one script may be put there inside another's
# block.
_lock = threading.RLock()


@contextlib.contextmanager
def file_program_shim(device: torch.device) -> Iterator[None]:
    """Put a program `file` on PATH where this machine has none. It answers what `file` answers for
    any Python on Linux.
    """
    # Triton's names for its driver library and launchers contain `platform.architecture()`. Without
    # `file` that is ("64bit", ""), so a library built under ("64bit", "ELF") is not found, and
    # Triton calls a C compiler. A warm start of BERT-base on an H200 without programs on PATH
    # fell back for that reason.
    if device.type != "cuda" or shutil.which(_FILE_PROGRAM):
        yield
        return
    # Python knows the bits without `file`, from the size of a pointer.
    bits = platform.architecture()[0].removesuffix("bit")
    with script_on_path(_FILE_PROGRAM, _FILE_SCRIPT.format(python=sys.executable, bits=bits)):
        yield


@contextlib.contextmanager
def script_on_path(name: str, script: str) -> Iterator[None]:
    """Put a program of that name at the end of PATH for the body."""
    with _lock, tempfile.TemporaryDirectory(prefix="cudal1-stand-in-") as folder:
        program = Path(folder) / name
        program.write_text(script)
        program.chmod(0o700)
        # At the end, so that a program of the machine itself is found first.
        with append_to_path(folder):
            yield
