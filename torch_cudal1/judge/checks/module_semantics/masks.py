"""The check of masks among the arguments of a call: another mask of the same shape must matter as in
eager.

Every other check calls with the masks of the examples, since a mask that is drawn at random may
leave a row without any key. What such a row yields PyTorch's own ways settle differently, so only
what it does not touch is compared.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    compare_call,
    compare_result,
    disagree_on_error,
    eager_refuses,
    get_source_reference,
    report_not_applicable,
    summarise,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.inputs import clone_strided
from torch_cudal1.judge.reference.region_reference import Result
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["MASKS", "check_masks", "shuffle_mask"]

_DRAWS = 5


def check_masks(trial: Trial) -> list[CheckResult]:
    """Each mask of the call with its elements in another order, which is a secret; then with a row
    that keeps nothing, and with one that keeps all.
    """
    if get_source_reference(trial) is None:
        return report_not_applicable("perturb", "a Program is judged on masks of its own")
    first, _ = trial.first_two
    agreements: list[Agreement | None] = []
    for position, role in enumerate(trial.reference.roles):
        mask = first.inputs[position]
        if role == "input" and mask.dtype == torch.bool and mask.numel() > 1:
            agreements.append(_compare_with_mask(trial, first, position))
            for value in (False, True):
                if not any(each is not None and each.problem for each in agreements):
                    agreements.append(_compare_with_row(trial, first, position, value))
    return summarise("perturb", agreements, "no mask that eager takes in another order")


def _compare_with_mask(trial: Trial, base: InputSet, position: int) -> Agreement | None:
    """None where there is no other order, or eager refuses it."""
    shuffled = shuffle_mask(base.inputs[position])
    if shuffled is None:
        return None

    def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return [shuffled if index == position else None for index in range(len(inputs))]

    question = f"mask {position} in another order"
    variant = trial.derive(base, question, make)
    try:
        return compare_call(trial, variant, question)
    finally:
        trial.drop(variant)


def _compare_with_row(trial: Trial, base: InputSet, position: int, value: bool) -> Agreement | None:
    """One row of a mask, drawn in secret, is `value` throughout: the results that this does not touch
    are right. None where it touches all, or eager refuses it.
    """
    mask = base.inputs[position]
    if 0 in mask.stride() or mask.dim() < 2:
        return None

    def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        filled = clone_strided(mask)
        filled[tuple(secrets.randbelow(size) for size in mask.shape[:-1])] = value
        return [filled if index == position else None for index in range(len(inputs))]

    question = f"mask {position} with a row of {value}"
    variant = trial.derive(base, question, make)
    try:
        if eager_refuses(variant):
            return None
        pairs = zip(base.expected.outputs, variant.expected.outputs, strict=True)
        touched = [None if old is None or new is None else _differ(old, new) for old, new in pairs]
        if all(places is None or bool(places.all()) for places in touched):
            return None

        def ask() -> Agreement:
            result = trial.run(variant)
            _fill_in(result, variant.expected, touched)
            return compare_result(trial, variant, result, question)

        return disagree_on_error(trial, question, ask)
    finally:
        trial.drop(variant)


def _differ(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """NaN differs from everything; results of two shapes differ throughout."""
    if old.shape != new.shape:
        return torch.ones_like(new, dtype=torch.bool)
    return old != new


def _fill_in(result: Result, expected: Result, touched: Sequence[torch.Tensor | None]) -> None:
    """Eager's numbers in the places that are not compared."""
    for position, places in enumerate(touched):
        actual, eager = result.outputs[position], expected.outputs[position]
        if places is None or actual is None or eager is None:
            continue
        # Another form is told by the comparison.
        if (actual.shape, actual.dtype) == (eager.shape, eager.dtype):
            result.outputs[position] = torch.where(places, eager, actual)


def shuffle_mask(mask: torch.Tensor) -> torch.Tensor | None:
    """The elements of a boolean tensor in a secret order; None where a few draws give none that is
    usable, and for a tensor whose elements share memory.
    """
    if 0 in mask.stride():
        return None
    generator = torch.Generator(mask.device).manual_seed(secrets.randbits(63))
    for _ in range(_DRAWS):
        order = torch.randperm(mask.numel(), generator=generator, device=mask.device)
        shuffled = clone_strided(mask)
        shuffled.copy_(mask.flatten()[order].view(mask.shape))
        # A row without any key has NaN or zeros, which PyTorch's own ways settle differently.
        if _list_equal_rows(shuffled) <= _list_equal_rows(mask):
            return None if torch.equal(shuffled, mask) else shuffled
    return None


def _list_equal_rows(mask: torch.Tensor) -> set[bool]:
    """The values of rows (the last dimension) that have one value only."""
    kinds = {True: mask.all(-1), False: ~mask.any(-1)}
    return {value for value, rows in kinds.items() if bool(rows.any())}


MASKS = CheckSpec(
    name="perturb",
    run=check_masks,
    step="masks",
    asks="each mask among the arguments of a call in another order, and with a row of one value",
)
