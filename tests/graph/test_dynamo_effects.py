"""Effects of a captured call are told in the user's words; an assignment of the value that is there
already is none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn

from tests.entries import Calls
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.dynamo import capture_call
from torch_cudal1.graph.dynamo_effects import returns_its_input

pytestmark = pytest.mark.usefixtures("dynamo", "inference")

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
TABLE: dict[str, int] = {}


def assign_number(m: Calls, x: torch.Tensor) -> torch.Tensor:
    m.linear.calls = 5
    return m.linear(x)


def assign_buffer(m: Calls, x: torch.Tensor) -> torch.Tensor:
    m.count = m.count + 1
    return m.linear(x)


def fill_a_table(m: Calls, x: torch.Tensor) -> torch.Tensor:
    TABLE["calls"] = 1
    return m.linear(x)


def draw(m: Calls, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x) * random.random()


def write_to_an_argument(m: Calls, x: dict[str, torch.Tensor]) -> torch.Tensor:
    x["out"] = m.linear(x["in"])
    return x["out"]


EFFECTS: dict[Callable[..., Any], str] = {
    assign_number: r"assigns self\.linear\.calls,",
    assign_buffer: r"assigns (self\.count|a buffer of self)",
    fill_a_table: r"writes to .*TABLE",
    draw: "random",
    write_to_an_argument: r"writes to args\[0\]",
}


@pytest.mark.parametrize("make", EFFECTS, ids=lambda make: make.__name__)
def test_an_effect_is_told_as_the_user_would_write_it(make: Callable[..., Any]) -> None:
    args = ({"in": X},) if make is write_to_an_argument else (X,)
    with pytest.raises(NotLowerableError, match=EFFECTS[make]):
        capture_call(Calls(make), args, {})
    assert not TABLE


def test_an_assignment_of_the_same_value_is_no_effect_while_it_is_there() -> None:
    module = Calls(assign_number)
    module.linear.calls = 5
    captured = capture_call(module, (X,), {})
    assert [(item.owner, item.name, item.value) for item in captured.unchanged] == [
        (module.linear, "calls", 5)
    ]


def test_a_number_of_another_type_is_another_value() -> None:
    module = Calls(assign_number)
    module.linear.calls = 5.0
    with pytest.raises(NotLowerableError, match="assigns"):
        capture_call(module, (X,), {})


def call_node(method: str, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of a method on a float32 tensor, with the result's example value."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(2, 3)
    node = graph.call_method(method, (x, *args), kwargs)
    node.meta["example_value"] = getattr(torch.zeros(2, 3), method)(*args, **kwargs)
    return node


@pytest.mark.parametrize(
    ("node", "same"),
    [
        (call_node("add_", 1), True),
        (call_node("clamp_", 0, 1), True),
        (call_node("add", 1), False),
        (call_node("unsqueeze_", 0), False),
        (call_node("to", torch.float32), True),
        (call_node("to", torch.float64), False),
        (call_node("to", torch.float32, copy=True), False),
        (call_node("to", torch.float32, False, True), False),
    ],
    ids=["add_", "clamp_", "add", "unsqueeze_", "to", "to float64", "a copy", "positional copy"],
)
def test_a_method_in_place_and_a_conversion_to_the_same_return_the_tensor_itself(
    node: fx.Node, same: bool
) -> None:
    assert returns_its_input(node) is same


def test_a_counter_that_is_added_to_in_place_is_no_effect() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.count

    captured = capture_call(Counting(), (X,), {})
    assert captured.graph is not None
