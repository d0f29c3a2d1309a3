"""Forward-mode derivatives and vmap of a call, the same for every candidate of one seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_cudal1.judge.worker.modules.transforms import call_transformed


def call(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    x, index = inputs
    return x.sin()[index]


X, INDEX = torch.linspace(-1, 1, 5), torch.tensor([3, 0])


def test_forward_mode_yields_the_derivative_along_one_direction() -> None:
    value, derivative = call_as_pair("jvp")
    assert torch.equal(value, call([X, INDEX]))
    direction = torch.randn(5, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(derivative, (X.cos() * direction)[INDEX])
    assert torch.equal(call_as_pair("jvp")[1], derivative)


def test_vmap_yields_two_calls() -> None:
    both = call_as_pair("vmap")
    torch.testing.assert_close(both[0], call([X, INDEX]))
    torch.testing.assert_close(both[1], call([0.75 * X, INDEX]))


def call_as_pair(transform: str) -> Any:
    return call_transformed(transform, call, [X, INDEX], seed=3)
