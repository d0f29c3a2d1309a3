"""Check `regimes`: inputs of one sign and size a row, from far below one to far above; each row's error
beside the size of that row's own values.

An error of all of a function where its values are small, as a zero in place of silu's -0.015 below -6,
is nothing in the root mean square over a normal draw, and here it is the whole row.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from functools import partial

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    disagree_on_error,
    eager_refuses,
    find_form_problem,
    get_source_reference,
    report_not_applicable,
    summarise,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.compare import unit_roundoff
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["REGIMES", "check_regimes"]

# Sizes of a row are powers of two.
_BANDS = [
    *(-(2.0**exponent) for exponent in range(-6, 4)),
    # Padding and dead activations: where the result is nothing as well, nothing is compared.
    0.0,
    *(2.0**exponent for exponent in range(-6, 10)),
]
# In sets of their own: here honest formulas have no digits left where a value is next to nothing, as
# log(1 + exp(x)) in float32, and so a value that is small beside one is not compared.
_FAR_BANDS = [-(2.0**exponent) for exponent in range(4, 10)]
_FAR_ROUND_OFFS = 64.0
# Of what must stay above zero, such as a variance.
_LEAST_POSITIVE = 2.0**-6
# Of a row's own values; rounding is far below.
_GROSS_FRACTION = 0.1
_EAGER_FACTOR = 4.0
# Of the inputs: what these may move a result, its error may be.
_ROUND_OFFS = 64.0
_MAX_SETS = 4


def check_regimes(trial: Trial) -> list[CheckResult]:
    """Rows of `_BANDS` in every plain floating input, then of `_FAR_BANDS`; each row of a result
    against float64.
    """
    if trial.contract.precision == "kernelbench":
        return report_not_applicable("regimes", "errors count by KernelBench's flat tolerance")
    base, _ = trial.first_two
    rows = [
        math.prod(tensor.shape[:-1])
        for tensor, role in zip(base.inputs, trial.reference.roles, strict=True)
        if role == "input" and tensor.dtype.is_floating_point and tensor.numel()
    ]
    # An input of few rows meets a part of the bands in each set.
    wanted = min(_MAX_SETS, math.ceil(len(_BANDS) / max(1, max(rows, default=0))))
    agreements: list[Agreement | None] = []
    count = trial.count_affordable_sets(wanted + 1, 0.1) if rows else 0
    # The last set is the far one, where there is time for two.
    sets = [_FAR_BANDS if 0 < number == count - 1 else _BANDS for number in range(count)]
    for number, bands in enumerate(sets):
        aside = _load_fresh(trial, number)
        sample = aside.derive(
            base if aside is trial else aside.draw("normal"),
            f"regimes {number}",
            partial(_fill_with_bands, trial, bands),
        )
        if eager_refuses(sample):
            agreements.append(None)
        else:
            is_far = bands is _FAR_BANDS
            question = "rows far below zero" if is_far else "rows of one sign and size"
            ask = partial(_compare_rows, aside, sample, question, is_far=is_far)
            agreements.append(disagree_on_error(aside, question, ask))
        # The set that it was derived from is the other checks' too.
        aside.drop(sample)
        sample.forget_exact()
        if agreements[-1] is not None and agreements[-1].problem:
            break
    return summarise("regimes", agreements, "no floating input that eager takes in all sizes")


def _load_fresh(trial: Trial, number: int) -> Trial:
    # A module of its own: what an earlier call left behind is for `call_history`. A Program keeps
    # nothing, and would be compiled again.
    if get_source_reference(trial) is None:
        return trial
    return trial.load_in_slot(trial.reference, f"candidate regimes {number}")


def _fill_with_bands(
    trial: Trial, bands: Sequence[float], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    facts, roles = trial.facts, trial.reference.roles
    return [
        _make_bands(tensor, bands, is_positive=index in facts.positive)
        if role == "input"
        and tensor.dtype.is_floating_point
        and tensor.numel()
        and index not in facts.structural
        # An element of an expanded tensor stands in many rows.
        and 0 not in tensor.stride()
        else None
        for index, (tensor, role) in enumerate(zip(inputs, roles, strict=True))
    ]


def _make_bands(tensor: torch.Tensor, bands: Sequence[float], *, is_positive: bool) -> torch.Tensor:
    """Each row of one band: values from its number to twice that."""
    generator = torch.Generator().manual_seed(secrets.randbits(62))
    rows = math.prod(tensor.shape[:-1])
    # In secret order: a row's number does not tell its band.
    order = torch.randperm(len(bands), generator=generator)
    of_rows = torch.tensor(bands)[order[torch.arange(rows) % len(bands)]]
    shape = (*tensor.shape[:-1], 1) if tensor.dim() else ()
    values = of_rows.reshape(shape) * (1.0 + torch.rand(tensor.shape, generator=generator))
    filled = torch.empty_like(tensor)
    filled.copy_(values.abs().clamp_min(_LEAST_POSITIVE) if is_positive else values)
    return filled


def _compare_rows(trial: Trial, sample: InputSet, question: str, *, is_far: bool) -> Agreement:
    result = trial.run(sample)
    if problem := find_form_problem(result, sample.expected):
        return Agreement(question, problem)
    for position, (out, eager) in enumerate(
        zip(result.outputs, sample.expected.outputs, strict=True)
    ):
        if out is None or eager is None or not eager.dtype.is_floating_point or not eager.numel():
            continue
        exact = sample.get_exact(position)
        errors = _RowErrors(out, eager, eager if exact is None else exact)
        allowed = torch.maximum(_EAGER_FACTOR * errors.eager, _GROSS_FRACTION * errors.size)
        if is_far:
            allowed = allowed + _FAR_ROUND_OFFS * unit_roundoff(eager.dtype)
        if bool(errors.exceed(allowed).any()):
            # Sums that cancel, and choices that rounding decides, move far with their inputs.
            moved = sample.get_sensitivity(position)
            if moved is not None:
                rounding = _ROUND_OFFS * unit_roundoff(eager.dtype)
                allowed = allowed + rounding * _measure_size(_split_rows(moved.double()))
        wrong = errors.exceed(allowed)
        if bool(wrong.any()):
            row = int((errors.candidate / errors.size).masked_fill(~wrong, -math.inf).argmax())
            found = errors.describe(row)
            return Agreement(
                question,
                f"output {position}, row {row}: {found}{_describe_inputs(trial, sample, eager, row)}",
            )
    return Agreement(question)


class _RowErrors:
    """Root mean squares by row: of the exact values, of the candidate's error and of eager's."""

    def __init__(self, out: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
        wide_out, wide_eager, wide = (_split_rows(item.double()) for item in (out, eager, exact))
        self.size = _measure_size(wide)
        self.candidate = _measure_size(wide_out - wide)
        self.eager = _measure_size(wide_eager - wide)
        # NaN and infinities are for `special`; below the normal numbers nothing has digits.
        tiny = torch.finfo(eager.dtype).tiny
        self.is_comparable = self.size.isfinite() & self.eager.isfinite() & (self.size > 8 * tiny)

    def exceed(self, allowed: torch.Tensor) -> torch.Tensor:
        """The rows whose error is larger than that."""
        # A NaN where eager has none is no small error.
        return self.is_comparable & (self.candidate.nan_to_num(nan=math.inf) > allowed)

    def describe(self, row: int) -> str:
        """The error of a row."""
        share = float(self.candidate[row] / self.size[row])
        return f"the error is {share:.3g} of the values there (rms {float(self.size[row]):.3g})"


def _split_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)


def _measure_size(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().mean(1).sqrt()


def _describe_inputs(trial: Trial, sample: InputSet, eager: torch.Tensor, row: int) -> str:
    """The inputs of the row, where an input has the rows of the result."""
    for tensor, role in zip(sample.inputs, trial.reference.roles, strict=True):
        if role == "input" and tensor.dim() and tensor.shape[:-1] == eager.shape[:-1]:
            values = _split_rows(tensor)[row].double()
            return f", for inputs from {float(values.min()):.3g} to {float(values.max()):.3g}"
    return ""


REGIMES = CheckSpec(
    name="regimes",
    run=check_regimes,
    knobs=("budget_s",),
    asks=(
        "inputs whose rows are of one sign and one size, from 1/64 to 1,024, or zero: is the error of "
        "each row below a tenth of that row's own values, or four times eager's, or, below -16, next to "
        "nothing beside one"
    ),
)
