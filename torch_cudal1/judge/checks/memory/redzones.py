"""Checks `guard_band` and `guard_page`: memory beside a tensor is neither read nor written.

Redzones lie around inputs, around the Allocs of a Program that launches, and on a GPU around what a
source allocates next; on the host a source's own memory has none. Guard pages lie beside inputs and
the Allocs of a Program that launches; a source's parameters and its own memory have none.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.memory.instrumented_program import (
    SLOT,
    count_launches,
    instrument,
    require_all_outputs,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.output_comparison import compare_outputs
from torch_cudal1.judge.reference.region_reference import Outputs
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.wire.channel import storage_extent
from torch_cudal1.judge.wire.redzone_patterns import (
    GUARD_HOLES,
    SOLID,
    guard_block_digest,
    redzone_digest,
)
from torch_cudal1.judge.wire.tensor_bits import all_same_bits
from torch_cudal1.judge.worker.guard_pages import OUT_OF_MEMORY, SIDES, Side

__all__ = ["GUARD_BAND", "GUARD_PAGE", "check_guard_pages", "check_redzones"]

_MAX_COPIED_BYTES = 4 << 30


_EDGE_SET = "at the edge"


def check_redzones(trial: Trial) -> list[CheckResult]:
    """Inputs between bands of 64 KiB, random ones and then ones of NaN: bands as they were, results
    as without them.
    """
    sample, _ = trial.first_two
    positions = [
        # Parameters stay where a module or a CUDA graph holds them: only an eager Program takes
        # others at each call.
        i
        for i, role in enumerate(trial.reference.roles)
        if role == "input" or _is_eager(trial)
    ]
    # Inputs between bands are copies.
    if sum(trial.reference.specs[i].size_bytes for i in positions) > _MAX_COPIED_BYTES:
        return [
            CheckResult(
                "guard_band",
                True,
                detail="not asked: the inputs are too large to lie between bands",
            )
        ]
    # all negative ones mean solid bands
    seeds = (secrets.randbits(40), SOLID - len(trial.reference.specs))
    runs = [_run_between_redzones(trial, sample, seed, positions, trial.slot) for seed in seeds]
    checks = [failure for failure, _ in runs if failure]
    if checks:
        return checks[:1]
    if not all_same_bits(runs[0][1], runs[1][1]):
        # The candidate may vary from run to run: only results that repeat under the same bands
        # depend on them.
        again = _run_between_redzones(trial, sample, seeds[0], positions, trial.slot)[1]
        if all_same_bits(runs[0][1], again):
            return [
                CheckResult(
                    "guard_band", False, detail="a result depends on what lies beside the inputs"
                )
            ]
    detail = f"{len(positions)} inputs between bands"
    # ATen steps allocate through PyTorch, whose operators stay within their tensors.
    if isinstance(trial.candidate, SourceCandidate) or not trial.candidate.program.launches:
        return [CheckResult("guard_band", True, 0.0, 0.0, detail)]
    return [_check_alloc_redzones(trial, sample, positions, detail)]


def _is_eager(trial: Trial) -> bool:
    """Whether parameters may lie elsewhere at each call: neither a module holds them nor a CUDA
    graph their addresses.
    """
    return not isinstance(trial.candidate, SourceCandidate) and trial.candidate.schedule == "eager"


def _check_alloc_redzones(
    trial: Trial, sample: InputSet, positions: Sequence[int], detail: str
) -> CheckResult:
    seed = secrets.randbits(40)
    instrument(trial, seed=seed)
    failure, _ = _run_between_redzones(trial, sample, seed, positions, SLOT)
    # The instrumented copy is unloaded, or its memory would stay in the child.
    trial.child.call("forget", slot=SLOT)
    return failure or CheckResult("guard_band", True, 0.0, 0.0, f"{detail}, memory of kernels too")


def _run_between_redzones(
    trial: Trial, sample: InputSet, seed: int, positions: Sequence[int], slot: str
) -> tuple[CheckResult | None, Outputs]:
    """A failed check if a band or a fence changed, and the outputs."""
    # Fences lie where allocations of the size of its outputs will be made.
    holes = sorted(
        {_measure_extent_bytes(out) for out in sample.expected.outputs if out is not None} - {0}
    )
    answer, outputs = trial.fetch(
        "banded", slot=slot, inputs=sample.name, seed=seed, positions=list(positions), holes=holes
    )
    outputs = require_all_outputs(trial, outputs)
    for index in positions:
        # Digests, because bands of 64 KiB a tensor would be as large as small inputs.
        if answer["bands"].get(str(index)) != redzone_digest(seed + index):
            return CheckResult(
                "guard_band", False, detail=f"what lies beside input {index} was written to"
            ), outputs
    for number, digest in enumerate(answer["allocated"]):
        if digest != redzone_digest(seed + number):
            return CheckResult(
                "guard_band", False, detail=f"what lies beside allocation {number} was written to"
            ), outputs
    # Fences around what a source allocates exist on a GPU only.
    if trial.device.type == "cuda" and answer["fences"] != _guard_block_digests(holes, seed):
        return CheckResult(
            "guard_band", False, detail="what lies beside freshly allocated memory was written to"
        ), outputs
    return None, outputs


def _guard_block_digests(holes: Sequence[int], seed: int) -> list[str]:
    return [
        digest for size in holes for digest in [guard_block_digest(seed, size)] * (GUARD_HOLES + 1)
    ]


def check_guard_pages(trial: Trial) -> list[CheckResult]:
    """Inputs that end, and then start, where mapped memory does: a candidate that goes beyond
    them loses its process, or its GPU context.

    Of a Program with machine code its parameters and Allocs too. Operators of PyTorch stay within
    their tensors; see its test.
    """
    source = isinstance(trial.candidate, SourceCandidate)
    if not isinstance(trial.candidate, SourceCandidate) and not count_launches(
        trial.candidate.program
    ):
        return [CheckResult("guard_page", True, detail="not applicable: no machine code")]
    # A module holds its parameters itself; a Program gets them at each call.
    positions = [i for i, role in enumerate(trial.reference.roles) if role == "input" or not source]
    if sum(trial.reference.specs[i].size_bytes for i in positions) > _MAX_COPIED_BYTES:
        return [
            CheckResult(
                "guard_page",
                True,
                detail="not asked: the inputs are too large for memory of their own",
            )
        ]
    sample, _ = trial.first_two
    slot = trial.slot if source else SLOT
    rounds: list[tuple[Side, bool]] = [(side, False) for side in SIDES]
    # Of a Program's machine code `fresh_output` asks after the call only.
    if source:
        rounds.append(("end", True))
    for side, is_protected in rounds:
        if not source:
            # A Program's Allocs are placed by the judge, at the same side.
            instrument(trial, side=side)
        refusal = _move_to_edge(trial, sample, side, positions, read_only=is_protected)
        if refusal is not None:
            return [
                CheckResult(
                    "guard_page",
                    True,
                    detail=f"not applicable: no memory with an edge to be had: {refusal.reason[:200]}",
                )
            ]
        check = _run_at_edge(trial, sample, side, slot, read_only=is_protected)
        if check is not None:
            return [check]
        # The next side's set takes its place and its memory.
        trial.child.call("drop", names=[_EDGE_SET])
    if not source:
        trial.child.call("forget", slot=SLOT)
    subject = "inputs" if source else "inputs, and memory of kernels,"
    return [
        CheckResult(
            "guard_page",
            True,
            0.0,
            0.0,
            f"{len(positions)} {subject} at the edge of mapped memory, on either side"
            + (", and in memory that cannot be written to" if source else ""),
        )
    ]


def _move_to_edge(
    trial: Trial, sample: InputSet, side: Side, positions: Sequence[int], *, read_only: bool
) -> Refusal | None:
    """Copy the inputs to the edge of mapped memory, or say why this machine cannot. Raises
    CandidateFailure when the process is lost.
    """
    try:
        trial.child.call(
            "edge",
            inputs=sample.name,
            name=_EDGE_SET,
            side=side,
            positions=list(positions),
            read_only=read_only,
        )
    except CandidateFailure as error:
        # A machine may have no memory with an edge; a lost process is another matter.
        if not trial.child.usable:
            raise
        return Refusal(error.found)
    return None


def _run_at_edge(
    trial: Trial, sample: InputSet, side: Side, slot: str, *, read_only: bool
) -> CheckResult | None:
    """Call the candidate on inputs at the edge: a check that ends the question, None if the result
    is right. Raises CandidateFailure where it ran out of time.
    """
    try:
        outputs = trial.call_slot(slot, _EDGE_SET).outputs
    except CandidateFailure as error:
        # A candidate whose time was up here was once told that it goes beyond its tensors.
        if error.is_late:
            raise
        # the judge places a Program's Allocs itself; a source could say anything
        # A driver without memory for an edge was once taken for a stray access of the candidate.
        if slot == SLOT and OUT_OF_MEMORY in error.found:
            return CheckResult(
                "guard_page",
                True,
                detail="not asked: the GPU has no room for its memory at an edge",
            )
        # After a fault on the GPU every further call in that context fails.
        trial.child.usable = False
        fault = (
            "it writes to its inputs, if only for a moment: in memory that cannot be written to"
            if read_only
            else "it goes beyond its tensors: with nothing mapped beside them"
        )
        detail = f"{fault} the call failed: {error.found}"
        return CheckResult("guard_page", False, detail=detail)
    # A wrong result without a fault counts as well.
    wrong = [
        position
        for position, comparison in compare_outputs(trial, sample, outputs)
        if not comparison.passed
    ]
    if wrong:
        return CheckResult(
            "guard_page",
            False,
            detail=f"output {wrong[0]} is wrong when inputs lie at the {side} of mapped memory",
        )
    return None


def _measure_extent_bytes(tensor: torch.Tensor) -> int:
    return storage_extent(tensor.shape, tensor.stride()) * tensor.element_size()


GUARD_BAND = CheckSpec(
    name="guard_band",
    run=check_redzones,
    asks=("does a result depend on what lies beside the inputs, or is anything written there"),
)
GUARD_PAGE = CheckSpec(
    name="guard_page",
    run=check_guard_pages,
    asks=(
        "inputs that end, and then start, where mapped memory does, on a CPU and on a GPU: "
        "is anything read or written beyond them, used or not. Of a source inputs in memory that "
        "cannot be written to, of a Program's machine code its parameters and the memory of its "
        "results too"
    ),
)
