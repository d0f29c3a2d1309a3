"""A module's call is captured as one graph without running the module; what one graph cannot repeat
has no capture and a reason.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn

from tests.entries import Calls
from torch_cudal1.core.errors import GraphBreakError, NotLowerableError
from torch_cudal1.graph.dynamo import DynamoCapture, capture_call, leaves_grad_mode

pytestmark = pytest.mark.usefixtures("dynamo", "inference")

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def capture(make: Any, *args: Any, **kwargs: Any) -> DynamoCapture:
    return capture_call(make if isinstance(make, nn.Module) else Calls(make), args, kwargs)


def test_the_bytecode_around_the_graph_gives_the_modules_own_result() -> None:
    module = Calls(lambda m, x, scale: {"out": m.linear(x) * scale, "scale": scale})
    captured = capture(module, X, scale=2)
    call = captured.function(captured.graph)
    result, expected = call(module, (X,), {"scale": 2}), module(X, scale=2)
    assert result["scale"] == 2
    assert torch.equal(result["out"], expected["out"])


def test_inputs_are_told_apart_by_where_they_come_from() -> None:
    module = Calls(lambda m, x: m.linear(x))
    captured = capture(module, X)
    passed = [captured.from_arguments(number) for number in range(len(captured.inputs))]
    assert sorted(passed) == [False, False, True]
    assert captured.inputs[passed.index(True)] is X
    assert {id(tensor) for tensor in captured.inputs} == {
        id(tensor) for tensor in (X, module.linear.weight, module.linear.bias)
    }


def test_an_output_that_eager_returns_as_its_input_is_named() -> None:
    captured = capture(lambda m, x: (m.linear(x), x.add_(1)), X.clone())
    ((output, number),) = captured.outputs_that_are_inputs.items()
    assert output == 1
    assert captured.from_arguments(number)


def test_guards_hold_for_such_a_call_and_fail_for_another() -> None:
    module = Calls(lambda m, x: m.linear(x))
    check = capture(module, X).guards()
    assert check({"module": module, "args": (X * 2,), "kwargs": {}})
    assert not check({"module": module, "args": (X.double(),), "kwargs": {}})
    assert not check({"module": module, "args": (X[:2],), "kwargs": {}})


def branch(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x) if x.sum() > 0 else x


def assign(m: Calls, x: torch.Tensor) -> torch.Tensor:
    m.last = m.linear(x)
    return m.last


@pytest.mark.parametrize(
    ("make", "args", "error", "reason"),
    [
        (branch, (X,), GraphBreakError, "in one graph"),
        (assign, (X,), NotLowerableError, "assigns self.last, which a kernel would not repeat"),
        (lambda m, x: x, (3,), NotLowerableError, "calls no tensor operator"),
        (
            lambda m, x: (torch._C._set_grad_enabled(True), m.linear(x))[1],
            (X,),
            NotLowerableError,
            "leaves the grad mode changed",
        ),
    ],
    ids=["a branch", "an assignment", "no operator", "another grad mode"],
)
def test_what_one_graph_cannot_repeat_has_no_capture(
    make: Callable[..., Any], args: tuple[Any, ...], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        capture(make, *args)
    assert not torch.is_grad_enabled()


def test_nothing_of_the_modules_runs_or_changes() -> None:
    calls = []

    class Recording(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            return super().forward(x)

    with pytest.raises(NotLowerableError):
        capture(Recording(8, 8), X)
    assert calls == []


def test_a_released_capture_lets_go_of_the_weights() -> None:
    """`torch.utils.swap_tensors` refuses weights that have a weak reference."""
    module = Calls(lambda m, x: m.linear(x))
    captured = capture(module, X)
    before = weakref.getweakrefcount(module.linear.weight)
    captured.release()
    assert weakref.getweakrefcount(module.linear.weight) < before
    del captured
    gc.collect()
    torch.utils.swap_tensors(module.linear.weight, nn.Parameter(torch.zeros(8, 8)))
    assert not module.linear.weight.any()


def test_only_the_last_switch_of_a_graph_decides_its_grad_mode() -> None:
    graph = fx.Graph()
    graph.call_function(torch._C._set_grad_enabled, (True,))
    assert leaves_grad_mode(fx.GraphModule(nn.Module(), graph))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    assert not leaves_grad_mode(fx.GraphModule(nn.Module(), graph))
