"""Copies into fresh memory go from a traced graph; copies that are work stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_cudal1.ingest.published.tidy import drop_copies

aten = torch.ops.aten


def fill(result: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`result`, copied into memory that nothing has written, as functionalised code does it."""
    out = result(x)
    return aten.copy(aten.empty_like(out), out)


def tidy(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[fx.GraphModule, list[str]]:
    """The tidied graph of a function of a 4 x 6 tensor, and the operators that its outputs need."""
    module = make_fx(function, tracing_mode="fake")(torch.randn(4, 6))
    drop_copies(module)
    module.graph.eliminate_dead_code()
    module.recompile()
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    return module, names


def test_a_result_copied_into_fresh_memory_is_the_result() -> None:
    module, operators = tidy(lambda x: fill(torch.exp, x))
    assert operators == ["aten.exp.default"]
    x = torch.randn(4, 6)
    assert torch.equal(module(x), x.exp())


def test_one_of_several_results_is_memory_of_its_own() -> None:
    _, operators = tidy(lambda x: fill(lambda x: aten.max(x, 1)[0], x))
    assert operators == ["aten.max.dim", "<built-in function getitem>"]


@pytest.mark.parametrize(
    "result",
    [lambda x: x, lambda x: x.view(6, 4), lambda x: x.t()],
    ids=["input", "view", "turned"],
)
def test_an_output_is_never_the_memory_of_an_input(
    result: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    module, operators = tidy(lambda x: fill(result, x))
    assert operators[-1] in ("aten.clone.default", "aten.copy.default")
    x = torch.randn(4, 6)
    output = module(x)
    assert torch.equal(output, result(x))
    assert output.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: aten.copy(torch.empty(4, 6, dtype=torch.float64), x.exp()),
        lambda x: aten.copy(torch.empty(2, 4, 6), x.exp()),
        lambda x: aten.copy(torch.empty(6, 4).t(), x.exp()),
    ],
    ids=["cast", "broadcast", "other strides"],
)
def test_a_copy_that_changes_the_tensor_is_work(
    copy: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    module, operators = tidy(copy)
    assert "aten.copy.default" in operators
    x = torch.randn(4, 6)
    output, expected = module(x), copy(x)
    assert torch.equal(output, expected)
    assert (output.dtype, output.stride()) == (expected.dtype, expected.stride())


def test_meta_data_of_a_new_node_is_that_of_the_copy() -> None:
    module = make_fx(lambda x: fill(lambda x: x, x), tracing_mode="fake")(torch.randn(4, 6))
    drop_copies(module)
    (clone,) = (node for node in module.graph.nodes if "clone" in str(node.target))
    assert clone.meta["val"].shape == (4, 6)
