"""Files that a user names and takes elsewhere (a bundle, a lock): written whole or not at all.

Unlike `store`, which keeps a cache of files that many processes write, nobody waits: whoever writes
last wins. A writer holds its temporary file locked, so the next one can tell what a killed one
left, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from torch_cudal1.core.errors import SupplyError

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that becomes `path` when the body ends well, and is gone when it does not. An OSError
    becomes a SupplyError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _sweep(path)
        with open(temporary, "xb") as file:
            with contextlib.suppress(OSError):  # no locks here: what a kill leaves then stays
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise SupplyError(
            path, "disk", f"{type(error).__name__}: {error}; nothing was written"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # gone after the rename
            temporary.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove the temporary files of `path` that no living writer holds."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
