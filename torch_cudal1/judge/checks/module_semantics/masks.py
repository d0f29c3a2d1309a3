"""The check of masks among the arguments of a call: another mask of the same shape must matter as in
eager.

Every other check calls with the masks of the examples, since a mask that is drawn at random may
leave a row without any key.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    compare_call,
    get_source_reference,
    report_not_applicable,
    summarise,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.inputs import clone_strided
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["MASKS", "check_masks", "shuffle_mask"]

_DRAWS = 5


def check_masks(trial: Trial) -> list[CheckResult]:
    """Each mask of the call with its elements in another order, which is a secret."""
    if get_source_reference(trial) is None:
        return report_not_applicable("perturb", "a Program is judged on masks of its own")
    first, _ = trial.first_two
    agreements: list[Agreement | None] = []
    for position, role in enumerate(trial.reference.roles):
        mask = first.inputs[position]
        if role == "input" and mask.dtype == torch.bool and mask.numel() > 1:
            agreements.append(_compare_with_mask(trial, first, position))
            if (each := agreements[-1]) is not None and each.problem:
                break
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
    asks="each mask among the arguments of a call in another order",
)
