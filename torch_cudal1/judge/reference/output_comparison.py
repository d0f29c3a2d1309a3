"""Compares the outputs of one call with what the reference yields on the same input set.

`compare` weighs two tensors; this module chooses what a result is compared with: float64 results
only where they are needed, TF32 where the contract allows it, further runs of eager where eager
varies. It draws no inputs and knows no check.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

import torch

from torch_cudal1.judge.reference.compare import (
    EAGER_AGAINST_ITSELF,
    Comparison,
    compare,
    compare_tied_indices,
    same_numbers,
)
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import Outputs, RegionReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.wire.tensor_bits import same_bits

__all__ = ["compare_outputs"]

# Few elements can be whole by chance.
_MIN_COUNTED_ELEMENTS = 64


def compare_outputs(
    trial: Trial,
    sample: InputSet,
    outputs: Outputs,
    slack: float = 1.0,
    weighed: Collection[int] = (),
) -> Iterator[tuple[int, Comparison]]:
    """Position and comparison of each output that eager yields.

    `weighed`: positions at which even eager's own numbers are compared with float64, which tells
    whether the set leaves digits. `slack`: see `compare`.
    """
    for position, (out, expected) in enumerate(zip(outputs, sample.expected.outputs, strict=True)):
        if expected is None:
            continue
        if out is None:
            yield position, Comparison(False, detail="no tensor where eager yields one")
            continue
        # bits that were found right on this set before are as right now, and cost nothing
        accepted = trial.accepted_outputs.get((sample.name, position))
        if accepted is not None and same_bits(accepted[0], out):
            yield position, accepted[1]
            continue
        comparison = (
            None if position in weighed else _compare_eager_numbers(trial, sample, position, out)
        )
        comparison = comparison or _compare_output(trial, sample, position, out, slack)
        # Under a wider limit it was not found right for the other checks.
        if comparison.passed and slack == 1:
            trial.accepted_outputs[sample.name, position] = out, comparison
        yield position, comparison


def _compare_eager_numbers(
    trial: Trial, sample: InputSet, position: int, out: torch.Tensor
) -> Comparison | None:
    """The result of comparing eager's numbers with themselves, where the candidate's are the same.

    None for other numbers, where the float64 result exists already, and under a contract that needs
    none.
    """
    expected = sample.expected.outputs[position]
    assert expected is not None
    # equal errors pass every criterion, so a float64 run would tell nothing
    if (
        sample.has_exact
        or trial.contract.precision == "kernelbench"
        or not same_numbers(out, expected)
    ):
        return None
    return EAGER_AGAINST_ITSELF if expected.dtype.is_floating_point else Comparison(True, 0.0, 0.0)


def _compare_output(
    trial: Trial, sample: InputSet, position: int, out: torch.Tensor, slack: float
) -> Comparison:
    expected = sample.expected.outputs[position]
    assert expected is not None
    precision, longest = trial.contract.precision, trial.facts.longest_reduction
    # of a float64 result eager's own error is none, so float64 cannot be the yardstick
    is_wide = expected.dtype == torch.float64
    exact = None if is_wide or precision == "kernelbench" else sample.get_exact(position)
    compare_with = partial(
        compare,
        exact=exact,
        precision=precision,
        longest=longest,
        slack=slack,
        sensitivity=partial(sample.get_sensitivity, position),
    )
    comparison = compare_with(out, expected)
    if comparison.passed:
        # Sums of zeros and ones are exact in every order, so there equality is asked for.
        if precision == "kernelbench" or sample.distribution != "integers":
            return comparison
        return _compare_counts(trial, out, expected, exact) or comparison
    if not expected.dtype.is_floating_point:
        return _compare_ties(trial, sample, position, out) or comparison
    # The contract grants TF32 where the user's flags do, whether or not eager's kernel makes use of
    # it.
    allowed = trial.reference.eager_with_tf32(sample.inputs) or []
    if (
        allowed
        and (with_tf32 := allowed[position]) is not None
        and (within := compare_with(out, with_tf32)).passed
    ):
        return replace(within, detail="within the right to TF32, of which eager makes no use here")
    # where eager itself varies from run to run, its largest error counts
    for rerun in sample.rerun_eager():
        other = rerun.outputs[position]
        if other is not None and not same_bits(other, expected):
            comparison = max(comparison, compare_with(out, other), key=lambda each: each.passed)
    return comparison


def _compare_ties(
    trial: Trial, sample: InputSet, position: int, out: torch.Tensor
) -> Comparison | None:
    """Indices that differ from eager's only between equal values; None where nothing is known of
    the values.
    """
    expected, reference = sample.expected.outputs[position], trial.reference
    if (
        expected is None
        or expected.dtype != torch.int64
        or out.shape != expected.shape
        or not isinstance(reference, RegionReference)
    ):
        # Only of a Program is it known which values an index was chosen from.
        return None
    choices = reference.values_chosen_from(sample.inputs, position)
    return (
        None
        if choices is None
        else compare_tied_indices(out, expected, *choices, longest=trial.facts.longest_reduction)
    )


def _compare_counts(
    trial: Trial, out: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor | None
) -> Comparison | None:
    """Equality, where eager's result counts; None where it does not."""
    if not _is_exact_count(trial, expected, exact):
        return None
    wrong = int((out != expected).sum())
    return Comparison(
        not wrong,
        float(wrong),
        0.0,
        f"{wrong} of {out.numel()} sums of small integers are not exact" if wrong else "",
    )


def _is_exact_count(trial: Trial, expected: torch.Tensor, exact: torch.Tensor | None) -> bool:
    """Whether eager's result is whole and free of error: sums of products of small integers."""
    # convolutions may use fractions on the way (Winograd)
    has_convolutions = any(
        role != "input" and len(spec.shape) > 2
        for role, spec in zip(trial.reference.roles, trial.reference.specs, strict=True)
    )
    if (
        has_convolutions
        or exact is None
        or not expected.dtype.is_floating_point
        or expected.numel() < _MIN_COUNTED_ELEMENTS
    ):
        return False
    # More than two different values: a result of zeros and ones may be a comparison and no sum.
    return (
        torch.equal(expected.double(), exact)
        and torch.equal(exact, exact.round())
        and len(exact.unique()) > 2
    )
