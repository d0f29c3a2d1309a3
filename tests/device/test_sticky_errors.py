"""After which errors a process must end to use its GPU again."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.core.errors import DriverError
from torch_cudal1.device.cuda.sticky_errors import is_sticky


@pytest.mark.parametrize(
    ("status", "sticky"),
    [
        ("CUDA_ERROR_ILLEGAL_ADDRESS", True),
        ("CUDA_ERROR_LAUNCH_FAILED", True),
        ("CUDA_ERROR_OUT_OF_MEMORY", False),
        ("CUDA_ERROR_INVALID_VALUE", False),
    ],
)
def test_a_driver_error_is_sticky_where_the_context_is_lost(status: str, sticky: bool) -> None:
    assert is_sticky(DriverError("cuLaunchKernelEx", status, "")) is sticky


def test_running_out_of_memory_and_other_errors_are_not_sticky() -> None:
    assert not is_sticky(torch.cuda.OutOfMemoryError("no memory"))
    assert not is_sticky(RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"))
