"""Keeps Inductor's precompiled C++ headers in the folder of its other results.

Inductor keeps them below the folder for temporary files, which each child of the judge has to
itself, so each compiled them anew (7 s on two cores, torch 2.13). In the other folder a child finds
those of the children before it, and of the user's processes.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["keep_headers"]


def keep_headers() -> None:
    """Redirect the folder. Call it before Inductor compiles for a CPU; it imports Inductor."""
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    # a private name: in a version of torch that calls it otherwise, compiling takes longer
    if hasattr(codecache, "_HEADER_DIR"):
        folder = Path(cache_dir()) / "precompiled_headers"
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(folder), str(folder / "locks")
