"""Second derivatives of a compiled step are eager's; a step that cannot run again says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.api.training_pairs import Net, assert_same_gradients, pair, shorten_measurements, x_of


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

    ours, own = pair(Doubling(), torch.ones(1, 4), tmp_path)
    for _ in range(3):
        found = [
            torch.autograd.grad(kind(torch.ones(1, 4)).sum(), kind.weight, create_graph=True)[0]
            for kind in (ours, own)
        ]
        torch.testing.assert_close(*found)
    assert runs.backward == 3
    with pytest.raises(RuntimeError):
        torch.autograd.grad(found[0].sum(), ours.weight)


def test_second_derivatives_through_a_batch_norm_that_learns(tmp_path):
    ours, own = pair(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Tanh()), x_of(), tmp_path)
    x = x_of()
    for kind in (ours, own):
        (gradient,) = torch.autograd.grad(kind(x).square().sum(), kind[0].weight, create_graph=True)
        gradient.square().sum().backward()
    torch.testing.assert_close(ours[0].weight.grad, own[0].weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(own.named_buffers()))


def test_a_gradient_penalty_trains_as_in_eager(runs, tmp_path):
    ours, own = pair(Net(), x_of(grad=True), tmp_path)
    x = x_of(grad=True)
    for module in (ours, own):
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        (slope.square().sum() + module(x).sum()).backward()
    assert_same_gradients(ours, own)
    assert runs.forward == 2


def test_a_hessian_vector_product_is_that_of_eager(tmp_path):
    ours, own = pair(Net(), x_of(), tmp_path)
    x, found = x_of(), []
    for module in (ours, own):
        parameters = list(module.parameters())
        grads = torch.autograd.grad(module(x).square().sum(), parameters, create_graph=True)
        found.append(
            torch.autograd.grad(sum(g.sum() for g in grads), parameters, allow_unused=True)
        )
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_third_derivative_too(tmp_path):
    module = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 1, requires_grad=True)
    for found, call in zip(([], []), pair(module, x, tmp_path), strict=True):
        y = call(x)
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append(y)
        expected = y if call is not module else y.detach()
        torch.testing.assert_close(y, expected)


def test_a_second_derivative_of_a_batch_norm_updates_its_statistics_once(tmp_path):
    ours, own = pair(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), x_of(grad=True), tmp_path)
    x = x_of(grad=True)
    for module in (ours, own):
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert_same_gradients(ours, own)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(own.named_buffers()))


def test_a_module_that_changed_before_the_second_derivative_says_so(tmp_path):
    ours, _ = pair(Net(), x_of(grad=True), tmp_path)
    x = x_of(grad=True)
    y = ours(x).sum()
    ours.body[1] = nn.ReLU()
    with pytest.raises(RuntimeError, match="changed since its forward"):
        torch.autograd.grad(y, x, create_graph=True)


def test_a_graph_of_gradients_is_freed_with_its_output(tmp_path):
    import gc
    import weakref

    ours, _ = pair(Net(), x_of(), tmp_path)
    gc.collect()
    gc.disable()
    try:
        y = ours(x_of())
        node = weakref.ref(y.grad_fn)
        del y
        assert node() is None  # the hook must not keep its node in a circle
    finally:
        gc.enable()


def test_a_second_derivative_through_dropout_fails_loudly(tmp_path):
    ours, _ = pair(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)), x_of(grad=True), tmp_path
    )
    x = x_of(grad=True)
    (slope,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        slope.sum().backward()
