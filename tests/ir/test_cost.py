"""What a Program costs, counted by hand."""

from __future__ import annotations

import pytest
import torch

from tests.fake_gpu import graph_on_a_gpu
from torch_cudal1.graph.lower import lower
from torch_cudal1.ir.cost import estimate_cost


@pytest.mark.parametrize("name", ["flash", "cudnn"])
@pytest.mark.parametrize("heads_of_keys", [8, 2, 1])
def test_attention_counts_two_products_for_every_head_of_queries(
    name: str, heads_of_keys: int
) -> None:
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
    further = (None, False) if name == "cudnn" else ()
    q, k = (2, 8, 70, 32), (2, heads_of_keys, 50, 32)
    graph = graph_on_a_gpu(
        lambda q, k, v: operator(q, k, v, *further)[0], q, k, k, dtype=torch.float16
    )
    cost = estimate_cost(lower(graph).region.program)
    assert cost.flops == 2 * (2 * 8 * 70 * 50 * 32) * 2
    assert cost.min_bytes == 2 * (2 * (2 * 8 * 70 * 32) + 2 * (2 * heads_of_keys * 50 * 32))
    assert cost.steps == 1
