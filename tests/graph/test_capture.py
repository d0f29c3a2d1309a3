"""Graphs are captured with where their inputs come from, what they write and what their outputs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.graph.modules import Returns
from tests.graph.regions import TupleOutput
from torch_cudal1.core.errors import GraphBreakError
from torch_cudal1.graph.capture import find_lifted_parameters, is_dynamic, trace


def fresh(x: torch.Tensor) -> Any:
    return (x.exp(),)


def an_input(x: torch.Tensor) -> Any:
    return (x.exp(), x.t())


def two_views_of_one(x: torch.Tensor) -> Any:
    y = x.exp()
    return (y[0], y[1])


def writing(x: torch.Tensor) -> Any:
    return (x.add_(1).exp(),)


@pytest.mark.parametrize(
    ("make", "pure"),
    [(fresh, True), (an_input, False), (two_views_of_one, False), (writing, False)],
)
def test_only_a_graph_without_writes_and_shared_outputs_is_pure(
    make: Callable[[torch.Tensor], Any], pure: bool
) -> None:
    with torch.no_grad():
        assert trace(Returns(make), [torch.randn(4, 4)]).is_pure is pure


def test_a_training_graph_is_not_pure() -> None:
    assert not trace(Returns(fresh), [torch.randn(4, 4, requires_grad=True)]).is_pure


def identity(x: torch.Tensor) -> Any:
    return (x * 1,)


def test_a_training_capture_has_a_forward_and_a_backward() -> None:
    traced = trace(TupleOutput(nn.Linear(4, 4)), [torch.randn(4, 4, requires_grad=True)])
    assert [graph.kind for graph in traced.graphs] == ["forward", "backward"]
    forward = traced.graphs[0]
    assert {forward.origins[position] for position in forward.static} == {
        "inner.weight",
        "inner.bias",
    }
    assert [origin for origin in forward.origins if isinstance(origin, int)] == [0]


def test_a_filled_capture_calls_what_it_was_filled_with() -> None:
    x = torch.randn(4, 4)
    with torch.no_grad():
        traced = trace(Returns(identity), [x])
        traced.fill("inference", lambda inputs: [inputs[0] + 7])
        (result,) = traced.call(x)
    assert torch.equal(result, x + 7)


@pytest.mark.parametrize(
    ("make", "written", "direct"),
    [(fresh, frozenset(), True), (writing, frozenset({0}), False), (an_input, frozenset(), False)],
)
def test_what_a_call_writes_and_whether_the_graph_alone_may_be_called(
    make: Callable[[torch.Tensor], Any], written: frozenset[int], direct: bool
) -> None:
    with torch.no_grad():
        traced = trace(Returns(make), [torch.randn(4, 4)])
    assert traced.written == written
    assert traced.direct is direct
    assert not traced.replaces_memory


def test_a_number_asked_of_a_tensor_is_a_graph_break() -> None:
    with pytest.raises(GraphBreakError, match="asks a tensor for its value"), torch.no_grad():
        trace(Returns(lambda x: (x * x.sum().item(),)), [torch.randn(4, 4)])


def test_tracing_leaves_grad_mode_and_module_as_they_were() -> None:
    module = nn.Linear(4, 4)
    weight = module.weight
    with torch.no_grad():
        trace(TupleOutput(module), [torch.randn(4, 4)])
        assert not torch.is_grad_enabled()
    assert module.weight is weight


def test_only_dynamos_mark_makes_a_placeholder_a_parameter() -> None:
    assert find_lifted_parameters(nn.Linear(2, 2)) == frozenset()
    graph = fx.Graph()
    graph.placeholder("x")
    lifted = graph.placeholder("weight")
    graph.output(())
    lifted.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    assert find_lifted_parameters(fx.GraphModule(nn.Module(), graph)) == {1}


def test_only_symbolic_sizes_and_numbers_are_dynamic() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbolic = mode.from_tensor(torch.randn(4, 4), static_shapes=False)
    assert not is_dynamic([torch.randn(4, 4), 3])
    assert is_dynamic([3, symbolic])
    assert is_dynamic([symbolic.shape[0]])
