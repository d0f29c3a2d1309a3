"""Second derivatives of a compiled step are eager's; a step that cannot run again says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.api.training_pairs import (
    Net,
    accelerate_pair,
    assert_same_gradients,
    make_input,
    shorten_measurements,
)


@pytest.fixture(autouse=True)
def quick_measurement(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_measurements(monkeypatch)


def test_gradients_with_a_graph_of_a_forward_that_writes_what_it_reads(runs, tmp_path):
    """A second run could not begin where the first one did: there is no second derivative, and the
    first is eager's.
    """

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))
            self.register_buffer("gain", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.gain.mul_(2)
            return torch.sin(x @ self.weight * self.gain)

    accelerated, plain = accelerate_pair(Doubling(), torch.ones(1, 4), tmp_path)
    for _ in range(3):
        gradients = [
            torch.autograd.grad(kind(torch.ones(1, 4)).sum(), kind.weight, create_graph=True)[0]
            for kind in (accelerated, plain)
        ]
        torch.testing.assert_close(*gradients)
    assert runs.backward == 3
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradients[0].sum(), accelerated.weight)


def test_second_derivatives_through_a_batch_norm_that_learns(tmp_path):
    accelerated, plain = accelerate_pair(
        nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Tanh()), make_input(), tmp_path
    )
    x = make_input()
    for kind in (accelerated, plain):
        (gradient,) = torch.autograd.grad(kind(x).square().sum(), kind[0].weight, create_graph=True)
        gradient.square().sum().backward()
    torch.testing.assert_close(
        accelerated[0].weight.grad, plain[0].weight.grad, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(dict(accelerated.named_buffers()), dict(plain.named_buffers()))


def test_a_gradient_penalty_trains_as_in_eager(runs, tmp_path):
    accelerated, plain = accelerate_pair(Net(), make_input(grad=True), tmp_path)
    x = make_input(grad=True)
    for module in (accelerated, plain):
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        (slope.square().sum() + module(x).sum()).backward()
    assert_same_gradients(accelerated, plain)
    assert runs.forward == 2


def test_a_hessian_vector_product_is_that_of_eager(tmp_path):
    accelerated, plain = accelerate_pair(Net(), make_input(), tmp_path)
    x, gradients = make_input(), []
    for module in (accelerated, plain):
        parameters = list(module.parameters())
        grads = torch.autograd.grad(module(x).square().sum(), parameters, create_graph=True)
        gradients.append(
            torch.autograd.grad(sum(g.sum() for g in grads), parameters, allow_unused=True)
        )
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_third_derivative_too(tmp_path):
    module = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 1, requires_grad=True)
    for derivatives, call in zip(([], []), accelerate_pair(module, x, tmp_path), strict=True):
        y = call(x)
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        derivatives.append(y)
        expected = y if call is not module else y.detach()
        torch.testing.assert_close(y, expected)


def test_a_second_derivative_of_a_batch_norm_updates_its_statistics_once(tmp_path):
    accelerated, plain = accelerate_pair(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), make_input(grad=True), tmp_path
    )
    x = make_input(grad=True)
    for module in (accelerated, plain):
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert_same_gradients(accelerated, plain)
    torch.testing.assert_close(dict(accelerated.named_buffers()), dict(plain.named_buffers()))


def test_a_module_that_changed_before_the_second_derivative_says_so(tmp_path):
    accelerated, _ = accelerate_pair(Net(), make_input(grad=True), tmp_path)
    x = make_input(grad=True)
    y = accelerated(x).sum()
    accelerated.body[1] = nn.ReLU()
    with pytest.raises(RuntimeError, match="changed since its forward"):
        torch.autograd.grad(y, x, create_graph=True)


def test_a_graph_of_gradients_is_freed_with_its_output(tmp_path):
    import gc
    import weakref

    accelerated, _ = accelerate_pair(Net(), make_input(), tmp_path)
    gc.collect()
    gc.disable()
    try:
        y = accelerated(make_input())
        node = weakref.ref(y.grad_fn)
        del y
        assert node() is None  # the hook must not keep its node in a circle
    finally:
        gc.enable()


def test_a_second_derivative_through_dropout_fails_loudly(tmp_path):
    accelerated, _ = accelerate_pair(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)), make_input(grad=True), tmp_path
    )
    x = make_input(grad=True)
    (slope,) = torch.autograd.grad(accelerated(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        slope.sum().backward()
