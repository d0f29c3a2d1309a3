"""What a format of published kernels has to provide: its name, which paths are of it, and its
tasks.

A format is one file of this folder and one line of `registry`. It reads files and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask

__all__ = ["Format"]


class Format(Protocol):
    """A layout in which kernels are published."""

    @property
    def name(self) -> str:
        """For documentation, as its publishers call it: "CUDA-L1 release"."""

    @property
    def layout(self) -> str:
        """For documentation: which file or folder a user passes."""

    def recognises(self, path: Path) -> bool:
        """Whether `path` is laid out as this format. Asks only for names, reads no content."""

    def read_tasks(
        self, path: Path, references: Path | None
    ) -> Iterator[PublishedTask | UnreadableTask]:
        """Every task below `path`, in a stable order; what cannot be read, by its reason.

        `references`: KernelBench-style file or folder, for a format whose candidates stand in files
        of their own. Raises OSError for a path that is not there.
        """
