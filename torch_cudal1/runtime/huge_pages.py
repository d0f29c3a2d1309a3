"""Puts large results of a CPU runner into huge pages (csrc/pages.h). Without the extension nothing
changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_cudal1.core import native
from torch_cudal1.ir.interpreter import Runner

__all__ = ["use_huge_pages"]


def use_huge_pages(runner: Runner) -> Runner:
    """`runner`, whose CPU allocations over 32 MiB get the advice MADV_HUGEPAGE. It has an effect
    where Linux gives transparent huge pages on advice.
    """
    extension = native.extension()
    if extension is None:
        return runner
    switch = extension.huge_pages

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        # A mapping of that size is made and given back with each result, so every call pays for its
        # pages anew: 16384 of 4 KiB for 64 MB, or 32 huge ones.
        before = switch(True)
        try:
            return runner(inputs)
        finally:
            # What the thread had before: the end of an inner runner must not end the outer one's
            # advice.
            switch(before)

    return run
