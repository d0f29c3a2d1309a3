"""Fusion groups grow convex and disjoint, and a product starts its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.regions import NETS, capture_region
from torch_cudal1.graph.fusion.partition import partition


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_fusion_groups_are_convex_and_disjoint(name, products):
    region = capture_region(*NETS[name])
    fusion_groups = partition(region, products=products).groups
    grouped_steps = [step for fusion_group in fusion_groups for step in fusion_group.steps]
    assert len(grouped_steps) == len(set(grouped_steps))
    for fusion_group in fusion_groups:
        tainted = set()  # values outside the fusion group that depend on it
        inside = set(fusion_group.steps)
        produced = {out for step in inside for out in region.program.steps[step].writes}
        for position, step in enumerate(region.program.steps):
            used = set(step.reads)
            if position in inside:
                assert not used & tainted, "a path leaves the fusion group and comes back"
            elif used & (produced | tainted):
                tainted |= set(step.writes)


def test_a_product_starts_its_own_fusion_group_and_takes_what_follows_it():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 32)

        def forward(self, x):
            return torch.tanh(self.inner(torch.sigmoid(x) * 2)).softmax(-1)

    region = capture_region(Layer(), torch.randn(2, 6, 16))
    operators = [
        [region.program.steps[s].target.split(".")[1] for s in i.steps]
        for i in partition(region, products=True).groups
    ]
    products = [names for names in operators if "addmm" in names]
    assert products == [["addmm", "view", "tanh"]]
    assert ["_softmax"] in operators
    assert not any(
        "addmm" in names
        for names in (
            [step.target for step in i.region.program.steps] for i in partition(region).groups
        )
    )
