"""A digest of the program that this process runs: its command, its own source files as they are, and
the libraries that it has loaded.

What one process learnt of a program's Python, another may use where this is equal: the same program,
started again. Classes, functions and enumerations that a model's forward reaches in other files are
all in it, whether a guard names them or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from torch_cudal1.core.refusal import Refusal

__all__ = ["compute_program_digest", "is_library_file", "is_standard_file"]

# They have a version in every key, or are this package's own.
_VERSIONED = ("torch", "triton", "torch_cudal1", "cudal1")
# A program with more of its own source is not read at every start.
_MAX_OWN_BYTES = 64 << 20


def compute_program_digest() -> str | Refusal:
    """sha256, the same in every process that runs the same command of the same files with the same
    modules loaded and the same packages installed; a Refusal for a program that is in no file, such
    as a notebook's.
    """
    main = sys.modules.get("__main__")
    if main is None or not getattr(main, "__file__", None):
        return Refusal("the program is in no file")
    digest = hashlib.sha256(repr((sys.argv, sys.version, sys.flags)).encode())
    # Libraries ask which others there are, also of those that are not loaded.
    digest.update(repr(_list_packages()).encode())
    own_bytes = 0
    for name, path, is_library in sorted(_iter_files()):
        try:
            if is_library:
                status = os.stat(path)
                digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
                continue
            content = Path(path).read_bytes()
        except OSError as error:
            return Refusal(f"{name} cannot be read: {error.strerror}")
        own_bytes += len(content)
        if own_bytes > _MAX_OWN_BYTES:
            return Refusal("the program's own files are too many to be read at a start")
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def _list_packages() -> list[str]:
    """Name and version of every installed package, as its folder of metadata is called."""
    names: set[str] = set()
    for folder in {path or os.curdir for path in sys.path}:
        # A path that is no folder, such as a zip file, holds no folder of metadata.
        with contextlib.suppress(OSError):
            names.update(
                name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info"))
            )
    return sorted(names)


def is_library_file(path: str) -> bool:
    """Whether an installer wrote the file: Python's own, or a library's."""
    return _is_installed(path) or path.startswith(_STANDARD)


def is_standard_file(path: str) -> bool:
    """Whether the file is Python's own; `path` may be that of a code object."""
    # site-packages may lie in the folder of the standard library.
    return path.startswith(("<frozen ", *_STANDARD)) and not _is_installed(path)


def _is_installed(path: str) -> bool:
    return path.startswith(_LIBRARIES) or f"{os.sep}dist-packages{os.sep}" in path


def _list_folders(*kinds: str) -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({f"{paths[kind]}{os.sep}" for kind in kinds})


_LIBRARIES = _list_folders("purelib", "platlib")
_STANDARD = _list_folders("stdlib", "platstdlib")


def _iter_files() -> Iterator[tuple[str, str, bool]]:
    """Name, file, and whether a library's installer wrote it, of every module that is loaded, but for
    Python's own.
    """
    # A copy: another thread may import meanwhile.
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or name.partition(".")[0] in _VERSIONED:
            continue
        if not is_standard_file(path):
            yield name, os.path.abspath(path), _is_installed(path)
