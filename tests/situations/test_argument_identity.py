"""What a forward may ask of its arguments beside shapes and values: which of them are the same object,
whether one is a Parameter, a leaf, a view, has a gradient or an attribute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.situations.kit import DOORS, Door, Scene, X, check, scenes_of
from tests.situations.test_outside_state import around

Y = torch.randn(4, 8, generator=torch.Generator().manual_seed(6))


def answer_calls(door: Door, module: nn.Module, *calls: tuple[Any, ...]) -> list[torch.Tensor]:
    """What is answered to each of the calls, three times over."""
    opened = door(module, *calls[0])
    return [opened(*args).detach().clone() for args in calls for _ in range(3)]


def two_arguments_that_become_one(door: Door) -> Any:
    module = around(lambda self, x, y: self.h(x) + (y if x is y else 2 * y))
    return answer_calls(door, module, (X, Y), (X, X), (Y, Y), (X, Y))


def one_argument_that_becomes_two(door: Door) -> Any:
    module = around(lambda self, x, y: self.h(x) + (y if x is y else 2 * y))
    return answer_calls(door, module, (X, X), (X, Y), (X, X))


def two_objects_of_the_same_memory(door: Door) -> Any:
    module = around(lambda self, x, y: self.h(x) + (y if x is y else 2 * y))
    other = X.detach()
    return answer_calls(door, module, (X, X), (X, other), (other, X), (other, other))


def tensors_of_a_list_that_become_one(door: Door) -> Any:
    module = around(
        lambda self, x, parts: self.h(x) + (parts[0] if parts[0] is parts[1] else 2 * parts[1])
    )
    return answer_calls(door, module, (X, [X, Y]), (X, [Y, Y]), (X, [X, Y]))


def empty_tensors_that_become_one(door: Door) -> Any:
    first, second = torch.empty(0), torch.empty(0)
    module = around(lambda self, x, y, z: self.h(x) * (2 if y is z else 5))
    return answer_calls(door, module, (X, first, second), (X, first, first), (X, first, second))


def lists_that_become_one(door: Door) -> Any:
    module = around(lambda self, x, y, z: self.h(x) * (2 if y is z else 5))
    first, second = [1], [1]
    return answer_calls(door, module, (X, first, second), (X, first, first), (X, first, second))


def dicts_that_become_one(door: Door) -> Any:
    module = around(lambda self, x, y, z: self.h(x) * (2 if y is z else 5))
    first, second = {"a": 1}, {"a": 1}
    return answer_calls(door, module, (X, first, first), (X, first, second), (X, first, first))


def an_argument_that_is_the_weight(door: Door) -> Any:
    module = around(lambda self, x, y: self.h(x) * (2 if y is self.weight else 5))
    other = nn.Parameter(module.weight.detach().clone())
    return answer_calls(door, module, (X, other), (X, module.weight), (X, other))


def the_weight_in_place_of_which_another_comes(door: Door) -> Any:
    module = around(lambda self, x, y: self.h(x) * (2 if y is self.weight else 5))
    other = nn.Parameter(module.weight.detach().clone())
    return answer_calls(door, module, (X, module.weight), (X, other), (X, module.weight))


def an_argument_that_is_the_buffer(door: Door) -> Any:
    module = around(lambda self, x, y: self.h(x) * (2 if y is self.scale else 5))
    other = module.scale.clone()
    return answer_calls(door, module, (X, other), (X, module.scale), (X, other))


def a_parameter_among_tensors(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * (2 if isinstance(x, nn.Parameter) else 5))
    fixed = nn.Parameter(X.clone(), requires_grad=False)
    return answer_calls(door, module, (X,), (fixed,), (X,))


def a_tensor_in_place_of_a_parameter(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * (2 if type(x) is nn.Parameter else 5))
    fixed = nn.Parameter(X.clone(), requires_grad=False)
    return answer_calls(door, module, (fixed,), (X,), (fixed,))


def an_argument_that_is_a_view(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * (2 if x._is_view() else 5))
    return answer_calls(door, module, (X,), (X.clone().view(4, 8),), (X,))


def an_argument_with_a_base(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * (2 if x._base is None else 5))
    return answer_calls(door, module, (X,), (X.clone().view(4, 8),), (X,))


def an_argument_that_is_no_leaf(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * (2 if x.is_leaf else 5))
    leaf = X.clone().requires_grad_()
    with torch.enable_grad():
        result = leaf * 1.0
    return answer_calls(door, module, (leaf,), (result,), (leaf,))


def an_argument_with_a_grad_fn(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * (2 if x.grad_fn is None else 5))
    leaf = X.clone().requires_grad_()
    with torch.enable_grad():
        result = leaf * 1.0
    return answer_calls(door, module, (leaf,), (result,), (leaf,))


def an_argument_that_gets_a_gradient(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * (2 if x.grad is None else 5))
    bare, full = X.clone().requires_grad_(), X.clone().requires_grad_()
    full.grad = torch.ones(4, 8)
    return answer_calls(door, module, (bare,), (full,), (bare,))


def a_gradient_that_is_read(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) + (0 if x.grad is None else x.grad))
    first, second = X.clone().requires_grad_(), X.clone().requires_grad_()
    first.grad, second.grad = torch.ones(4, 8), torch.full((4, 8), 3.0)
    return answer_calls(door, module, (first,), (second,), (first,))


def an_attribute_of_an_argument(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * getattr(x, "gain", 5))
    marked = X.clone()
    marked.gain = 2.0  # type: ignore[attr-defined]
    return answer_calls(door, module, (X,), (marked,), (X,))


def another_value_in_an_attribute_of_an_argument(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * x.gain)
    first, second = X.clone(), X.clone()
    first.gain, second.gain = 2.0, 5.0  # type: ignore[attr-defined]
    return answer_calls(door, module, (first,), (second,), (first,))


def an_attribute_that_an_argument_gets(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * (2 if hasattr(x, "mark") else 5))
    tensor = X.clone()
    opened = door(module, tensor)
    results = [opened(tensor).detach().clone() for _ in range(3)]
    tensor.mark = True  # type: ignore[attr-defined]
    return [*results, *(opened(tensor).detach().clone() for _ in range(3))]


def a_tensor_made_in_inference_mode(door: Door) -> Any:
    module = around(lambda self, x: self.h(x.clone()) * (2 if x.is_inference() else 5))
    with torch.inference_mode():
        frozen = X.clone()
    return answer_calls(door, module, (X,), (frozen,), (X,))


def autocast_of_another_device(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * (2 if torch.is_autocast_enabled("cuda") else 5))
    opened = door(module, X)
    results = [opened(X).detach().clone() for _ in range(3)]
    before = torch.is_autocast_enabled("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)
        results += [opened(X).detach().clone() for _ in range(3)]
    finally:
        torch.set_autocast_enabled("cuda", before)
    return [*results, opened(X).detach().clone()]


def whether_any_autocast_is_on(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * (2 if torch.is_autocast_enabled("cpu") else 5))
    opened = door(module, X)
    results = [opened(X).detach().clone() for _ in range(3)]
    with torch.autocast("cpu", enabled=True, dtype=torch.bfloat16):
        results.append(opened(X).detach().float() / 100 // 1000)
    return [*results, opened(X).detach().clone()]


SCENES: tuple[Scene, ...] = scenes_of(globals())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_answer_is_that_for_these_very_objects(scene: Scene, door: str, tmp_path: Path) -> None:
    check(scene, door, tmp_path)
