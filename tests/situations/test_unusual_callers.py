"""Modules that are called otherwise than by their name, copied, shared, or changed while others
call them.
"""

from __future__ import annotations

import copy
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.situations.kit import DOORS, Door, Scene, SceneLayer, X, check, scenes_of


class WeightedTwice(SceneLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.h(x) @ self.weight


def triple_weight(module: nn.Module) -> nn.Parameter:
    return nn.Parameter(module.weight.detach() * 3)


def a_functional_call(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    answers = [call(X).clone()]
    answers += [
        torch.func.functional_call(module, {"weight": module.weight * gain}, (X,)).clone()
        for gain in (2.0, 3.0, 2.0)
    ]
    return [*answers, call(X).clone()]


def vmap_over_weights(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    weights = torch.stack([module.weight.detach() * gain for gain in (1.0, 2.0)])
    mapped = torch.func.vmap(
        lambda weight: torch.func.functional_call(module, {"weight": weight}, (X,))
    )(weights)
    return [mapped.clone(), call(X).clone()]


def vmap_over_inputs(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    return [torch.func.vmap(module)(torch.stack([X, X * 2])).clone(), call(X).clone()]


def a_gradient_of_a_functional_call(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    grad = torch.func.grad(
        lambda weight: torch.func.functional_call(module, {"weight": weight}, (X,)).sum()
    )
    return [grad(module.weight.detach()).clone(), call(X).clone()]


def a_replica_of_data_parallel(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    replica = module._replicate_for_data_parallel()
    replica.weight = triple_weight(module)
    return [call(X).clone(), replica(X).clone(), replica(X).clone(), call(X).clone()]


def a_twin_with_its_dict(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    twin = WeightedTwice.__new__(WeightedTwice)
    twin.__dict__.update(module.__dict__)
    twin._parameters = dict(module._parameters)
    twin.weight = triple_weight(module)
    return [call(X).clone(), twin(X).clone(), call(X).clone()]


def a_shallow_copy(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    shallow = copy.copy(module)
    shallow._parameters = dict(module._parameters)
    shallow.weight = triple_weight(module)
    return [call(X).clone(), shallow(X).clone(), call(X).clone()]


def a_deep_copy(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.mul_(3)
    return [call(X).clone(), twin(X).clone(), type(twin) is WeightedTwice, call(X).clone()]


def a_module_that_was_pickled(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    twin = WeightedTwice()
    twin.load_state_dict(torch.load(file))
    return [call(X).clone(), twin(X).clone()]


def a_call_of_its_own(door: Door) -> Any:
    class Counts(WeightedTwice):
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            return super().__call__(*args, **kwargs) * 2

    module = Counts()
    door(module, X)
    Counts.calls = 0
    return [*(module(X).clone() for _ in range(3)), Counts.calls]


def a_module_inside_another(door: Door) -> Any:
    inner = WeightedTwice()
    call = door(inner, X)
    outer = nn.Sequential(nn.ReLU(), inner)
    answers = [outer(X).clone(), call(X).clone()]
    outer[1] = nn.Identity()
    return [*answers, outer(X).clone(), call(X).clone()]


def many_threads(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    results: dict[int, list[torch.Tensor]] = {}

    def work(number: int) -> None:
        with torch.no_grad():
            results[number] = [call(X * number).clone() for _ in range(5)]

    call(X)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(1, 5)]


def a_forked_process(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    expected = call(X).clone()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # no test runner, no buffers of its parent
        try:
            os.write(write, b"1" if torch.equal(call(X), expected) else b"0")
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    return [os.read(read, 1), status, expected]


def a_bound_method_that_is_kept(door: Door) -> Any:
    module = WeightedTwice()
    call = door(module, X)
    forward = module.forward
    answers = [call(X).clone(), forward(X).clone()]
    module.forward = lambda x: x * 2
    return [*answers, *(call(X).clone() for _ in range(3)), forward(X).clone()]


def weights_that_are_parametrised_later(door: Door) -> Any:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    module[0].weight.data.fill_(0.1)
    module[0].bias.data.zero_()
    call = door(module, X)
    answers = [call(X).clone()]
    nn.utils.parametrizations.weight_norm(module[0])
    return [*answers, *(call(X).clone() for _ in range(3))]


SCENES: tuple[Scene, ...] = scenes_of(globals())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_everybody_gets_the_answer_of_the_module_that_was_called(
    scene: Scene, door: str, tmp_path: Path
) -> None:
    check(scene, door, tmp_path)


def test_there_are_enough_scenes() -> None:
    assert len(SCENES) >= 15
