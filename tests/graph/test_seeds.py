"""Attention without dropout: no seed goes from the forward of a training step to its backward, and
the attention gets kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tests.fake_gpu import graph_on_a_gpu
from torch_cudal1.graph.fusion.partition import FusionGroup, partition, splice
from torch_cudal1.graph.lower import lower
from torch_cudal1.graph.seeds import remove_undefined_seeds
from torch_cudal1.ir.records import Candidate
from torch_cudal1.judge.checks.static.contract import contract
from torch_cudal1.kernels import build, propose

aten = torch.ops.aten
HEADS = (2, 4, 70, 32)


KINDS = ("efficient", "flash", "cudnn")


def attend(
    kind: str, dropout: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Any:
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    if kind == "flash":
        return forward(query, key, value, dropout, True)
    return forward(query, key, value, None, True, dropout, True)


def gradients(kind: str, dropout: float, grad: torch.Tensor, inputs: Any, outputs: Any) -> Any:
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")
    if kind == "efficient":
        return backward(grad, *inputs, None, *outputs, dropout, [True, True, True, False], True)
    out, total, _, _, rows, columns, seed, offset, _ = outputs
    if kind == "flash":
        return backward(
            grad, *inputs, out, total, None, None, rows, columns, dropout, True, seed, offset
        )
    return backward(
        grad, *inputs, out, total, seed, offset, None, None, None, rows, columns, dropout, True
    )


def joint(dropout: float, kind: str = "efficient") -> fx.GraphModule:
    """Two attentions after one another, forward and backward in one graph as AOTAutograd has them
    on a GPU.
    """

    def step(
        primals_1: torch.Tensor,
        primals_2: torch.Tensor,
        primals_3: torch.Tensor,
        tangents_1: torch.Tensor,
    ) -> Any:
        first = attend(kind, dropout, primals_1, primals_2, primals_3)
        second = attend(kind, dropout, first[0], primals_2, primals_3)
        above = gradients(kind, dropout, tangents_1, (first[0], primals_2, primals_3), second)
        below = gradients(kind, dropout, above[0], (primals_1, primals_2, primals_3), first)
        return second[0], below[0], above[1] + below[1], above[2] + below[2]

    dtype = torch.float32 if kind == "efficient" else torch.bfloat16
    return graph_on_a_gpu(step, HEADS, HEADS, HEADS, HEADS, dtype=dtype)


def cut(graph: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    forward, backward = min_cut_rematerialization_partition(
        graph, None, compiler="inductor", num_fwd_outputs=1
    )
    return forward, backward


def integers(graph: fx.GraphModule, *, results: bool) -> list[fx.Node]:
    """Inputs, or results, that hold whole numbers."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    nodes = output.args[0] if results else graph.graph.find_nodes(op="placeholder")
    return [
        node
        for node in nodes
        if isinstance(node, fx.Node) and not node.meta["val"].is_floating_point()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_no_seed_leaves_the_forward_or_enters_the_backward(kind: str) -> None:
    plain = cut(joint(0.0, kind))
    assert integers(plain[0], results=True), "nothing to take out"
    graph = joint(0.0, kind)
    remove_undefined_seeds(graph)
    forward, backward = cut(graph)
    assert not integers(forward, results=True)
    assert not integers(backward, results=False)
    assert len(backward.graph.find_nodes(op="call_function", target=aten.full.default)) == 1
    assert not forward.graph.find_nodes(op="call_function", target=aten.full.default)


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_of_a_dropout_stay(kind: str) -> None:
    graph = joint(0.1, kind)
    before = graph.code
    remove_undefined_seeds(graph)
    assert graph.code == before


def test_a_graph_without_attention_is_left_as_it_is() -> None:
    graph = graph_on_a_gpu(lambda x, y: x @ y, (4, 4), (4, 4))
    before = graph.code
    remove_undefined_seeds(graph)
    assert graph.code == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", [0, 1])
def test_both_sides_of_the_step_have_kernels_for_their_attention(side: int, kind: str) -> None:
    graph = joint(0.0, kind)
    remove_undefined_seeds(graph)
    fusion_groups: tuple[FusionGroup, ...] = partition(
        lower(cut(graph)[side]).region, products=True
    ).groups
    kernel_groups = [
        fusion_group
        for fusion_group in fusion_groups
        if "scaled_dot_product" in str(fusion_group.region.program.steps)
    ]
    assert len(kernel_groups) == 2
    assert all(propose(fusion_group.region.program, 90) for fusion_group in kernel_groups)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", [0, 1])
def test_with_its_kernels_in_place_a_side_is_what_the_judge_demands_of_a_candidate(
    side: int, kind: str
) -> None:
    graph = joint(0.0, kind)
    remove_undefined_seeds(graph)
    region = lower(cut(graph)[side]).region
    fusion_groups = [
        fusion_group
        for fusion_group in partition(region, products=True).groups
        if "scaled_dot" in str(fusion_group.region.program.steps)
    ]
    kernels = {
        fusion_group: build(
            fusion_group.region.program, propose(fusion_group.region.program, 90)[0], 90
        )
        for fusion_group in fusion_groups
    }
    candidate = Candidate(splice(region.program, kernels), "eager", "builtin", ("attention",))
    checks = contract(region, candidate)
    assert [check.name for check in checks] == ["contract", "cubin_scan"]
    assert all(check.passed for check in checks), checks
