"""Puts scripts on PATH for programs that a machine lacks and that compilers call for a fact.

Nothing here compiles. Caches of compilers find a file only under the name that it got where it was
compiled, and such facts are part of the name.
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

# Python calls it for the format of its own program, and Triton calls Python: the answer is in the
# names of Triton's files.
_FILE_PROGRAM = "file"
_FILE_SCRIPT = """#!{python} -SE
print("ELF {bits}-bit LSB shared object")
"""
_lock = threading.RLock()  # PATH belongs to the whole process


@contextlib.contextmanager
def file_program_shim(device: torch.device) -> Iterator[None]:
    """Put a program `file` on PATH where this machine has none; it says what `file` says of any
    Python on Linux.

    Triton's names for its driver library and launchers contain `platform.architecture()`. Without
    `file` that is ("64bit", ""), so what was built under ("64bit", "ELF") would not be found, and a
    C compiler asked for: in a slim container, say, on a cache that was filled outside of it.
    """
    if device.type != "cuda" or shutil.which(_FILE_PROGRAM):
        yield
        return
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
        with append_to_path(folder):
            yield
