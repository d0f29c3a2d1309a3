"""Programs that this machine lacks, and that compilers ask something of: scripts on PATH that give
the answer meanwhile.

Nothing here compiles. What is compiled elsewhere is found again only under the name that it got
there, and such answers are part of the name.
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

# what Python asks for the format of its own program, and Triton Python: the answer is in Triton's
# file names
_LINKAGE = "file"
_SAYS_LINKAGE = """#!{python} -SE
print("ELF {bits}-bit LSB shared object")
"""
_lock = threading.RLock()  # PATH is the whole process's


@contextlib.contextmanager
def file_program_shim(device: torch.device) -> Iterator[None]:
    """Where this machine has no program `file`: one on PATH that says what it says of any Python on
    Linux.

    Triton's names for its driver library and launchers contain `platform.architecture()`. Without
    `file` that is ("64bit", ""), so what was built under ("64bit", "ELF") would not be found, and a
    C compiler asked for: in a slim container, say, on a cache that was filled outside of it.
    """
    if device.type != "cuda" or shutil.which(_LINKAGE):
        yield
        return
    bits = platform.architecture()[0].removesuffix("bit")
    with script_on_path(_LINKAGE, _SAYS_LINKAGE.format(python=sys.executable, bits=bits)):
        yield


@contextlib.contextmanager
def script_on_path(name: str, script: str) -> Iterator[None]:
    """A program of that name at the end of PATH meanwhile."""
    with _lock, tempfile.TemporaryDirectory(prefix="cudal1-stand-in-") as folder:
        program = Path(folder) / name
        program.write_text(script)
        program.chmod(0o700)
        with append_to_path(folder):
            yield
