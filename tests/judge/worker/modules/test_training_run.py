"""Steps of training are those of a loop, and what an instance does in its first step only shows in its
state.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from torch_cudal1.judge.worker.modules.training_run import take_training_steps, vary_inputs


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))


def train(module: nn.Module, steps: int) -> object:
    module.train()
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return take_training_steps(module, lambda inputs: module(*inputs), [x], steps, seed=7)


def test_the_state_is_that_of_a_written_loop() -> None:
    module = make_module()
    other = copy.deepcopy(module).train()
    result = train(module, 3)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    torch.manual_seed(7)
    for step in range(3):
        expected = other(x * (1 + step / 8))
        optimizer.zero_grad()
        (expected.square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
    assert isinstance(result, torch.Tensor)
    assert not result.requires_grad
    torch.testing.assert_close(result, expected.detach())
    for (name, value), (_, right) in zip(
        module.state_dict().items(), other.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(value, right, msg=name)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_large_gradients_are_scaled_down() -> None:
    module = nn.Linear(4, 1, bias=False)
    before = module.weight.detach().clone()
    take_training_steps(module, lambda inputs: module(*inputs) * 1e4, [torch.ones(3, 4)], 1, 0)
    assert float((module.weight - before).norm()) == pytest.approx(0.1, rel=1e-3)


def test_integers_and_modules_without_parameters_are_called_all_the_same() -> None:
    seen: list[Sequence[torch.Tensor]] = []

    def call(inputs: Sequence[torch.Tensor]) -> object:
        seen.append(inputs)
        return {"a": inputs[0].float(), "b": None}

    index = torch.arange(3)
    result = take_training_steps(nn.Identity(), call, [index], 2, 0)
    assert [each[0] is index for each in seen] == [True, True]
    assert isinstance(result, dict)
    assert torch.equal(result["a"], index.float())


def test_each_step_has_values_of_its_own() -> None:
    x = torch.ones(2)
    assert [float(vary_inputs([x], step)[0][0]) for step in range(3)] == [1.0, 1.125, 1.25]
