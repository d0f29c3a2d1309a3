"""Keeps Inductor's precompiled C++ headers in Inductor's cache folder.

By default they lie in the folder for temporary files, which is another one for each child, so each
child compiled them again (7 s on two cores, torch 2.13). In the cache folder a child finds those of
earlier children and of the user's processes.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["keep_headers"]


def keep_headers() -> None:
    """Redirect the folder. Call it before Inductor compiles for a CPU; it imports Inductor."""
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    # A private name. In a version of torch without it, compiling takes longer, and no more.
    if hasattr(codecache, "_HEADER_DIR"):
        folder = Path(cache_dir()) / "precompiled_headers"
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(folder), str(folder / "locks")
