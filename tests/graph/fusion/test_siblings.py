"""Fusion groups of products that share their left operand are sibling_groups, and only those."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph.regions import CPU, capture_region, list_operators, make_inputs
from torch_cudal1.graph.fusion.partition import partition, splice
from torch_cudal1.graph.fusion.siblings import merge_siblings
from torch_cudal1.runtime.executor import prepare


class Attention(nn.Module):
    """Fewer heads for keys and values, as language models have them, each projection of its own
    view of the rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, 5, -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


class Gated(nn.Module):
    """A gate times what it opens: one result of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class Decoder(nn.Module):
    """Many products of one operand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 8) for _ in range(6)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.relu(layer(x)) for layer in self.layers)


ROWS = torch.randn(2, 5, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("module", "products"),
    [(Attention(), [3]), (Gated(), [2]), (Decoder(), [4, 2])],
    ids=["attention", "gated", "many"],
)
def test_products_of_one_operand_are_one_group(module: nn.Module, products: list[int]) -> None:
    region = capture_region(module.bfloat16(), ROWS)
    groups = partition(region, products=True).groups
    sibling_groups = merge_siblings(region, groups)
    counts = [
        sum(name in ("mm", "addmm") for name in list_operators(group))
        for group in sibling_groups
        if {"mm", "addmm"} & set(list_operators(group))
    ]
    assert counts == products
    program = splice(region.program, {group: group.region.program for group in sibling_groups})
    inputs = make_inputs(region)
    expected = prepare(region.program, CPU)(inputs)
    for actual, plain in zip(prepare(program, CPU)(inputs), expected, strict=True):
        assert torch.equal(actual, plain)


def test_a_sibling_groups_group_reads_its_left_operand_once() -> None:
    region = capture_region(Attention().bfloat16(), ROWS)
    (group,) = (
        group
        for group in merge_siblings(region, partition(region, products=True).groups)
        if list_operators(group).count("addmm") == 3
    )
    shapes = [spec.shape for spec in group.region.program.inputs]
    assert shapes.count((2, 5, 16)) == 1
    assert (10, 16) not in shapes


def test_groups_of_other_dtypes_stay_as_they_are() -> None:
    region = capture_region(Attention(), ROWS.float())
    groups = partition(region, products=True).groups
    assert merge_siblings(region, groups) == groups
