"""Puts a choice where a graph's callable stands, with the reference behind it.

A drop-in must take the graph's inputs in the graph's order, give its outputs in the graph's order, and never leave the caller with
less than the baseline would give: `Swapped` checks the kill switch at every call and runs the reference when ours fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from torch_cudal1 import observe
from torch_cudal1.errors import Cudal1Error
from torch_cudal1.program.execute import Runner, prepare
from torch_cudal1.program.schedule import build
from torch_cudal1.records import Candidate, Region
from torch_cudal1.switch import is_disabled

__all__ = ["Positional", "Swapped", "in_graph_order", "swap"]

_FAILURES = (Cudal1Error, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
Positional: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]  # takes a graph's inputs in one sequence


class Swapped:
    """Callable on a region's inputs in canonical order. After a failure of ours the reference runs for the life of the process."""

    def __init__(self, region: Region, runner: Runner, device: torch.device, strictness: str) -> None:
        self._region, self._runner, self._device, self._strictness = region, runner, device, strictness
        self._reference: Runner | None = None
        self.quarantined = ""  # the reason, once ours has failed

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The region's outputs."""
        if self.quarantined or is_disabled():
            return self.reference(inputs)
        try:
            return self._runner(inputs)
        except _FAILURES as error:
            if _is_sticky(error):
                raise  # the CUDA context may be corrupt: nothing that runs after this can be trusted
            failure = error
        results = self.reference(inputs)  # if this fails too, the inputs are at fault: the user's own exception, and no quarantine
        self.quarantined = f"{type(failure).__name__}: {failure}"
        observe.fallback("run", failure, strictness=self._strictness, region=self._region.key)
        return results

    def reference(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The user's own operators, one after the other."""
        if self._reference is None:
            self._reference = prepare(self._region.program, self._device)
        return self._reference(inputs)


def swap(
    region: Region,
    candidate: Candidate,
    device: torch.device,
    *,
    strictness: str = "warn",
    options: Mapping[str, Any] | None = None,
) -> Swapped:
    """Build `candidate` for `region` on `device`. `options` are the user's Inductor options. Raises what the schedule raises."""
    static = [index for index, role in enumerate(region.roles) if role != "input"]
    runner = build(candidate.program, candidate.schedule, device, static=static, options=options)
    observe.count("regions_swapped", by=int(candidate.origin != "baseline"))
    return Swapped(region, runner, device, strictness)


def in_graph_order(swapped: Positional, order: Sequence[int]) -> Positional:
    """`swapped` for callers that pass the graph's placeholders: `order[i]` is the placeholder of the region's input i."""
    if tuple(order) == tuple(range(len(order))):
        return lambda inputs: swapped(inputs[: len(order)])
    return lambda inputs: swapped([inputs[position] for position in order])


def _is_sticky(error: BaseException) -> bool:
    """Errors after which the CUDA context is unusable; running out of memory is not one of them."""
    accelerator_error = getattr(torch, "AcceleratorError", ())
    return isinstance(error, accelerator_error) and not isinstance(error, torch.cuda.OutOfMemoryError)
