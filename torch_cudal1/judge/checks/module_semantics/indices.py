"""The checks of indices among the arguments of a call: the first and the last entry of what they index
must be as in eager, and so must the index that losses leave out.

Every other check calls with the integers of the examples, and of a large table these seldom name an
end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    compare_call,
    compare_result,
    eager_refuses,
    get_source_reference,
    report_not_applicable,
    summarise,
    tolerate_error,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.inputs import clone_strided
from torch_cudal1.judge.reference.trial import Trial

__all__ = [
    "INDEX_TYPES",
    "INDICES",
    "LEFT_OUT",
    "check_index_types",
    "check_indices",
    "check_left_out",
]

# `ignore_index` of PyTorch's losses, which marks what is no target.
_LEFT_OUT = -100

# Sizes that are tried as the length of what a tensor indexes.
_MOST_SIZES = 6
# Of a call that the host tries first, since a GPU ends the process for an index out of range.
_MOST_HOST_FLOPS = 2e11


def check_indices(trial: Trial) -> list[CheckResult]:
    """Each integer tensor of the call with a 0, and with the largest index that eager takes, at a
    secret place.
    """
    return _check_each(trial, lambda sample, indices: ([0], list(_list_last(sample, indices))))


def check_left_out(trial: Trial) -> list[CheckResult]:
    """Each integer tensor of the call with a -100 at a secret place, where eager takes it."""
    return _check_each(trial, lambda _, indices: ([_LEFT_OUT],) if indices.dtype.is_signed else ())


def check_index_types(trial: Trial) -> list[CheckResult]:
    """Each 64-bit integer tensor of the call as a 32-bit one: right, or an error."""
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable("dtypes", "the types of a Program's inputs are in its guard")
    first, _ = trial.first_two
    agreements: list[Agreement | None] = []
    for position, role in enumerate(reference.roles):
        if role == "input" and first.inputs[position].dtype == torch.int64:
            question = f"tensor {position} as int32"
            ask = partial(_compare_narrow, trial, first, position, question)
            agreements.append(tolerate_error(trial, question, ask))
            if (each := agreements[-1]) is not None and each.problem:
                break
    return summarise("dtypes", agreements, "no integers of 64 bits")


def _compare_narrow(trial: Trial, base: InputSet, position: int, question: str) -> Agreement:
    def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        narrow = inputs[position].to(torch.int32)
        # A number beyond 32 bits has no such form.
        fits = torch.equal(narrow.to(torch.int64), inputs[position])
        return [narrow if fits and index == position else None for index in range(len(inputs))]

    variant = trial.derive(base, question, make)
    try:
        if eager_refuses(variant):
            return Agreement(question)
        # Not `compare_call`, to which an error is a disagreement.
        return compare_result(trial, variant, trial.run(variant), question)
    finally:
        trial.drop(variant)


def _check_each(
    trial: Trial, list_values: Callable[[InputSet, torch.Tensor], Iterable[Sequence[int]]]
) -> list[CheckResult]:
    """Each integer tensor of the call with one other value: of each list, the first that eager
    takes.
    """
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable("perturb", "the indices of a Program keep to its consumers")
    if trial.device.type != "cpu" and reference.flops > _MOST_HOST_FLOPS:
        return report_not_applicable("perturb", "the host takes too long to try an index")
    first, _ = trial.first_two
    aside = replace(trial, reference=reference.with_unproven_indices())
    agreements: list[Agreement | None] = []
    for position, role in enumerate(reference.roles):
        indices = first.inputs[position]
        if role != "input" or not _is_index(indices):
            continue
        for values in list_values(first, indices):
            agreements.append(_compare_with_index(aside, first, position, values))
            if (each := agreements[-1]) is not None and each.problem:
                return summarise("perturb", agreements, "")
    return summarise("perturb", agreements, "no index that eager takes")


def _is_index(tensor: torch.Tensor) -> bool:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    # An element of an expanded tensor is many elements at once.
    usable = tensor.numel() > 0 and 0 not in tensor.stride()
    return is_integer and tensor.dtype != torch.bool and usable


def _list_last(sample: InputSet, indices: torch.Tensor) -> Iterator[int]:
    """What may be the last index, the largest first: one less than a size of any other tensor."""
    most = torch.iinfo(indices.dtype).max
    sizes = {size for tensor in sample.inputs if tensor is not indices for size in tensor.shape}
    for size in sorted(sizes, reverse=True)[:_MOST_SIZES]:
        if int(indices.max()) < size - 1 <= most:
            yield size - 1


def _compare_with_index(
    trial: Trial, base: InputSet, position: int, values: Sequence[int]
) -> Agreement | None:
    """By the first of the values that eager takes; None where it takes none."""
    for value in values:
        question = f"index {value} in tensor {position}"

        def make(inputs: Sequence[torch.Tensor], value: int = value) -> list[torch.Tensor | None]:
            changed = clone_strided(inputs[position])
            place = tuple(random.SystemRandom().randrange(size) for size in changed.shape)
            changed[place] = value
            return [changed if index == position else None for index in range(len(inputs))]

        variant = trial.derive(base, question, make)
        try:
            if not eager_refuses(variant):
                return compare_call(trial, variant, question)
        finally:
            trial.drop(variant)
    return None


INDICES = CheckSpec(
    name="perturb",
    run=check_indices,
    step="indices",
    asks="each tensor of indices likewise with the first and the last of what it indexes",
)
LEFT_OUT = CheckSpec(
    name="perturb",
    run=check_left_out,
    step="left_out",
    since="standard",
    asks="and with -100, the target that PyTorch's losses leave out, where eager takes it",
)
INDEX_TYPES = CheckSpec(
    name="dtypes",
    run=check_index_types,
    step="index_types",
    since="standard",
    replaces_only=True,
    asks="integers of 64 bits as such of 32; an error is an answer there",
)
