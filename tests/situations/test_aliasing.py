"""Tensors that are one another's memory, and forwards that write: what is written is where eager
writes it, and is read as it is.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.situations.kit import DOORS, Door, Scene, SceneLayer, X, check, scenes_of


def around(forward: Any, **buffers: torch.Tensor) -> nn.Module:
    module = type("Writes", (SceneLayer,), {"forward": forward})()
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor)
    return module


def three(door: Door, module: nn.Module, x: torch.Tensor = X) -> list[Any]:
    """Three calls, each with the state after it."""
    call = door(module, x)
    return [
        (call(x).clone(), {name: value.clone() for name, value in module.state_dict().items()})
        for _ in range(3)
    ]


def a_buffer_that_is_written(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.state.mul_(0.5).add_(1.0)
        return self.h(x) + self.state

    return three(door, around(forward, state=torch.zeros(8)))


def an_argument_that_is_the_written_buffer(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.state.mul_(0.5).add_(1.0)
        return self.h(x) + x

    module = around(forward, state=torch.zeros(4, 8))
    call = door(module, X)
    return [call(x).clone() for x in (X, X, module.state, module.state, X, module.state[:], X)]


def an_argument_that_is_a_part_of_the_buffer(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.state.add_(1.0)
        return self.h(x) * 2 + x

    module = around(forward, state=torch.zeros(6, 8))
    call = door(module, X)
    return [
        (call(x).clone(), module.state.clone()) for x in (X, module.state[1:5], module.state[:4], X)
    ]


def two_buffers_of_one_storage(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.first.add_(1.0)
        return self.h(x) * self.second

    storage = torch.zeros(8)
    return three(door, around(forward, first=storage, second=storage.view(8)))


def overlapping_buffers(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.first.add_(1.0)
        self.second.mul_(2.0)
        return self.h(x)[:, :5] + self.first

    storage = torch.ones(8)
    return three(door, around(forward, first=storage[:5], second=storage[3:]))


def an_input_that_is_written(door: Door) -> Any:
    call = door(around(lambda self, x: self.h(x.add_(1.0))), X.clone())
    answers = []
    for _ in range(3):
        x = X.clone()
        answers.append((call(x).clone(), x))
    return answers


def an_input_that_is_a_weight(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) + x.t())
    square = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    call = door(module, square)
    return [
        call(x).detach().clone() for x in (square, module.weight.detach(), module.weight, square)
    ]


def one_tensor_passed_twice(door: Door) -> Any:
    module = around(lambda self, x, y: self.h(x.add_(1.0)) + y)
    call, answers = door(module, X.clone(), X.clone()), []
    for same in (False, True, True, False):
        x = X.clone()
        answers.append(call(x, x if same else X.clone()).clone())
    return answers


def overlapping_arguments(door: Door) -> Any:
    module = around(lambda self, x, y: self.h(x.mul_(2.0)) + y)
    call, answers = door(module, X.clone(), X.clone()), []
    for shared in (False, True, True, False):
        memory = torch.cat([X, X])
        answers.append(call(memory[:4], memory[2:6] if shared else X.clone()).clone())
    return answers


def a_result_that_is_the_input(door: Door) -> Any:
    call = door(around(lambda self, x: (self.h(x), x)), X)
    return [(result[0].clone(), result[1] is X) for result in (call(X) for _ in range(3))]


def a_result_that_is_a_view_of_the_input(door: Door) -> Any:
    call, answers = door(around(lambda self, x: (self.h(x), x[1:])), X.clone()), []
    for _ in range(3):
        x = X.clone()
        _, view = call(x)
        view.zero_()
        answers.append(x)
    return answers


def a_result_that_is_a_weight(door: Door) -> Any:
    module = around(lambda self, x: (self.h(x), self.scale))
    call = door(module, X)
    answers = [call(X)[1] is module.scale for _ in range(3)]
    module.scale = torch.ones(8)
    return [*answers, *(call(X)[1] is module.scale for _ in range(3)), call(X)[0].clone()]


def results_that_a_caller_keeps(door: Door) -> Any:
    call = door(around(lambda self, x: self.h(x)), X)
    results = [call(X * factor) for factor in range(1, 5)]
    return [tensor.clone() for tensor in results]


def a_cache_that_is_written_at_a_position(door: Door) -> Any:
    class Cache:
        def __init__(self) -> None:
            self.keys = torch.zeros(6, 8)

        def update(self, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            self.keys.index_copy_(0, position, row)
            return self.keys

    def forward(self: Any, x: torch.Tensor, cache: Cache, position: torch.Tensor) -> torch.Tensor:
        return self.h(x) @ cache.update(self.h(x), position).t()

    module, answers = around(forward), []
    call = door(module, X[:1], Cache(), torch.tensor([0]))
    for cache in (Cache(), Cache()):
        for step in range(4):
            answers.append(
                (call(X[step : step + 1], cache, torch.tensor([step])).clone(), cache.keys.clone())
            )
    return answers


def an_argument_that_is_a_row_of_the_written_cache(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor, box: Any) -> torch.Tensor:
        box.keys.add_(1.0)
        return self.h(x) + x

    module, answers = around(forward), []
    call = door(module, X[:2], types.SimpleNamespace(keys=torch.zeros(6, 8)))
    for rows in (None, slice(0, 2), slice(3, 5), None):
        box = types.SimpleNamespace(keys=torch.zeros(6, 8))
        x = X[:2] if rows is None else box.keys[rows]
        answers.append((call(x, box).clone(), box.keys.clone()))
    return answers


def running_statistics(door: Door) -> Any:
    module = around(lambda self, x: self.norm(self.h(x)))
    module.norm = nn.BatchNorm1d(8)
    return three(door, module)


SCENES: tuple[Scene, ...] = scenes_of(globals())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_memory_is_as_eager_leaves_it(scene: Scene, door: str, tmp_path: Path) -> None:
    check(scene, door, tmp_path)


def test_there_are_enough_scenes() -> None:
    assert len(SCENES) >= 15
