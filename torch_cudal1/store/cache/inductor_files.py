"""A folder of Inductor's cache as a JSON value and back, so that a decision record may carry it:
signed, copied, revoked like any other.

Such files are code: Python sources, pickles and machine code that Inductor loads without a check.
The caller decides whether a value may be unpacked (by a signature and a setting). This module
ensures that nothing is written outside the folder, that every file is the one that was packed, and
that no existing file is changed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.cache.files import iter_files, read_file, write_file

__all__ = ["LIMIT_BYTES", "pack_folder", "unpack_folder"]

# As base64 below what a decision record may have.
LIMIT_BYTES = 44 << 20
_FILES_LIMIT = 10_000
# No "..", no leading "/", no empty segment, and at most ten segments: the name is joined to the
# folder as it is.
_PATH = re.compile(r"(?!.*\.\.)[A-Za-z0-9_.+=-]{1,200}(/[A-Za-z0-9_.+=-]{1,200}){0,9}")
# Locks and half-written files of processes that are at work in the folder now.
_LEFT_OUT = (".lock", ".tmp")


def pack_folder(folder: Path) -> dict[str, list[str]] | Refusal:
    """Every file of `folder` by its path below it: sha256 and base64. A Refusal for too much, or a
    name that is not plain.
    """
    files: dict[str, list[str]] = {}
    size = 0
    for path in iter_files(folder, ""):
        # A link would pack a file from outside the folder, and sign it.
        if path.suffix in _LEFT_OUT or path.is_symlink():
            continue
        name = path.relative_to(folder).as_posix()
        data = read_file(path, LIMIT_BYTES)
        if isinstance(data, Refusal):
            return Refusal(f"{path}: {data.reason}")
        size += len(data)
        if size > LIMIT_BYTES or len(files) >= _FILES_LIMIT or not _PATH.fullmatch(name):
            came = f"{name!r}, after {len(files)} files with {size} bytes"
            return Refusal(
                f"{came}; expected plain names and at most {_FILES_LIMIT} files with "
                f"{LIMIT_BYTES} bytes"
            )
        files[name] = [hashlib.sha256(data).hexdigest(), base64.b64encode(data).decode()]
    return files


def unpack_folder(files: Any, folder: Path) -> int | Refusal:
    """Write what `folder` lacks of `files`; how many that were. A Refusal names the rule that is
    broken; then nothing was written.
    """
    if not isinstance(files, Mapping) or len(files) > _FILES_LIMIT:
        return Refusal(f"a {type(files).__name__}; expected at most {_FILES_LIMIT} files by path")
    # All files are checked before the first is written, so that a refusal leaves nothing behind.
    checked: list[tuple[Path, bytes]] = []
    size = 0
    for path, data in _check_files(files):
        if isinstance(data, Refusal):
            return data
        size += len(data)
        if size > LIMIT_BYTES:
            return Refusal(f"{path}: more than {LIMIT_BYTES} bytes in all")
        checked.append((folder / path, data))
    written = 0
    for target, data in checked:
        # `is_symlink` too, because `exists` is false for a dangling link, and a write must not
        # follow it.
        if target.exists() or target.is_symlink():
            # Inductor's own file of that name is of the same source.
            continue
        stored = write_file(target, data)
        if isinstance(stored, Refusal):
            return Refusal(stored.reason)
        # `write_file` leaves its lock file, which is not one of the packed files.
        target.with_suffix(".lock").unlink(missing_ok=True)
        written += 1
    return written


def _check_files(files: Mapping[Any, Any]) -> Iterator[tuple[str, bytes | Refusal]]:
    for name, record in files.items():
        if not (isinstance(name, str) and _PATH.fullmatch(name)) or any(
            part in (".", "..") for part in name.split("/")
        ):
            yield str(name), Refusal(f"{name!r} is no path inside the folder")
            return
        try:
            digest, text = record
            # `validate`, because the default skips foreign characters: one file would have many
            # spellings.
            data = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            yield (
                name,
                Refusal(f"{name}: {type(error).__name__}: {error}; expected a sha256 and base64"),
            )
            return
        actual = hashlib.sha256(data).hexdigest()
        yield (
            name,
            data
            if actual == digest
            else Refusal(f"{name} has sha256 {actual}, its record says {digest!r}"),
        )
