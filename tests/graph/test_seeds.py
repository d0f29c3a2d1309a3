"""Attention without dropout: no seed goes from the forward of a training step to its backward, and the attention gets kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tests.fake_gpu import graph_on_a_gpu
from torch_cudal1.graph.lower import lower
from torch_cudal1.graph.partition import Island, partition, splice
from torch_cudal1.graph.seeds import without_undefined_seeds
from torch_cudal1.judge.contract import contract
from torch_cudal1.kernels import build, propose
from torch_cudal1.records import Candidate

aten = torch.ops.aten
HEADS = (2, 4, 70, 32)


def joint(dropout: float) -> fx.GraphModule:
    """Two attentions after one another, forward and backward in one graph as AOTAutograd has them on a GPU."""

    def step(primals_1: torch.Tensor, primals_2: torch.Tensor, primals_3: torch.Tensor, tangents_1: torch.Tensor) -> Any:
        def forward(query: torch.Tensor) -> Any:
            return aten._scaled_dot_product_efficient_attention(query, primals_2, primals_3, None, True, dropout, True)

        def backward(grad: torch.Tensor, query: torch.Tensor, made: Any) -> Any:
            wanted = [True, True, True, False]
            return aten._scaled_dot_product_efficient_attention_backward(
                grad, query, primals_2, primals_3, None, *made, dropout, wanted, True
            )

        first = forward(primals_1)
        second = forward(first[0])
        above = backward(tangents_1, first[0], second)
        below = backward(above[0], primals_1, first)
        return second[0], below[0], above[1] + below[1], above[2] + below[2]

    return graph_on_a_gpu(step, HEADS, HEADS, HEADS, HEADS)


def cut(graph: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    forward, backward = min_cut_rematerialization_partition(graph, None, compiler="inductor", num_fwd_outputs=1)
    return forward, backward


def integers(graph: fx.GraphModule, *, results: bool) -> list[fx.Node]:
    """Inputs, or results, that hold whole numbers."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    nodes = output.args[0] if results else graph.graph.find_nodes(op="placeholder")
    return [node for node in nodes if isinstance(node, fx.Node) and node.meta["val"].dtype is torch.int64]


def test_no_seed_leaves_the_forward_or_enters_the_backward() -> None:
    plain = cut(joint(0.0))
    assert integers(plain[0], results=True), "nothing to take out"
    graph = joint(0.0)
    without_undefined_seeds(graph)
    forward, backward = cut(graph)
    assert not integers(forward, results=True)
    assert not integers(backward, results=False)
    assert len(backward.graph.find_nodes(op="call_function", target=aten.full.default)) == 1
    assert not forward.graph.find_nodes(op="call_function", target=aten.full.default)


def test_seeds_of_a_dropout_stay() -> None:
    graph = joint(0.1)
    before = graph.code
    without_undefined_seeds(graph)
    assert graph.code == before


def test_a_graph_without_attention_is_left_as_it_is() -> None:
    graph = graph_on_a_gpu(lambda x, y: x @ y, (4, 4), (4, 4))
    before = graph.code
    without_undefined_seeds(graph)
    assert graph.code == before


@pytest.mark.parametrize("side", [0, 1])
def test_both_sides_of_the_step_have_kernels_for_their_attention(side: int) -> None:
    graph = joint(0.0)
    without_undefined_seeds(graph)
    islands: tuple[Island, ...] = partition(lower(cut(graph)[side]).region, products=True).islands
    found = [island for island in islands if "scaled_dot_product" in str(island.region.program.steps)]
    assert len(found) == 2
    assert all(propose(island.region.program, 90) for island in found)


@pytest.mark.parametrize("side", [0, 1])
def test_with_its_kernels_in_place_a_side_is_what_the_judge_demands_of_a_candidate(side: int) -> None:
    graph = joint(0.0)
    without_undefined_seeds(graph)
    region = lower(cut(graph)[side]).region
    islands = [island for island in partition(region, products=True).islands if "scaled_dot" in str(island.region.program.steps)]
    kernels = {island: build(island.region.program, propose(island.region.program, 90)[0], 90) for island in islands}
    whole = Candidate(splice(region.program, kernels), "eager", "builtin", ("attention",))
    checks = contract(region, whole)
    assert [check.name for check in checks] == ["contract", "cubin_scan"]
    assert all(check.passed for check in checks), checks
