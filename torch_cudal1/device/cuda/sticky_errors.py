"""Errors after which a process must end to use its GPU again."""

from __future__ import annotations

import torch

from torch_cudal1.core.errors import DriverError

__all__ = ["is_sticky"]

# Results of the driver after which, by its API reference (type CUresult), the process must end to
# use the device again.
_LOST = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *(
            "ECC_UNCORRECTABLE",
            "DEVICE_UNAVAILABLE",
            "CONTEXT_IS_DESTROYED",
            "ILLEGAL_ADDRESS",
            "LAUNCH_TIMEOUT",
            "LAUNCH_FAILED",
        ),
        *(
            "ASSERT",
            "HARDWARE_STACK_ERROR",
            "ILLEGAL_INSTRUCTION",
            "MISALIGNED_ADDRESS",
            "INVALID_ADDRESS_SPACE",
            "INVALID_PC",
        ),
    )
)


def is_sticky(error: BaseException) -> bool:
    """Whether the CUDA context is unusable after `error`. Running out of memory is no such error."""
    if isinstance(error, DriverError):
        return error.status in _LOST
    accelerator_error = getattr(torch, "AcceleratorError", ())
    return isinstance(error, accelerator_error) and not isinstance(
        error, torch.cuda.OutOfMemoryError
    )
