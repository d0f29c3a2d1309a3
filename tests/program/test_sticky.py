"""Which errors cost a process its GPU."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.errors import DriverError
from torch_cudal1.program.sticky import is_sticky


def of_pytorch(code: int | None) -> torch.AcceleratorError:
    """As PyTorch raises it: with the runtime's result, or without one."""
    error = torch.AcceleratorError("CUDA error")
    if code is not None:
        error.error_code = code
    return error


@pytest.mark.parametrize(
    ("code", "lost"), [(700, True), (719, True), (999, True), (None, True), (1, False), (9, False), (701, False), (900, False)]
)
def test_a_refused_launch_is_no_lost_gpu(code: int | None, lost: bool) -> None:
    """700: an illegal address; 719: a failed launch; 999 and none: unknown; 1, 9, 701: refused; 900: not while capturing."""
    assert is_sticky(of_pytorch(code)) == lost


def test_the_drivers_results_and_want_of_memory() -> None:
    assert is_sticky(DriverError("cuLaunchKernel", "CUDA_ERROR_ILLEGAL_ADDRESS", ""))
    assert not is_sticky(DriverError("cuLaunchKernel", "CUDA_ERROR_INVALID_VALUE", ""))
    assert not is_sticky(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    assert not is_sticky(RuntimeError("CUDA error"))
