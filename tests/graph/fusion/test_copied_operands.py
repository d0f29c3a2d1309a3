"""Batched products read operands that were copied into rows before them, where the copies cost a good
part of the product.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.graph.regions import CHUNK_INPUTS, Chunk, capture_region, list_operators
from torch_cudal1.graph.fusion.partition import partition


def test_a_batched_product_reads_heads_inside_rows_and_writes_them_there():
    """Instead of copies before and after it; but for what is element-wise, which it reads."""
    groups = [
        list_operators(i)
        for i in partition(capture_region(Chunk(), *CHUNK_INPUTS), products=True).groups
        if "bmm" in list_operators(i)
    ]
    assert groups == [
        [
            "clone",
            "_unsafe_view",
            "bmm",
            "view",
            "permute",
            "view",
            "mul",
            "add",
        ],  # states come as they are
        ["clone", "_unsafe_view", "clone", "_unsafe_view", "bmm", "view"],
    ]


def test_copies_that_cost_little_beside_their_product_stay_outside():
    class Large(nn.Module):
        def forward(self, x, y):
            return torch.einsum("blhn,blhp->bhpn", x, y)

    groups = partition(
        capture_region(Large(), *[torch.rand(1, 2048, 2, 512) for _ in range(2)]), products=True
    ).groups
    assert [list_operators(fusion_group)[0] for fusion_group in groups] == ["bmm"]


def test_a_product_whose_rows_are_cut_by_a_copy_keeps_its_fusion_group_without_it():
    class Cut(nn.Module):
        def forward(self, x, y):
            rows = x.permute(0, 2, 1, 3).clone(memory_format=torch.contiguous_format)
            return torch.bmm(rows.view(2, 12, 10), y)

    groups = partition(
        capture_region(Cut(), torch.rand(2, 3, 4, 10), torch.rand(2, 10, 6)), products=True
    ).groups
    assert ["bmm"] in [list_operators(fusion_group) for fusion_group in groups]
