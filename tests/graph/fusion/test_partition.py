"""Fusion groups: convex, computing the same when spliced back, and every step left out has a reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.regions import CHUNK, Chunk, random_inputs, region_of
from torch_cudal1.graph.fusion.partition import partition, splice, with_inputs
from torch_cudal1.ir.check import check_program
from torch_cudal1.runtime.executor import prepare

CPU = torch.device("cpu")


class Diamond(nn.Module):
    """A pointwise step on both sides of a matrix product: one group would not be convex."""

    def forward(self, x):
        y = torch.tanh(x) * 2
        return y @ y + torch.sigmoid(y)


NETS = {
    "chunk": (Chunk(), *CHUNK),
    "mlp": (
        nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Softmax(-1)
        ),
        torch.randn(4, 8),
    ),
    "diamond": (Diamond(), torch.randn(8, 8)),
    "encoder": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 6, 16)),
    "conv": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        torch.randn(2, 3, 9, 9),
    ),
}


@pytest.fixture(autouse=True)
def plain_attention():
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_splicing_every_fusion_group_back_changes_nothing(name, products):
    region = region_of(*NETS[name])
    fusion_groups = partition(region, products=products).groups
    spliced = splice(
        region.program,
        {fusion_group: fusion_group.region.program for fusion_group in fusion_groups},
    )
    check_program(spliced)
    inputs = random_inputs(region)
    for ours, plain in zip(
        prepare(spliced, CPU)(inputs), prepare(region.program, CPU)(inputs), strict=True
    ):
        assert torch.equal(ours, plain)
    assert len(spliced.steps) == len(region.program.steps) - sum(
        len(fusion_group.steps) - 1 for fusion_group in fusion_groups
    )


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_fusion_groups_are_convex_and_disjoint(name, products):
    region = region_of(*NETS[name])
    fusion_groups = partition(region, products=products).groups
    taken = [step for fusion_group in fusion_groups for step in fusion_group.steps]
    assert len(taken) == len(set(taken))
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

    region = region_of(Layer(), torch.randn(2, 6, 16))
    found = [
        [region.program.steps[s].target.split(".")[1] for s in i.steps]
        for i in partition(region, products=True).groups
    ]
    products = [names for names in found if "addmm" in names]
    assert products == [["addmm", "view", "tanh"]]
    assert ["_softmax"] in found
    assert not any(
        "addmm" in names
        for names in (
            [step.target for step in i.region.program.steps] for i in partition(region).groups
        )
    )


def test_equal_fusion_groups_of_different_models_share_a_key():
    norm = [nn.LayerNorm(16), nn.GELU()]
    one = region_of(nn.Sequential(nn.Linear(8, 16), *norm), torch.randn(4, 8))
    two = region_of(
        nn.Sequential(nn.Linear(32, 16, bias=False), *norm, nn.Linear(16, 2)), torch.randn(4, 32)
    )
    keys = [
        {fusion_group.region.key for fusion_group in partition(region).groups}
        for region in (one, two)
    ]
    assert keys[0] & keys[1]


def test_what_is_left_out_has_a_reason():
    region = region_of(*NETS["mlp"])
    left = partition(region).reasons_left_out
    assert any("addmm" in reason and "Inductor" in reason for reason in left)
    assert sum(left.values()) + sum(
        len(fusion_group.steps) for fusion_group in partition(region).groups
    ) == len(region.program.steps)


def test_inputs_can_be_put_in_another_order():
    region = region_of(nn.Linear(8, 4), torch.randn(2, 8))
    spec = region.program.inputs
    moved = with_inputs(region.program, (2, 0, 1), (spec[1], spec[2], spec[0]))
    a, b, c = random_inputs(region)
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
    found = partition(region_of(Sliced(first), torch.randn(8, 8)))
    assert len(found.groups) == fusion_groups
    assert any(
        "begins at no multiple of 16 bytes" in reason for reason in found.reasons_left_out
    ) == (fusion_groups == 0)
