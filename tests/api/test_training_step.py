"""A step that is only measured: its gradients are eager's, and nothing of the user's changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_cudal1.api.gradients.training_step import compute_gradients, copy_leaf


def test_gradients_are_returned_and_not_accumulated() -> None:
    module, x = nn.Linear(4, 2), torch.randn(3, 4)
    expected = torch.autograd.grad(module(x).abs().sum(), list(module.parameters()))
    gradients = compute_gradients(module(x), list(module.parameters()))
    torch.testing.assert_close(gradients, expected)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_hooks_on_accumulation_do_not_run() -> None:
    module, calls = nn.Linear(4, 2), []
    module.weight.register_post_accumulate_grad_hook(calls.append)
    compute_gradients(module(torch.randn(3, 4)), [module.weight])
    assert calls == []


def test_hooks_on_tensors_do_not_run_and_are_there_afterwards() -> None:
    module, calls = nn.Linear(4, 2), []
    x = torch.randn(3, 4, requires_grad=True)
    inner = x * 2
    handles = [each.register_hook(calls.append) for each in (module.weight, x, inner)]
    expected = torch.autograd.grad(module(inner).abs().sum(), [module.weight, inner])
    calls.clear()
    gradients = compute_gradients(module(inner), [module.weight, inner])
    torch.testing.assert_close(gradients, expected)
    assert calls == []
    module(inner).sum().backward()
    assert len(calls) == 3
    for handle in handles:
        handle.remove()
    module(x * 2).sum().backward()
    assert len(calls) == 3


def test_every_differentiable_tensor_of_a_result_is_in_the_loss() -> None:
    w = torch.tensor([2.0, -3.0], requires_grad=True)
    results = {"a": w * 2, "b": [w.sum(), 7, torch.ones(2)], "none": None}
    (gradient,) = compute_gradients(results, [w])
    torch.testing.assert_close(gradient, torch.tensor([2.0, -2.0]) - 1)


def test_a_leaf_that_the_call_does_not_use_has_no_gradient() -> None:
    w, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    gradients = compute_gradients(w * 3, [w, unused])
    assert gradients[1] is None
    assert gradients[0] is not None


def test_a_loss_of_many_half_numbers_does_not_overflow() -> None:
    w = torch.ones(100_000, dtype=torch.float16, requires_grad=True)
    (gradient,) = compute_gradients(w * 2, [w])
    assert gradient is not None
    assert torch.equal(gradient, torch.full_like(gradient, 2.0))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_copied_leaf_has_the_layout_and_the_memory_of_its_own(requires_grad: bool) -> None:
    leaf = torch.randn(4, 6)[:, ::2].t().detach().requires_grad_(requires_grad)
    copied = copy_leaf(leaf)
    assert torch.equal(copied, leaf)
    assert (copied.stride(), copied.dtype) == (leaf.stride(), leaf.dtype)
    assert copied.requires_grad is requires_grad
    assert copied.is_leaf
    assert copied.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()
