"""Fusion groups: convex, computing the same when spliced back, and every step left out has a reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.regions import NETS, capture_region, make_inputs
from torch_cudal1.graph.fusion.partition import partition, rebase_on_inputs, splice
from torch_cudal1.ir.check import check_program
from torch_cudal1.runtime.executor import prepare

CPU = torch.device("cpu")


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_splicing_every_fusion_group_back_changes_nothing(name, products):
    region = capture_region(*NETS[name])
    fusion_groups = partition(region, products=products).groups
    spliced = splice(
        region.program,
        {fusion_group: fusion_group.region.program for fusion_group in fusion_groups},
    )
    check_program(spliced)
    inputs = make_inputs(region)
    for new, plain in zip(
        prepare(spliced, CPU)(inputs), prepare(region.program, CPU)(inputs), strict=True
    ):
        assert torch.equal(new, plain)
    assert len(spliced.steps) == len(region.program.steps) - sum(
        len(fusion_group.steps) - 1 for fusion_group in fusion_groups
    )


def test_equal_fusion_groups_of_different_models_share_a_key():
    norm = [nn.LayerNorm(16), nn.GELU()]
    first = capture_region(nn.Sequential(nn.Linear(8, 16), *norm), torch.randn(4, 8))
    second = capture_region(
        nn.Sequential(nn.Linear(32, 16, bias=False), *norm, nn.Linear(16, 2)), torch.randn(4, 32)
    )
    keys = [
        {fusion_group.region.key for fusion_group in partition(region).groups}
        for region in (first, second)
    ]
    assert keys[0] & keys[1]


def test_what_is_left_out_has_a_reason():
    region = capture_region(*NETS["mlp"])
    reasons = partition(region).reasons_left_out
    assert any("addmm" in reason and "Inductor" in reason for reason in reasons)
    assert sum(reasons.values()) + sum(
        len(fusion_group.steps) for fusion_group in partition(region).groups
    ) == len(region.program.steps)


def test_inputs_can_be_put_in_another_order():
    region = capture_region(nn.Linear(8, 4), torch.randn(2, 8))
    spec = region.program.inputs
    moved = rebase_on_inputs(region.program, (2, 0, 1), (spec[1], spec[2], spec[0]))
    a, b, c = make_inputs(region)
    assert torch.equal(
        prepare(moved, CPU)([b, c, a])[0], prepare(region.program, CPU)([a, b, c])[0]
    )


class Sliced(nn.Module):
    """What follows the product reads it from its second column, which kernels could not."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x):
        return torch.sigmoid(torch.tanh((x @ x)[:, self.first :]) * 2)


@pytest.mark.parametrize(("first", "fusion_groups"), [(1, 0), (4, 1)])
def test_what_reads_an_unaligned_view_is_no_fusion_group_and_says_so(first, fusion_groups):
    partitioned = partition(capture_region(Sliced(first), torch.randn(8, 8)))
    assert len(partitioned.groups) == fusion_groups
    assert any(
        "begins at no multiple of 16 bytes" in reason for reason in partitioned.reasons_left_out
    ) == (fusion_groups == 0)
