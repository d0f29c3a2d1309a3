"""Gradients are asked of the tensors that want one, in the ways in which callers ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.wire.call_spec import RunMode
from torch_cudal1.judge.worker.modules.gradient_call import call_with_gradients

X, Y, C = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]), torch.tensor([1.0, 10.0])


def ask(
    mode: RunMode, leaves: list[list[bool]] | None = None
) -> tuple[torch.nn.Parameter, list[torch.Tensor | None]]:
    weight = torch.nn.Parameter(torch.tensor([7.0, 11.0]))

    def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        if leaves is not None:
            leaves.append([t.is_leaf for t in tensors])
        x, y = tensors
        return [x * y * weight, x + y]

    return weight, call_with_gradients(call, [weight], [X, Y], [C, C], mode)


def test_a_step_of_training_hands_in_activations_and_calls_again_before_the_backward() -> None:
    leaves: list[list[bool]] = []
    _, plain = ask(RunMode(gradients=True), leaves)
    weight, step = ask(RunMode(gradients=True, step=True), leaves)
    assert leaves == [[True, True], [False, False], [False, False]]
    for expected, actual in zip(plain, step, strict=True):
        assert expected is not None
        assert actual is not None
        assert torch.equal(expected, actual)
    assert weight.grad is None


def test_only_what_is_wanted_gets_a_gradient_and_only_used_outputs_count() -> None:
    weight, results = ask(RunMode(gradients=True, gradient_places=(2,), used=(1,)))
    assert not weight.requires_grad
    assert len(results) == 3
    assert results[2] is not None
    assert torch.equal(results[2], C)


class WritesIntoSaved(torch.autograd.Function):
    """x squared, whose backward puts its result where the forward saved x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, own_copy: bool) -> torch.Tensor:
        ctx.kept = x.clone() if own_copy else x
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.kept.data.mul_(2 * grad), None


def test_a_second_backward_over_one_graph_is_asked_for() -> None:
    def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return [WritesIntoSaved.apply(tensors[0], True)]

    _, once = call_with_gradients(call, [], [X], [C], RunMode(gradients=True))
    _, twice = call_with_gradients(call, [], [X], [C], RunMode(gradients=True, retained=True))
    assert once is not None
    assert twice is not None
    assert torch.equal(once, 2 * X * C)
    assert torch.equal(twice, 2 * X * C * 2 * C)


@pytest.mark.parametrize("doubled", ["copied", "in place"])
def test_the_first_result_is_doubled_before_the_backward(doubled: str) -> None:
    _, results = ask(RunMode(gradients=True, doubled=doubled))
    _, plain = ask(RunMode(gradients=True))
    product, total, of_weight, *_ = results
    assert product is not None
    assert plain[0] is not None
    assert torch.equal(product, 2 * plain[0])
    assert total is not None
    assert torch.equal(total, X + Y)
    assert of_weight is not None
    assert torch.equal(of_weight, 2 * X * Y * C)


def test_a_backward_that_writes_to_its_activation_is_an_error() -> None:
    def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return [WritesIntoSaved.apply(tensors[0], False)]

    with pytest.raises(SandboxError, match="activation"):
        call_with_gradients(call, [], [X], [C], RunMode(gradients=True, step=True))
