"""Puts back the operators that eager calls, where tracing has left others in their place.

A batch norm in inference is traced as `_native_batch_norm_legit_no_training`, which runs PyTorch's
own two kernels. Eager calls `batch_norm`, which chooses between these and cuDNN's one kernel. The
rewrites and kernel families know the traced operator, so a Program names that one. Only a Program
that runs step by step takes eager's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from torch_cudal1.ir.program import Aten

__all__ = ["use_eager_operators"]

_Step = TypeVar("_Step")
_BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"
# Input, weight, bias, running mean, running variance, momentum, eps.
_ARGUMENTS = 7


def use_eager_operators(steps: Sequence[_Step], read: Iterable[int | None]) -> list[_Step | Aten]:
    """`steps` with eager's own operators. `read`: every value that a step uses or that is an
    output. No other result has to be made.
    """
    used_values = set(read)
    return [_batch_norm(step, used_values) if isinstance(step, Aten) else step for step in steps]


def _batch_norm(step: Aten, used_values: set[int | None]) -> Aten:
    """`batch_norm` in place of the traced operator, where no step reads its statistics."""
    if (
        step.target != _BATCH_NORM
        or len(step.args) != _ARGUMENTS
        or step.kwargs
        # The traced operator also yields saved statistics; `batch_norm` has only one result.
        or used_values.intersection(step.outs[1:])
    ):
        return step
    *tensors, momentum, eps = step.args
    return Aten(
        "aten.batch_norm.default",
        # False: inference. cudnn.enabled is the flag that eager's functional passes too.
        (*tensors, False, momentum, eps, torch.backends.cudnn.enabled),
        (),
        step.outs[:1],
    )
