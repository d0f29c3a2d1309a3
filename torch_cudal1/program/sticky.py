"""Errors after which a process must end to use its GPU again."""

from __future__ import annotations

import torch

from torch_cudal1.errors import DriverError

__all__ = ["is_sticky"]

# Results of the driver after which, by its API reference (type CUresult), the process must end to use the device again.
_LOST = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *("ECC_UNCORRECTABLE", "DEVICE_UNAVAILABLE", "CONTEXT_IS_DESTROYED", "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "LAUNCH_FAILED"),
        *("ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC"),
    )
)
# Results of the runtime (type cudaError_t) of which its reference says nothing of the kind, what was asked was refused: invalid
# value, memory, configuration, function; no code for the device; PTX; resources of a launch, size of one; not supported; capturing
_REFUSED = frozenset({1, 2, 9, 98, 209, 218, 701, 720, 801, *range(900, 909)})


def is_sticky(error: BaseException) -> bool:
    """Errors after which the CUDA context is unusable; running out of memory is not one of them.

    PyTorch's own carry the runtime's result as `error_code` (pytorch/pytorch#152023); one without it is believed to be such.
    """
    if isinstance(error, DriverError):
        return error.status in _LOST
    accelerator_error = getattr(torch, "AcceleratorError", ())
    if not isinstance(error, accelerator_error) or isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    return getattr(error, "error_code", None) not in _REFUSED
