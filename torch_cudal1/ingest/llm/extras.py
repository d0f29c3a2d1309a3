"""The libraries of the extra `train`, imported where they are used and named where they are
missing.

Importing `torch_cudal1.training` needs none of them. This file imports nothing by itself and checks
no versions: pip did.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from torch_cudal1.core.errors import Cudal1Error

__all__ = ["MissingExtraError", "require_extra", "silence_progress_bars"]


class MissingExtraError(Cudal1Error, ImportError):
    """A library of an optional extra is not installed; `library` is its name."""

    def __init__(self, library: str) -> None:
        self.library = library
        super().__init__(library)

    def __str__(self) -> str:
        return f"training needs the library {self.library!r}, which is not installed: pip install 'torch-cudal1[train]'"


def require_extra(library: str) -> ModuleType:
    """The imported library. Raises MissingExtraError if it, rather than something inside it, is not
    there.
    """
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        # A library that is installed but broken must not be reported as missing.
        if error.name != library.split(".")[0]:
            raise
        raise MissingExtraError(error.name) from error


def silence_progress_bars() -> None:
    """No progress bars of the libraries in this process: they say nothing that this package's do
    not, on the same line.
    """
    require_extra("transformers").utils.logging.disable_progress_bar()
