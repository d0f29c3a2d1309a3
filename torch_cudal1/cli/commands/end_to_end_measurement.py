"""Whole modules measured end to end: paired times against eager and Inductor, and errors against a
float64 run.

The clock is `judge.benchmark.timing`, the only one, through `judge.benchmark.protocol`. It decides
nothing; a module that torch cannot compile or run in float64 gives a None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from torch_cudal1.core.report import EndToEnd, Interval
from torch_cudal1.graph.functional_module import copy_module
from torch_cudal1.judge.benchmark.protocol import sample_pairs
from torch_cudal1.judge.benchmark.statistics import PairedSummary, summarise

__all__ = ["compute_scaled_error", "run_in_float64", "time_end_to_end"]


def time_end_to_end(
    eager: torch.nn.Module,
    accelerated: torch.nn.Module | None,
    inputs: tuple[Any, ...],
    *,
    budget_s: float,
) -> EndToEnd:
    """Times of `eager`, of torch.compile (Inductor, default mode) and of `accelerated` on the same inputs,
    without gradients.

    `accelerated` None: eager itself is what runs, so it is 1x of eager by construction and only
    torch.compile is measured against it. `budget_s` bounds the timing; compiling comes on top.
    """
    device = next(
        leaf.device for leaf in _pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)
    )
    run_eager, run_accelerated = (
        _call(eager, inputs),
        _call(eager if accelerated is None else accelerated, inputs),
    )
    # Compiled before the clock starts: `budget_s` is for timing alone.
    run_compiled = _compile_module(eager, inputs)
    against_inductor = against_eager = None
    if run_compiled is not None:
        against_inductor = summarise(
            # Paired with torch.compile, too: a quotient of two medians of different minutes says
            # little.
            sample_pairs(run_compiled, run_accelerated, device, budget_s=budget_s / 2, margin=1.0)
        )
    # Eager is timed even where it is what runs, if nothing else gave a time per call.
    if accelerated is not None or against_inductor is None:
        against_eager = summarise(
            sample_pairs(run_eager, run_accelerated, device, budget_s=budget_s / 2, margin=1.0)
        )
    accelerated_us = next(
        summary.b_us for summary in (against_eager, against_inductor) if summary is not None
    )
    return EndToEnd(
        eager_us=against_eager.a_us
        if against_eager and accelerated is not None
        else accelerated_us,
        inductor_us=against_inductor.a_us if against_inductor else None,
        ours_us=accelerated_us,
        vs_eager=_interval(against_eager)
        if against_eager and accelerated is not None
        else Interval(1.0, 1.0, 1.0),
        vs_inductor=_interval(against_inductor) if against_inductor else None,
    )


def run_in_float64(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any | None:
    """What a float64 copy of the module answers; None where an operator has no float64 form."""
    # A copy, because `double()` converts the module in place.
    float64_copy = copy_module(module).double()
    try:
        with torch.no_grad():
            return float64_copy(*_pytree.tree_map(_widen, inputs))
    except (RuntimeError, NotImplementedError):
        return None


def compute_scaled_error(outputs: Any, reference: Any | None) -> float | None:
    """Largest |found - reference| over the rms of the reference, over all floating outputs; None
    without a reference.

    NaN in one and not in the other is infinitely wrong.
    """
    if reference is None:
        return None
    worst = 0.0
    for output, expected in zip(
        _pytree.tree_leaves(outputs), _pytree.tree_leaves(reference), strict=True
    ):
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            continue
        output = output.detach().double()
        # NaN compares as unequal to everything, so a maximum of differences would pass over it.
        if not torch.equal(output.isnan(), expected.isnan()):
            return float("inf")
        difference = (
            # Equal infinities would give NaN as their difference.
            torch.where(output == expected, 0.0, output - expected)
            .abs()
            .nan_to_num(nan=0.0, posinf=float("inf"))
        )
        scale = (
            # Scaled by the rms of the output: scaled by its largest element, errors of all others
            # would vanish.
            expected[expected.isfinite()].square().mean().sqrt().item()
            if expected.isfinite().any()
            else 0.0
        )
        largest = difference.max().item() if difference.numel() else 0.0
        worst = max(worst, largest / scale if scale else (0.0 if largest == 0 else float("inf")))
    return worst


def _call(module: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return module(*inputs)

    return run


def _compile_module(
    module: torch.nn.Module, inputs: tuple[Any, ...]
) -> Callable[[], object] | None:
    """torch.compile's default, warmed; None where it cannot compile here (no C++ compiler, for
    one).
    """
    run = _call(torch.compile(copy_module(module)), inputs)
    try:
        run()
    except RuntimeError:
        # torch's compiler errors are RuntimeErrors. The page then shows no number against
        # torch.compile.
        return None
    return run


def _interval(summary: PairedSummary) -> Interval:
    return Interval(summary.speedup, summary.low, summary.high)


def _widen(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
