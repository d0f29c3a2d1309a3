"""Check `ghost`: a kernel of a Program whose absence changes no output is decoration.

A source launches its kernels itself, so nothing is left out of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.memory.instrumented_program import (
    SLOT,
    Content,
    count_launches,
    instrument,
    require_all_outputs,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.special_values import iter_infinite_variants
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import Outputs
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.wire.tensor_bits import all_same_bits

__all__ = ["GHOST", "check_dead_launches"]

# launches that are left out at most; bytes that are tried before one counts as idle
# Each takes a run of its own.
_GHOSTS, _FILLS = (16, 4)


_BESIDE_NOISE = 0x5A


def check_dead_launches(trial: Trial) -> list[CheckResult]:
    """Each kernel of a Program left out in turn: an output must change, or the kernel is
    decoration.

    The memory that it would have written holds a secret byte instead. A kernel counts as idle when
    no output changes for several bytes, for large numbers that differ, and for an infinity in an
    input.
    """
    if isinstance(trial.candidate, SourceCandidate):
        return [
            CheckResult(
                "ghost", True, detail="not applicable: a source launches its kernels itself"
            )
        ]
    launches = count_launches(trial.candidate.program)
    if not launches:
        return [CheckResult("ghost", True, detail="not applicable: no machine code")]
    sample, _ = trial.first_two
    # Any kernel on the way can be left out of a result that is the same number everywhere.
    if all(out is None or _is_one_number(out) for out in sample.expected.outputs):
        return [
            CheckResult(
                "ghost",
                True,
                detail="not applicable: the result is one number, whatever is computed on the way",
            )
        ]
    # Secret bytes: code cannot prepare for them.
    fills = random.SystemRandom().sample(range(1, 255), _FILLS)
    skipped = sorted(random.SystemRandom().sample(range(launches), min(launches, _GHOSTS)))
    # The complete run has the same fresh memory, so that only the launch makes the difference.
    complete_run = _run_without(trial, sample, fills[0], skip=-1)
    for number in skipped:
        if _is_idle(trial, sample, fills, number, complete_run) and not _is_needed_for_infinities(
            trial, sample, fills, number
        ):
            return [
                CheckResult(
                    "ghost",
                    False,
                    float(number),
                    detail=f"no output changes when launch {number} is left out",
                )
            ]
    return [
        CheckResult(
            "ghost",
            True,
            float(len(skipped)),
            detail=f"{len(skipped)} of {launches} launches left out in turn: outputs change",
        )
    ]


def _is_idle(
    trial: Trial, sample: InputSet, fills: Sequence[int], number: int, complete_run: Outputs
) -> bool:
    # A byte may by chance mean what the kernel would have written, such as a power of two to scale
    # with. In a network of many softmaxes only large numbers that differ show at all: hence noise
    # too.
    contents: tuple[Content, ...] = (*fills, "noise")
    return all(
        all_same_bits(complete_run, _run_without(trial, sample, content, skip=number))
        for content in contents
    )


def _is_needed_for_infinities(
    trial: Trial, sample: InputSet, fills: Sequence[int], number: int
) -> bool:
    # The contract promises finite inputs, so a kernel that only handles infinities does nothing.
    if trial.contract.assume_finite:
        return False
    with closing(iter_infinite_variants(trial, sample)) as variants:
        # A rewrite may launch a kernel only to handle infinities: with finite inputs nothing
        # depends on it.
        return any(
            not _is_idle(
                trial, variant, fills, number, _run_without(trial, variant, fills[0], skip=-1)
            )
            for variant in variants
        )


def _is_one_number(tensor: torch.Tensor) -> bool:
    return not tensor.numel() or bool((tensor == tensor.reshape(-1)[0]).all())


def _run_without(trial: Trial, sample: InputSet, content: Content, *, skip: int) -> Outputs:
    """The outputs with one launch left out (-1: none), fresh memory filled so that what it would
    have written differs.
    """
    # Memory that an earlier launch of the same call has freed may hold what the omitted launch
    # would write (row sizes of the layer before): it is filled within the call as well.
    instrument(trial, skip=skip, fill=content)
    byte = _BESIDE_NOISE if content == "noise" else content
    _, outputs = trial.fetch(
        "poisoned", slot=SLOT, inputs=sample.name, byte=byte, deterministic=False
    )
    # The instrumented copy is unloaded, or its memory would stay in the child.
    trial.child.call("forget", slot=SLOT)
    return require_all_outputs(trial, outputs)


GHOST = CheckSpec(
    name="ghost",
    run=check_dead_launches,
    failure="hack",
    asks=(
        "of a Program: does a result change when one of its kernels is left out, for an "
        "infinity in an input at least"
    ),
)
