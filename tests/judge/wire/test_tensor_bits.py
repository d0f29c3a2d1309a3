"""Tensors are compared by their bits, whatever their values and strides."""

from __future__ import annotations

import math

import pytest
import torch

from torch_cudal1.judge.wire.tensor_bits import all_same_bits, same_bits, same_storage, to_float64

NAN = math.nan


def test_bits_are_compared_nan_included() -> None:
    x = torch.tensor([NAN, -0.0, 1.0])
    assert same_bits(x, x.clone())
    assert not same_bits(x, torch.tensor([NAN, 0.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_bits_are_compared_whatever_the_strides(dtype: torch.dtype) -> None:
    filled = torch.ones(8, 8, dtype=dtype)
    assert same_bits(filled[:1, 0], torch.ones(1, dtype=dtype))  # one element, stride 8
    assert same_bits(filled[0, 0], torch.ones((), dtype=dtype))
    assert same_bits(filled[:0, 0], torch.empty(0, dtype=dtype))
    assert same_bits(filled[2:, ::3].t(), torch.ones(3, 6, dtype=dtype))
    assert not same_bits(filled[3:4, 5], torch.zeros(1, dtype=dtype))


def test_shape_dtype_and_absence_count() -> None:
    x = torch.ones(2, 3)
    assert not same_bits(x, x.t())
    assert not same_bits(x, x.view(torch.int32))
    assert same_bits(None, None)
    assert not same_bits(x, None)
    assert all_same_bits([x, None], [x.clone(), None])
    assert not all_same_bits([x, None], [x.clone(), x])


def test_storage_is_compared_with_what_a_stride_skips() -> None:
    base = torch.zeros(8)
    other = base.clone()
    first, second = base[1:7:2], other[1:7:2]
    assert same_storage(first, second)
    other[2] = 1.0  # between two elements
    assert same_bits(first, second)
    assert not same_storage(first, second)
    other[2], other[0] = 0.0, 1.0  # before the first
    assert same_storage(first, second)
    assert not same_storage(first, first.double())


def test_only_what_has_a_wider_form_is_widened() -> None:
    assert to_float64(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float64
    assert to_float64(torch.ones(2, dtype=torch.complex64)).dtype == torch.complex128
    assert to_float64(torch.ones(2, dtype=torch.int32)).dtype == torch.int32
    assert to_float64(3) == 3
