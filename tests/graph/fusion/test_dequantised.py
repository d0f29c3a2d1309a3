"""Weights stored in few bits are made into numbers inside of their product's kernel, where that is
cheaper than writing them out.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.regions import capture_region, list_operators
from torch_cudal1.graph.fusion.partition import partition


class FourBits(nn.Module):
    """A linear layer whose weights are two to a byte, with a zero and a scale for each group of 32."""

    def __init__(self, rows: int = 48, columns: int = 64) -> None:
        super().__init__()
        self.register_buffer(
            "packed", torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        )
        self.register_buffer("zeros", torch.full((rows, columns // 32), 8.0))
        self.register_buffer("scales", torch.rand(rows, columns // 32))
        self.bias = nn.Parameter(torch.randn(rows))

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        rows, half = self.packed.shape
        bits = torch.stack((self.packed & 15, self.packed >> 4), -1).view(rows, 2 * half // 32, 32)
        return ((bits.to(dtype) - self.zeros[..., None]) * self.scales[..., None]).view(
            rows, 2 * half
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(nn.functional.linear(x, self.weight(x.dtype), self.bias))


class Twice(FourBits):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight(x.dtype)
        return nn.functional.linear(x, weight) + weight.sum()


MAKING = [
    "bitwise_and",
    "__rshift__",
    "stack",
    "view",
    "_to_copy",
    "unsqueeze",
    "sub",
    "unsqueeze",
    "mul",
    "view",
    "t",
]


@pytest.mark.parametrize("rows", [1, 16, 256])
def test_a_product_takes_in_what_makes_numbers_of_its_weights_bits(rows):
    region = capture_region(FourBits(), torch.randn(rows, 64))
    (group,) = partition(region, products=True).groups
    assert list_operators(group) == [*MAKING, "addmm", "gelu"]
    assert all(
        "addmm" not in list_operators(fusion_group) for fusion_group in partition(region).groups
    )


@pytest.mark.parametrize(
    ("module", "rows"),
    [(FourBits(), 257), (Twice(), 1)],
    ids=["many rows", "weights of another use"],
)
def test_weights_that_are_better_made_once_stay_outside_of_the_product(module, rows):
    groups = [
        list_operators(fusion_group)
        for fusion_group in partition(
            capture_region(module, torch.randn(rows, 64)), products=True
        ).groups
    ]
    assert all("stack" not in names or not {"mm", "addmm"} & set(names) for names in groups)
