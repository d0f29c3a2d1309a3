"""Masks are copied where PyTorch's fused attention would not read them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from torch_cudal1.ir.ops.attention_masks import lay_out_masks, with_masks_laid_out

BATCH, HEADS, ROWS, SIZE = 2, 3, 10, 8


def attend(query: Tensor, mask: Tensor) -> Tensor:
    first = F.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    return F.scaled_dot_product_attention(first, query, query, mask)


def make_graph(
    make_mask: Callable[[Any], Tensor], dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> fx.GraphModule:
    """`attend` as Dynamo would record it, with fake tensors of a GPU as examples."""
    module = fx.symbolic_trace(attend)
    with FakeTensorMode():
        query = torch.empty(BATCH, HEADS, ROWS, SIZE, dtype=dtype, device=device)
        mask = make_mask(device)
        results = [query] * 3
    for node, example in zip(module.graph.nodes, (query, mask, *results), strict=False):
        node.meta["example_value"] = example
    return module


def make_ones(device: Any = None) -> Tensor:
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device).expand(1, 1, ROWS, ROWS)


def make_table(device: Any = None) -> Tensor:
    """A bias as T5 has it: heads lie next to each other."""
    generator = None if device else torch.Generator().manual_seed(0)
    table = torch.randn(1, ROWS, ROWS, HEADS, device=device, generator=generator)
    return table.bfloat16().permute(0, 3, 1, 2).expand(BATCH, -1, -1, -1)


def list_masks(module: fx.GraphModule) -> list[fx.Node]:
    return [
        node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
        for node in module.graph.nodes
        if node.target is F.scaled_dot_product_attention
    ]


@pytest.mark.parametrize("make_mask", [make_ones, make_table])
def test_a_scattered_mask_is_copied_once_and_has_the_same_values(
    make_mask: Callable[..., Tensor],
) -> None:
    module = make_graph(make_mask)
    before = list_masks(module)
    laid_out_module = with_masks_laid_out(module)
    first, second = list_masks(laid_out_module)
    assert first is second
    assert first.meta["example_value"].stride(-1) == 1
    assert first.meta["example_value"].shape == make_mask().shape
    # the graph that was given is as it was
    assert list_masks(module) == before
    query = torch.randn(BATCH, HEADS, ROWS, SIZE).bfloat16()
    mask = make_mask()
    assert torch.equal(laid_out_module(query, mask), attend(query, mask))


def test_a_mask_that_batches_share_is_not_repeated_in_memory() -> None:
    module = make_graph(make_table)
    lay_out_masks(module.graph)
    mask = list_masks(module)[0].meta["example_value"]
    assert mask.stride() == (0, ROWS * ROWS, ROWS, 1)


@pytest.mark.parametrize(
    "module",
    [
        make_graph(lambda device: torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool, device=device)),
        # as padding masks are: rows repeat, a row is contiguous
        make_graph(lambda device: torch.ones(1, 1, 1, ROWS, device=device).expand(1, 1, ROWS, -1)),
        make_graph(make_ones, torch.float32),
        make_graph(make_ones, device="cpu"),
        # its gradient would be another kernel's
        make_graph(lambda device: make_table(device).detach().requires_grad_()),
    ],
    ids=["contiguous", "repeated rows", "fp32", "on a CPU", "wants a gradient"],
)
def test_other_masks_stay_as_they_are(module: fx.GraphModule) -> None:
    assert with_masks_laid_out(module) is module
    before = list_masks(module)
    lay_out_masks(module.graph)
    assert list_masks(module) == before


def test_attention_without_a_mask_is_left_alone() -> None:
    module = fx.symbolic_trace(lambda query: F.scaled_dot_product_attention(query, query, query))
    assert with_masks_laid_out(module) is module


def test_a_graph_of_unknown_sizes_is_left_alone() -> None:
    module = make_graph(make_ones)
    for node in module.graph.nodes:
        node.meta.pop("example_value", None)
    assert with_masks_laid_out(module) is module


def hide_nothing(query: Tensor) -> Tensor:
    """As transformers makes the mask of an encoder without padding."""
    rows = torch.arange(ROWS, device=query.device) + 0
    mask = (rows[None, None, :, None] >= 0).expand(1, -1, ROWS, ROWS)
    return F.scaled_dot_product_attention(query, query, query, attn_mask=mask, scale=0.5)


def hide_the_first_row(query: Tensor) -> Tensor:
    rows = torch.arange(ROWS) + 0
    mask = (rows[None, None, :, None] >= 1).expand(1, -1, ROWS, ROWS)
    return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)


def hide_by_an_input(query: Tensor) -> Tensor:
    mask = (query[:, :1, :, :1] < 100).expand(-1, -1, ROWS, ROWS)
    return F.scaled_dot_product_attention(query, query, query, attn_mask=mask)


def record(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """`function` as Dynamo records it, said to be of a GPU."""
    graphs: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=keep, dynamic=False)(
            torch.randn(BATCH, HEADS, ROWS, SIZE).bfloat16()
        )
    (module,) = graphs
    for node in module.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            query = node.args[0]
            with FakeTensorMode():
                query.meta["example_value"] = torch.empty(
                    query.meta["example_value"].shape, dtype=torch.bfloat16, device="cuda"
                )
    return module


def test_a_mask_is_looked_at_under_a_fake_mode_too() -> None:
    module = record(hide_nothing)
    with FakeTensorMode():
        assert list_masks(with_masks_laid_out(module)) == [None]


def test_a_mask_that_hides_nothing_is_taken_away() -> None:
    module = record(hide_nothing)
    laid_out_module = with_masks_laid_out(module)
    assert list_masks(laid_out_module) == [None]
    query = torch.randn(BATCH, HEADS, ROWS, SIZE).bfloat16()
    # another kernel of the CPU's
    torch.testing.assert_close(laid_out_module(query)[0], hide_nothing(query), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("function", [hide_the_first_row, hide_by_an_input])
def test_a_mask_that_may_hide_something_stays(function: Callable[[Tensor], Tensor]) -> None:
    laid_out_module = with_masks_laid_out(record(function))
    (mask,) = list_masks(laid_out_module)
    assert mask.meta["example_value"].stride(-1) == 1
    query = torch.randn(BATCH, HEADS, ROWS, SIZE).bfloat16()
    assert torch.equal(laid_out_module(query)[0].nan_to_num(), function(query).nan_to_num())
