"""A captured call feeds its graph from later arguments, returns what the module would, and names
where it needs Dynamo's own bytecode.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.entries import Calls
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.module_call import ModuleCall, capture_module_call, list_call_tensors

pytestmark = pytest.mark.usefixtures("dynamo", "inference")

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def capture(make: Any, *args: Any, **kwargs: Any) -> tuple[Calls, ModuleCall]:
    module = make if isinstance(make, nn.Module) else Calls(make)
    return module, capture_module_call(module, args, kwargs)


def test_a_later_call_is_fed_from_its_own_arguments_and_the_modules_weights() -> None:
    module, captured = capture(lambda m, x, shift: {"out": m.linear(x) + shift}, X, shift=X + 1)
    assert captured.form == ""
    assert captured.conditions is None
    call = captured.wrap_compiled(captured.graph)
    later = X * 2
    assert torch.equal(call((later,), {"shift": X})["out"], module(later, shift=X)["out"])
    finish = captured.make_output_builder()
    assert finish is not None
    assert finish([X])["out"] is X


def test_a_result_that_is_the_graphs_output_needs_nothing_to_finish_it() -> None:
    module, captured = capture(lambda m, x: m.linear(x), X)
    assert captured.make_output_builder() is None
    assert torch.equal(captured.wrap_compiled(captured.graph)((X * 2,), {}), module(X * 2))


def test_the_guard_follows_the_module() -> None:
    module, captured = capture(lambda m, x: m.linear(x), X)
    assert captured.guard.holds()
    module.linear.weight = nn.Parameter(torch.zeros(8, 8))
    assert not captured.guard.holds()
    assert "linear.weight" in captured.guard.explain_difference()


class Cache:
    """An object of the user's among the arguments."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state


def test_a_tensor_inside_an_object_is_read_by_bytecode_under_dynamos_guards() -> None:
    module, captured = capture(lambda m, x, cache: m.linear(x) + cache.state, X, Cache(X + 1))
    assert "inside an argument that is no plain container" in captured.form
    assert (captured.sources, captured.outputs) == (None, None)
    assert captured.conditions is not None
    later = Cache(X * 3)
    assert torch.equal(
        captured.wrap_compiled(captured.graph)((X, later), {}), module.linear(X) + later.state
    )
    assert captured.conditions({"module": module, "args": (X, later), "kwargs": {}})


def test_arguments_that_overlap_the_modules_written_tensors_are_told() -> None:
    module, captured = capture(lambda m, x: m.linear(x) + m.count.add_(1), X)
    position = next(i for i, tensor in enumerate(captured.inputs) if tensor is module.count)
    check = captured.make_overlap_check(frozenset({position}))
    assert check is not None
    assert check((X,), {})
    assert not check((module.count.expand(3, 8),), {})
    assert captured.make_overlap_check(frozenset()) is None


@pytest.mark.parametrize(
    ("make", "args", "reason"),
    [
        (lambda m, x: m.linear(x), (X.to_sparse(),), "an input is sparse_coo"),
        (lambda m, x: x if x.sum() > 0 else -x, (X,), "in one graph"),
    ],
    ids=["a sparse input", "a branch"],
)
def test_a_call_that_cannot_be_captured_is_refused(
    make: Any, args: tuple[Any, ...], reason: str
) -> None:
    with pytest.raises(NotLowerableError, match=reason):
        capture(make, *args)


def test_tensors_are_numbered_in_the_order_of_the_arguments() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert list_call_tensors((a, b), {}) == (a, b)
    numbered = list_call_tensors((a, [b, 3]), {"k": {"c": c}})
    assert [tensor.numel() for tensor in numbered] == [1, 2, 3]
