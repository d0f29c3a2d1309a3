"""The formats in which published kernels are read, and the one that a path is of.

A new format is a class with the members of `format.Format` in a file of its own, and one line of
`FORMATS`; a test compares the list in docs/from-laptop-to-fleet.md with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch_cudal1.ingest.formats.cuda_l1 import CudaL1Release
from torch_cudal1.ingest.formats.flashinfer_tasks import FlashInferFolder
from torch_cudal1.ingest.formats.format import Format
from torch_cudal1.ingest.formats.kernelbench import KernelBenchSources
from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask

__all__ = ["FORMATS", "find_format", "read_tasks"]

# The first that recognises a path reads it: a FlashInfer-Trace folder is a folder too, and a release
# file has no fixed ending, so it comes last.
FORMATS: tuple[Format, ...] = (
    FlashInferFolder(),
    KernelBenchSources(),
    CudaL1Release(),
)


def find_format(path: Path) -> Format:
    """The format of a file or folder."""
    # Never empty: between them the last two take every folder, every ".py" and every other file.
    return next(each for each in FORMATS if each.recognises(path))


def read_tasks(
    path: Path, references: Path | None = None
) -> Iterator[PublishedTask | UnreadableTask]:
    """The tasks of a file or folder. `references`: KernelBench-style file or folder, where
    candidates stand in files of their own. What is no task is an `UnreadableTask`, and the rest is
    read on.

    Raises OSError for a path that is not there.
    """
    yield from find_format(path).read_tasks(path, references)
