"""Facts about outputs: strides count where they say something, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.judge.wire.properties import describe


def describe_strides(tensor: torch.Tensor) -> list[int]:
    (facts,) = describe([tensor], [])
    assert facts is not None
    return list(facts["strides"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.zeros(1, 4).as_strided((1, 4), (99, 1)), torch.zeros(1, 4)),
        (torch.zeros(5).as_strided((1,), (512,)), torch.zeros(1)),
        (torch.zeros(0, 4), torch.zeros(4, 0).t()),
    ],
)
def test_the_stride_of_a_dimension_without_a_step_is_no_difference(
    first: torch.Tensor, second: torch.Tensor
) -> None:
    assert first.stride() != second.stride()
    assert describe_strides(first) == describe_strides(second)


def test_a_transposed_result_is_a_difference() -> None:
    assert describe_strides(torch.zeros(3, 4)) != describe_strides(torch.zeros(4, 3).t())
