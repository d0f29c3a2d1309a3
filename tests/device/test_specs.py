"""The table of GPUs: the figures of NVIDIA's tables, and what is derived from them."""

from __future__ import annotations

import pytest

from torch_cudal1.device.specs import GPU_SPECS, H200, PRECISION_RATIO, max_shared_bytes
from torch_cudal1.ir.check import MAX_BLOCK_SHARED_BYTES

KIB = 1024
# CUDA C++ Programming Guide, technical specifications: shared memory per SM less the KiB that the
# driver reserves for a block.
BLOCK_SHARED_KIB = {
    75: 64,
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    110: 227,
    120: 99,
}


@pytest.mark.parametrize("sm", BLOCK_SHARED_KIB)
def test_shared_memory_of_a_block_is_what_the_programming_guide_says(sm: int) -> None:
    assert GPU_SPECS[sm].block_shared_bytes == BLOCK_SHARED_KIB[sm] * KIB


def test_a_program_may_ask_for_what_the_largest_gpu_has() -> None:
    assert max(spec.block_shared_bytes for spec in GPU_SPECS.values()) == MAX_BLOCK_SHARED_BYTES


@pytest.mark.parametrize(
    ("sm", "shared_bytes"), [(80, 166_912), (86, 101_376), (90, 232_448), (121, 101_376)]
)
def test_a_kernel_counts_on_the_least_where_the_gpu_is_unknown(sm: int, shared_bytes: int) -> None:
    assert max_shared_bytes(sm) == shared_bytes


def test_peaks_of_an_h100_are_those_of_its_data_sheet() -> None:
    """SXM5: 132 SMs at 1.83 GHz give 989 TFLOP/s dense in half precision."""
    flops_per_clock = GPU_SPECS[90].half_flops_per_clock
    assert flops_per_clock is not None
    assert flops_per_clock * H200.sm_count * 1.83e9 == pytest.approx(989e12, rel=0.01)
    assert [PRECISION_RATIO[size] for size in (1, 2, 4, 8)] == [2.0, 1.0, 0.5, 0.125]
