"""Where compiled kernels lie in a cache, and how much they take.

    <cache>/built/<versions>/<key[:2]>/<key>.safetensors    the Program of a proposal
    <cache>/built/<versions>/<key[:2]>/<key>.json           why a proposal does not compile

`versions` names what compiles: this package, torch, Triton, and a digest of the templates. A search
takes kernels of its own versions only; kernels of other versions serve another installation that
shares the cache. This module does not know what is in the files. Any file may be deleted at any
moment: a search that does not find a kernel compiles it again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import triton_version
from torch_cudal1.store.cache.files import iter_files, size_of

__all__ = [
    "BuildCount",
    "build_folder",
    "build_path",
    "count_builds",
    "name_versions",
    "timings_folder",
]

_TEMPLATES = Path(__file__).parents[2] / "kernels"
_ENDINGS = (".safetensors", ".json")


@dataclass(frozen=True)
class BuildCount:
    """How many compilations are kept, and what they take."""

    count: int
    size_bytes: int


def build_folder(cache_dir: Path) -> Path:
    """The folder of all compiled kernels of a cache."""
    return cache_dir / "built"


def timings_folder(cache_dir: Path) -> Path:
    """The folder of what benchmarks have measured of them, which `search.cost_model.timings` fills."""
    return cache_dir / "timings"


def build_path(cache_dir: Path, key: str) -> Path:
    """Where the kernel of that key lies, as compiled by the versions installed here."""
    return build_folder(cache_dir) / name_versions() / key[:2] / f"{key}.safetensors"


def count_builds(cache_dir: Path) -> BuildCount:
    """What is kept now, of all versions; files that vanish meanwhile count as gone."""
    home = build_folder(cache_dir)
    sizes = [size_of(path) for ending in _ENDINGS for path in iter_files(home, ending)]
    return BuildCount(len(sizes), sum(sizes))


# Once a process: the digest reads every template.
@cache
def name_versions() -> str:
    """The name of the folder for what is compiled here now: readable, and another one after each
    change of a template.
    """
    # The templates' digest is part of the name, because `__version__` does not change between two
    # edits.
    return f"{__version__}-torch{torch.__version__}-triton{triton_version() or 'none'}-{_digest_templates()[:16]}"


def _digest_templates() -> str:
    """sha256 of the templates: a developer who edits one must not get kernels of the old text."""
    digest = hashlib.sha256()
    # Python and CUDA files (".py", ".cu"), sorted because a directory's order is the file system's.
    for path in sorted(_TEMPLATES.rglob("*.[pc][yu]")):
        digest.update(path.relative_to(_TEMPLATES).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
