"""A few steps of training on one living instance, as a loop makes them.

Each step calls the instance in train mode with other values of the inputs, and moves the parameters
along their gradients. What an instance does in its first step only, or keeps of it, shows in the
state at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils import _pytree as pytree

from torch_cudal1.judge.worker.modules.ordinary_call import call_as_main

__all__ = ["take_training_steps", "vary_inputs"]

_RATE = 0.1
# The norm of all gradients together, beyond which they are scaled down.
_MAX_NORM = 1.0


def take_training_steps(
    instance: torch.nn.Module,
    call: Callable[[Sequence[torch.Tensor]], object],
    inputs: Sequence[torch.Tensor],
    steps: int,
    seed: int,
) -> object:
    """The result of the last step's call. `call` calls the instance, `inputs` are those of its first
    step, floating numbers of which become larger from step to step.

    The loss is half the mean square of all floating results; gradient descent with a rate of 0.1
    and a norm of at most 1.
    """
    parameters = [each for each in instance.parameters() if each.requires_grad]
    result: object = None
    # Once, as a program seeds: dropout draws other masks in each step, the same for the same draws.
    torch.manual_seed(seed)
    for step in range(steps):
        with torch.enable_grad():
            result = call(vary_inputs(inputs, step))
            loss = _compute_loss(result)
        if loss is not None and loss.requires_grad and parameters:
            # Hooks on an accumulated gradient run in `backward` only, which is what loops call.
            call_as_main(torch.autograd.backward, (loss,), {})
            _descend(parameters)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def vary_inputs(inputs: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """The inputs of a step: floating numbers times 1 + step / 8."""
    return [
        tensor * (1.0 + step / 8) if tensor.dtype.is_floating_point else tensor for tensor in inputs
    ]


def _compute_loss(result: object) -> torch.Tensor | None:
    parts = [
        leaf.square().mean() / 2
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point and leaf.numel()
    ]
    return sum(parts[1:], parts[0]) if parts else None


def _descend(parameters: Sequence[torch.Tensor]) -> None:
    """Move the parameters along their gradients, which are used up."""
    norms = [each.grad.double().square().sum() for each in parameters if each.grad is not None]
    norm = float(torch.stack(norms).sum().sqrt()) if norms else 0.0
    rate = _RATE * min(1.0, _MAX_NORM / max(norm, 1e-30))
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
                parameter.grad = None
