"""What follows a product or joins halves of rows is fused, and layout that a fusion group does not
read stays outside of it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.regions import CPU, NORM, capture_region, list_operators, make_inputs
from torch_cudal1.graph.fusion.partition import partition, splice
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.runtime.executor import prepare


@pytest.mark.parametrize(
    ("layers", "x", "names"),
    [
        (
            [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()],
            torch.randn(2, 3, 9, 9),
            ["convolution", NORM, "relu"],
        ),
        (
            [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU()],
            torch.randn(4, 8),
            ["addmm", NORM, "gelu"],
        ),
    ],
    ids=["convolution", "linear"],
)
def test_a_product_takes_the_batch_norm_of_inference_that_follows_it(layers, x, names):
    region = capture_region(nn.Sequential(*layers), x)
    assert [
        list_operators(fusion_group) for fusion_group in partition(region, products=True).groups
    ] == [names]
    assert all(
        NORM not in list_operators(fusion_group) for fusion_group in partition(region).groups
    )  # Inductor does that as well


def test_layout_after_a_product_that_nothing_of_its_fusion_group_reads_stays_outside():
    class Heads(nn.Module):
        def forward(self, x, y):
            return torch.bmm(x, y).view(2, 3, 4, 6).permute(0, 2, 1, 3), torch.bmm(x.tanh(), y)

    groups = partition(
        capture_region(Heads(), torch.rand(6, 4, 5), torch.rand(6, 5, 6)), products=True
    ).groups
    assert ["bmm", "view"] in [list_operators(fusion_group) for fusion_group in groups]
    assert all("permute" not in list_operators(fusion_group) for fusion_group in groups)


class Rotary(nn.Module):
    """Queries and keys turned by their positions. `kept`: the turned halves are a result too."""

    def __init__(self, dim=-1, returns_halves=False):
        super().__init__()
        self.dim, self.kept = dim, returns_halves

    def forward(self, q, k, cos, sin):
        def half(x):
            first, second = x.chunk(2, self.dim)
            return torch.cat((-second, first), self.dim)

        q, k = q.transpose(1, 2), k.transpose(1, 2)
        turned = half(k)
        embedded = q * cos + half(q) * sin, k * cos + turned * sin
        return (*embedded, -k[..., 8:], turned) if self.kept else embedded


ROTATED = torch.rand(2, 9, 4, 16), torch.rand(2, 9, 2, 16), torch.rand(9, 16), torch.rand(9, 16)


def test_a_rotary_embedding_is_one_fusion_group_a_tensor():
    region = capture_region(Rotary(), *ROTATED)
    fusion_groups = partition(region).groups
    assert [
        sum(step.target == "aten.cat.default" for step in fusion_group.region.program.steps)
        for fusion_group in fusion_groups
    ] == [1, 1]
    assert all(
        len(fusion_group.outputs) == 1 and len(fusion_group.steps) == 5
        for fusion_group in fusion_groups
    )
    inputs = make_inputs(region)
    spliced = splice(
        region.program,
        {fusion_group: fusion_group.region.program for fusion_group in fusion_groups},
    )
    for new, old in zip(
        prepare(spliced, CPU)(inputs), prepare(region.program, CPU)(inputs), strict=True
    ):
        assert torch.equal(new, old)


def test_halves_that_others_read_or_that_are_no_part_of_a_row_stay_with_inductor():
    across = capture_region(Rotary(dim=2), *ROTATED[:2], torch.rand(9, 16), torch.rand(9, 16))
    assert not [
        s
        for i in partition(across).groups
        for s in i.region.program.steps
        if s.target == "aten.cat.default"
    ]
    shared = capture_region(Rotary(returns_halves=True), *ROTATED)
    joined = [
        s
        for i in partition(shared).groups
        for s in i.region.program.steps
        if s.target == "aten.cat.default"
    ]
    assert (
        len(joined) >= 1
    )  # the queries' at least; whatever the keys' is, results of two sizes are never one fusion group's
    for fusion_group in partition(shared).groups:
        assert (
            len({s.shape for s in (value_specs(shared.program)[v] for v in fusion_group.outputs)})
            == 1
        )


class RMSNormed(nn.Module):
    """Two linear layers of a residual stream with an RMS norm between, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream = x + self.first(x)
        wide = stream.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return stream + self.second(normed.to(x.dtype))


class RotatedProjection(nn.Module):
    """A projection turned by its positions: both halves of a row are read where one is written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        low, high = y.chunk(2, -1)
        return y * cos + torch.cat((-high, low), -1) * sin


class SoftmaxOfScaled(nn.Module):
    """What a product's kernel scales is written once either way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * 0.125).softmax(-1)


HALF_ROWS = torch.randn(5, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("module", "inputs", "operators"),
    [
        # In fp32 the number and its square are twice what the residual stream is.
        (
            RMSNormed(),
            (HALF_ROWS,),
            [
                ["mm", "add"],
                ["_to_copy", "pow", "mean", "add", "rsqrt", "mul", "_to_copy"],
                ["mm", "add"],
            ],
        ),
        (RotatedProjection(), (HALF_ROWS,) * 3, [["mm"], ["mul", "neg", "cat", "mul", "add"]]),
        (SoftmaxOfScaled(), (HALF_ROWS,), [["mm", "mul"], ["_softmax"]]),
    ],
)
def test_a_product_leaves_to_its_readers_what_would_make_it_write_more(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], operators: list[list[str]]
) -> None:
    region = capture_region(module.bfloat16(), *inputs)
    groups = partition(region, products=True).groups
    assert [list_operators(group) for group in groups] == operators
    assert all(len(group.outputs) == 1 for group in groups)
    program = splice(region.program, {group: group.region.program for group in groups})
    values = make_inputs(region)
    expected = prepare(region.program, CPU)(values)
    for actual, plain in zip(prepare(program, CPU)(values), expected, strict=True):
        assert torch.equal(actual, plain)
