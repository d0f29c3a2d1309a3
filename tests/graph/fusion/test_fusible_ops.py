"""Layout around scans and sums of row results are in the fusion groups of the scans and of the rows."""

from __future__ import annotations

import torch
from torch import nn

from tests.graph.regions import capture_region, list_operators
from torch_cudal1.graph.fusion.partition import partition


class Scans(nn.Module):
    """Exclusive sums, a masked sum from the end, and a slice that belongs to neither."""

    def forward(self, x, mask):
        before = torch.cat(
            (torch.zeros_like(x.select(1, 0).unsqueeze(1)), torch.cumsum(x.narrow(1, 0, 9), 1)), 1
        )
        after = (x * mask).flip(1).cumsum(1).flip(1)
        return before, after, x[:, 2:4].tanh()


class Losses(nn.Module):
    """A triplet's two distances in one mean, the cross entropy, and a mean of what is no result of
    rows.
    """

    def forward(self, a, p, n, target):
        triplet = nn.functional.triplet_margin_loss(a, p, n)
        return triplet, nn.functional.cross_entropy(a, target), (a.softmax(1) * p).mean()


def test_layout_around_a_scan_is_in_its_fusion_group_and_nothing_else_is():
    region = capture_region(Scans(), torch.randn(3, 10), torch.rand(3, 10))
    operators = [list_operators(fusion_group) for fusion_group in partition(region).groups]
    assert sorted(names for names in operators if "cumsum" in names) == [
        ["mul", "flip", "cumsum", "flip"],
        ["select", "unsqueeze", "zeros_like", "slice", "cumsum", "cat"],
    ]
    assert all("tanh" not in names for names in operators if "cumsum" in names)


def test_sums_of_what_rows_yield_are_in_the_rows_fusion_group():
    inputs = (*(torch.randn(6, 10) for _ in range(3)), torch.randint(0, 10, (6,)))
    operators = [
        list_operators(fusion_group)
        for fusion_group in partition(capture_region(Losses(), *inputs)).groups
    ]
    assert sum(names.count("norm") == 2 and names[-1] == "mean" for names in operators) == 1
    assert ["_log_softmax", "nll_loss_forward"] in operators
    assert any(
        "_softmax" in names and "mean" not in names for names in operators
    )  # it would be a sum over whole rows
