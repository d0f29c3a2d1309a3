"""A product whose halves meet is one fusion group of two products, and only such a product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph.regions import CPU, capture_region, list_operators, make_inputs
from torch_cudal1.graph.fusion.partition import partition, splice
from torch_cudal1.graph.fusion.siblings import merge_siblings
from torch_cudal1.runtime.executor import prepare

ROWS = torch.randn(2, 5, 16, dtype=torch.bfloat16)


class Packed(nn.Module):
    """A product of one weight, and what is done to its result."""

    def __init__(
        self, meet: Callable[[Tensor], Tensor | tuple[Tensor, ...]], *, bias: bool = False
    ) -> None:
        super().__init__()
        self.both = nn.Linear(16, 64, bias=bias)
        self.meet = meet

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.meet(self.both(x))


def open_gate(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def open_gate_the_other_way(y: Tensor) -> Tensor:
    up, gate = y.view(10, 64).split(32, -1)
    return (F.gelu(gate) * up).view(2, 5, 32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("meet", [open_gate, open_gate_the_other_way])
def test_both_halves_are_products_of_one_group(
    meet: Callable[[Tensor], Tensor], bias: bool
) -> None:
    region = capture_region(Packed(meet, bias=bias).bfloat16(), ROWS)
    groups = partition(region, products=True).groups
    (joined,) = merge_siblings(region, groups)
    assert list_operators(joined).count("addmm" if bias else "mm") == 2
    # The split is a view that nothing else reads.
    assert len(joined.steps) > sum(len(group.steps) for group in groups)
    whole = splice(region.program, {joined: joined.region.program})
    inputs = make_inputs(region)
    results, own = prepare(whole, CPU)(inputs), prepare(region.program, CPU)(inputs)
    for result, right in zip(results, own, strict=True):
        assert result is not None
        assert right is not None
        assert (result.shape, result.stride()) == (right.shape, right.stride())
        torch.testing.assert_close(result, right, rtol=2e-2, atol=2e-2)


def read_whole_too(y: Tensor) -> tuple[Tensor, Tensor]:
    return open_gate(y), y


def read_half_too(y: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up, up


def read_uneven_parts(y: Tensor) -> Tensor:
    first, rest = y.split([16, 48], -1)
    return F.silu(first).sum() * rest.exp()


def halve_rows(y: Tensor) -> Tensor:
    first, second = y.chunk(2, dim=0)
    return F.silu(first) * second


def halve_heads(y: Tensor) -> Tensor:
    first, second = y.view(2, 5, 4, 16).chunk(2, dim=-1)
    return F.silu(first) * second


@pytest.mark.parametrize(
    "meet", [read_whole_too, read_half_too, read_uneven_parts, halve_rows, halve_heads]
)
def test_other_products_stay_as_they_are(
    meet: Callable[[Tensor], Tensor | tuple[Tensor, ...]],
) -> None:
    region = capture_region(Packed(meet).bfloat16(), ROWS)
    groups = partition(region, products=True).groups
    assert merge_siblings(region, groups) == groups


def test_a_product_of_fp32_stays_whole() -> None:
    region = capture_region(Packed(open_gate), ROWS.float())
    groups = partition(region, products=True).groups
    assert merge_siblings(region, groups) == groups
