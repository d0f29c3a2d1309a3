"""Odd cotangents have the values and the memory that `sum` and slices give them."""

from __future__ import annotations

import torch

from torch_cudal1.judge.checks.module_semantics.gradients import _expand, _stride


def test_an_expanded_cotangent_is_one_number_everywhere() -> None:
    cotangent = _expand(torch.randn(3, 4))
    assert cotangent.stride() == (0, 0)
    assert len(cotangent.unique()) == 1


def test_a_strided_cotangent_has_the_same_values_with_gaps() -> None:
    values = torch.randn(3, 4)
    cotangent = _stride(values)
    assert torch.equal(cotangent, values)
    assert cotangent.stride() == (8, 2)
    assert torch.equal(_stride(torch.tensor(2.0)), torch.tensor(2.0))
