"""One call of a module and the gradients of its results, as a caller's graph asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.wire.call_spec import RunMode
from torch_cudal1.judge.worker.modules.ordinary_call import call_as_main

__all__ = ["call_with_gradients"]


def call_with_gradients(
    call: Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]],
    state: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    mode: RunMode,
) -> list[torch.Tensor | None]:
    """The tensors of the result of `call`, then a gradient for each of `state` and `tensors` that
    wants one; `cotangents` are those of the results.
    """
    places = (
        range(len(state) + len(tensors)) if mode.gradient_places is None else mode.gradient_places
    )
    for place, tensor in enumerate(state):
        if place not in places:
            tensor.requires_grad_(False)
    # Detached: gradients must end at these tensors, whatever the input set has.
    moving = [
        t.detach().requires_grad_(t.dtype.is_floating_point and place in places)
        for place, t in enumerate(tensors, len(state))
    ]
    # The handlers call slots under no_grad.
    with torch.enable_grad():
        # In the middle of a model a module is handed activations, which are no leaves.
        activations = [t.clone() if t.requires_grad and mode.step else t for t in moving]
        results = call(activations)
        if mode.doubled:
            results = _double_first(results, in_place=mode.doubled == "in place")
        # A model may call a module again before the first call's backward, which must not read what
        # the second call left. The same values in another order are as legal as they were.
        later = call([_reverse(t) for t in moving]) if mode.step else []
    leaves = [t for t in (*state, *moving) if t.requires_grad]
    pairs = [
        (out, c)
        # Not strict: buffers follow the outputs, and have no cotangent.
        for place, (out, c) in enumerate(zip(results, cotangents, strict=False))
        if out is not None and out.requires_grad and (mode.used is None or place in mode.used)
    ]
    grads = _differentiate(pairs, leaves, mode) if pairs else [None] * len(leaves)
    del later
    # The caller may still read what it handed on: a residual connection does.
    if mode.step and not all(map(torch.equal, activations, moving)):
        raise SandboxError("module", "it writes to the activation that it was called with")
    if mode.double_backward:
        grads = [
            *(g if g is None else g.detach() for g in grads),
            *_differentiate_twice(grads, leaves),
        ]
    # Detached: the results would keep the graph of this call alive.
    return [*(None if out is None else out.detach() for out in results), *grads]


def _double_first(
    results: Sequence[torch.Tensor | None], *, in_place: bool
) -> list[torch.Tensor | None]:
    """The results with the first one doubled: as a caller changes what it was handed."""
    first, *others = results
    if first is None or not first.dtype.is_floating_point:
        return [first, *others]
    return [first.mul_(2) if in_place else first * 2, *others]


def _reverse(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(tuple(range(tensor.dim()))) if tensor.dtype.is_floating_point else tensor


def _differentiate(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    leaves: Sequence[torch.Tensor],
    mode: RunMode,
) -> Sequence[torch.Tensor | None]:
    """The gradients of outputs, each with its cotangent. Raises SandboxError where a backward
    writes to a cotangent.
    """
    outputs = [out for out, _ in pairs]
    # In float64 or under autocast an output has another dtype than its cotangent.
    cotangents = [c.to(out.dtype) for out, c in pairs]
    copies = [c.clone() for c in cotangents]
    grads: Sequence[torch.Tensor | None]
    # On a CPU the backward of a candidate's function runs on this thread.
    if mode.step:
        if mode.accumulate:
            # Its own values, which every candidate and the reference have alike.
            for leaf in leaves:
                leaf.grad = leaf.detach().clone()
        # Hooks on a leaf's accumulated gradient run in `backward` only.
        call_as_main(torch.autograd.backward, (outputs, cotangents), {})
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
    else:
        options = {"allow_unused": True, "create_graph": mode.double_backward}
        if mode.retained:
            first = {**options, "retain_graph": True}
            call_as_main(torch.autograd.grad, (outputs, leaves, cotangents), first)
        grads = call_as_main(torch.autograd.grad, (outputs, leaves, cotangents), options)
    # The caller may need it for another branch of its graph.
    if not all(map(torch.equal, cotangents, copies)):
        raise SandboxError("module", "its backward writes to the gradient that it is handed")
    return grads


def _differentiate_twice(
    grads: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """The gradients of a weighted sum of all gradients, for each leaf; None where there is none."""
    live = [grad for grad in grads if grad is not None and grad.requires_grad]
    if not live:
        return [None] * len(leaves)
    # Drawn, and the same for every candidate: with ones the sums of some gradients are zero whatever
    # the inputs are, as a softmax's, and what is left of them is rounding.
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(grad.shape, generator=generator).to(grad.device, grad.dtype) for grad in live
    ]
    return torch.autograd.grad(live, leaves, weights, allow_unused=True)
