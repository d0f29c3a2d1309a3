"""Large results of a CPU runner in huge pages; csrc/pages.h says why and how. Without the extension
they are PyTorch's as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_cudal1.core import native
from torch_cudal1.ir.interpreter import Runner

__all__ = ["use_huge_pages"]


def use_huge_pages(runner: Runner) -> Runner:
    """`runner`; what it allocates on the CPU over 32 MiB is advised to lie in huge pages, where the
    kernel gives them on advice.
    """
    extension = native.extension()
    if extension is None:
        return runner
    switch = extension.huge_pages

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        before = switch(True)
        try:
            return runner(inputs)
        finally:
            switch(before)

    return run
