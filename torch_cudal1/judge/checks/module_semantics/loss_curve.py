"""Check of training that drifts: a stretch of gradient descent beside eager's and float64's own.

Each side follows its own gradients from the same parameters, so small errors of one sign add up,
and a backward pass that gives up after many calls shows. One seed, plain descent: it proves no
convergence of a real recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import get_source_reference, report_not_applicable
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import Outputs, ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.wire.call_spec import RunMode

__all__ = ["LOSS_CURVE", "check_loss_curve"]

_STEP_SIZE = 2e-3  # of a parameter's own rms, along the first gradient
_FLOORS = {torch.float16: 2e-2, torch.bfloat16: 2e-2}
_FLOOR = 1e-3  # of the loss: rounding moves a kink's branch, and further steps carry that on
_FACTOR = 2.0
_Pass: TypeAlias = Callable[
    [Sequence[torch.Tensor]], Outputs
]  # outputs, then gradients, of one call


@dataclass(frozen=True)
class _Recipe:
    """Which inputs move and by how much of their gradient; how many outputs there are, and where
    cotangents begin.
    """

    moving: dict[int, int]  # input -> its gradient's place among the results
    rates: dict[int, float]
    outputs: int
    cotangents: int
    steps: int


def check_loss_curve(trial: Trial) -> list[CheckResult]:
    """Half the mean square of the results, descended along the parameters: the candidate's curve
    beside eager's and float64's.
    """
    reference = get_source_reference(trial)
    if reference is None or not trial.gradients:
        return report_not_applicable("grad", "no gradients are claimed of a source")
    try:
        backward = reference.with_gradients(RunMode(gradients=True))
        aside = trial.load_in_slot(backward, "candidate training")
        sample = aside.draw("normal")
        # The number of steps depends on the size of the work and not on the clock.
        recipe = _make_recipe(
            reference, backward, sample, trial.count_affordable_sets(trial.profile.descent, 0.1)
        )
        if recipe is None:
            return report_not_applicable("grad", "no parameter with a gradient moves the results")
        eager = _descend(sample.inputs, recipe, lambda inputs: backward.eager(inputs).outputs)
        exact = _descend(
            sample.inputs, recipe, lambda inputs: _require_exact(backward.exact(inputs))
        )
    except ReferenceFailure as error:
        return report_not_applicable("grad", f"eager does not train here: {error.found[:120]}")
    losses = _descend(sample.inputs, recipe, lambda inputs: _run_candidate(aside, sample, inputs))
    aside.drop(sample)
    return [
        _compare_curves(
            losses, eager, exact, next(t.dtype for t in sample.inputs if t.dtype.is_floating_point)
        )
    ]


def _compare_curves(
    losses: Sequence[float], eager: Sequence[float], exact: Sequence[float], dtype: torch.dtype
) -> CheckResult:
    floor, eager_error, worst, limit = _FLOORS.get(dtype, _FLOOR), 0.0, 0.0, math.inf
    for step, (a, b, c) in enumerate(zip(losses, eager, exact, strict=True)):
        # A loss of zero has no relative error.
        scale = max(abs(c), 1e-30)
        # The largest of eager's errors so far: both curves diverge, and eager's may cross float64's
        # by chance.
        eager_error, error = max(eager_error, abs(b - c) / scale), abs(a - c) / scale
        limit = _FACTOR * eager_error + floor
        worst = max(worst, error)
        # `not <=` refuses NaN as well.
        if not error <= limit:
            detail = f"the loss is {a:.6g} after {step} steps of descent, float64's {c:.6g}, eager's {b:.6g}"
            return CheckResult("grad", False, error, limit, detail)
    return CheckResult(
        "grad",
        True,
        worst,
        limit,
        f"loss over {len(exact) - 1} steps: from {exact[0]:.4g} to {exact[-1]:.4g}",
    )


def _make_recipe(
    reference: SourceReference, backward: SourceReference, sample: InputSet, steps: int
) -> _Recipe | None:
    """Parameters move by a share of their size along their first gradient, each by its own fixed
    rate.
    """
    floating = [i for i, spec in enumerate(reference.specs) if spec.torch_dtype.is_floating_point]
    places = {index: len(reference.outputs) + number for number, index in enumerate(floating)}
    moving = {
        index: place for index, place in places.items() if reference.roles[index] == "parameter"
    }
    recipe = _Recipe(moving, {}, len(reference.outputs), backward.cotangents, steps)
    # From float64's gradients, so that all three sides move by the same rates.
    first = _require_exact(
        backward.exact(
            _fill_cotangents(sample.inputs, recipe, _require_exact(backward.exact(sample.inputs)))
        )
    )
    rates = {}
    for index, place in moving.items():
        gradient = first[place] if place < len(first) else None
        size = 0.0 if gradient is None else float(gradient.double().square().mean().sqrt())
        # A parameter without effect has no direction.
        if size > 0 and math.isfinite(size):
            rates[index] = (
                _STEP_SIZE * float(sample.inputs[index].double().square().mean().sqrt()) / size
            )
    return replace(recipe, rates=rates) if rates else None


def _descend(inputs: Sequence[torch.Tensor], recipe: _Recipe, run: _Pass) -> list[float]:
    """The loss at each step; `run` yields results and gradients of one call."""
    values, losses = list(inputs), []
    for _ in range(recipe.steps + 1):
        results = run(values)
        losses.append(_compute_loss(results[: recipe.outputs]))
        for index, rate in recipe.rates.items():
            gradient = results[recipe.moving[index]]
            if gradient is not None and len(losses) > 1:  # the first cotangents are noise
                # In the parameter's own type, as an optimizer without master weights does.
                values[index] = values[index] - (rate * gradient).to(values[index].dtype)
        # The next call gets this loss's cotangents, so one call a step yields the loss and a
        # gradient, which is one step old.
        values = _fill_cotangents(values, recipe, results)
    return losses


def _compute_loss(outputs: Outputs) -> float:
    there = [out.double() for out in outputs if out is not None and out.dtype.is_floating_point]
    return sum(float(out.square().mean()) / 2 for out in there)


def _fill_cotangents(
    values: Sequence[torch.Tensor], recipe: _Recipe, outputs: Outputs
) -> list[torch.Tensor]:
    """The gradient of the loss with respect to each result, in the cotangent's own form."""
    changed = list(values)
    for position, out in enumerate(outputs[: recipe.outputs]):
        place = recipe.cotangents + position
        if out is not None and out.dtype.is_floating_point:
            # The derivative of half the mean square.
            changed[place] = (out / max(out.numel(), 1)).to(values[place].dtype)
    return changed


def _run_candidate(trial: Trial, base: InputSet, inputs: Sequence[torch.Tensor]) -> Outputs:
    """Raises CandidateFailure: an error in the hundredth step is the candidate's."""
    sample = trial.replace_inputs(
        base,
        {
            i: new
            for i, (old, new) in enumerate(zip(base.inputs, inputs, strict=True))
            if new is not old
        },
        "step",
    )
    try:
        return trial.run(sample).outputs
    finally:
        # A dead process has freed the set already, and asking it would raise.
        if trial.child.usable:
            trial.drop(sample)


def _require_exact(exact: Outputs | Refusal) -> Outputs:
    if isinstance(exact, Refusal):
        raise ReferenceFailure("running in float64", exact.reason)
    return exact


LOSS_CURVE = CheckSpec(
    name="grad",
    run=check_loss_curve,
    step="loss_curve",
    since="strict",
    knobs=("descent", "budget_s"),
    replaces_only=True,
    asks="the loss over 200 steps of descent beside float64's",
)
