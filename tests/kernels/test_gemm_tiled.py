"""A tiled product: its parts, and the text of its kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.kernels.registry import trace
from torch_cudal1.kernels.templates.gemm_tiled import lower_tiled, read_parts, split_k_as_batch
from torch_cudal1.kernels.templates.gemm_tiles import GemmSchedule

A, B = torch.empty(100, 64), torch.empty(64, 48)


def parts(function=lambda a, b: F.gelu(a @ b)):
    return read_parts(trace(trace_program(function, (A, B))))


def lower_with(method: str):
    traced = trace(trace_program(lambda a, b: F.gelu(a @ b), (A, B)))
    specs = dict(traced.leaves) | {o.value: o.spec for o in traced.outputs}
    return lower_tiled(read_parts(traced), GemmSchedule(method, 64, 32, 32).proposal(), specs)


def test_ragged_edges_are_masked_and_the_epilogue_follows() -> None:
    kernel = lower_with("bf16x6")
    assert 'input_precision="bf16x6"' in kernel.text
    assert "row_ok = (m < 100)" in kernel.text
    assert "libdevice.erf" in kernel.text
    assert kernel.grid == 2 * 2


def test_methods_of_other_kernels_or_types_are_refused() -> None:
    with pytest.raises(NotLowerableError, match="method half"):
        lower_with("half")
    with pytest.raises(ProgramError):
        lower_with("packed-f16x3")


def test_k_is_split_into_equal_pieces_only() -> None:
    assert split_k_as_batch(parts(), 4, 9)[0].product.batch == 4
    with pytest.raises(NotLowerableError, match="equal pieces"):
        split_k_as_batch(parts(), 3, 9)
