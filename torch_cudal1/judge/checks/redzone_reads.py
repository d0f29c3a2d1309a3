"""Detectors of memory that a candidate may not read or write: what nobody wrote, what lies beside a
tensor; and of idle kernels.

Patterns and seeds are drawn here from the operating system; what came out is compared here. Bands
lie around inputs, around the Allocs of a Program that launches, and on a GPU around what a source
allocates next; on the host a source's own memory has none. Guard pages lie beside inputs and the
Allocs of a Program that launches; a source's parameters and its own memory have none.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Literal, TypeAlias

import torch

from torch_cudal1.ir.program import Call, Launch, Program
from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.numerics import compared, first_two
from torch_cudal1.judge.checks.special_values import with_an_infinity
from torch_cudal1.judge.reference.compare import all_same_bits, same_bits
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.region_reference import Outputs
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.wire.channel import storage_extent
from torch_cudal1.judge.wire.transport import write_payloads
from torch_cudal1.judge.worker.guard_pages import OUT_OF_MEMORY, SIDES, Side
from torch_cudal1.judge.worker.redzones import HOLES, SOLID, expected, expected_fence

__all__ = ["ghost", "guard_band", "guard_page", "poison"]

Content: TypeAlias = int | Literal["noise"]  # what memory is filled with: a byte, or numbers
_BANDED_BYTES = 4 << 30
_GHOSTS, _FILLS = (
    16,
    4,
)  # launches that are left out at most; bytes that are tried before one counts as idle
_BESIDE_NOISE = 0x5A
_SLOT, _EDGE = "instrumented", "at the edge"


def poison(trial: Trial) -> list[Check]:
    """Results do not depend on what fresh memory holds: two secret bytes, then what PyTorch fills
    in (NaN).
    """
    sample, _ = first_two(trial)
    one, other = random.SystemRandom().sample(range(1, 255), 2)
    first, shown = _poisoned(trial, sample, one)
    second, _ = _poisoned(trial, sample, other)
    for position, (a, b) in enumerate(zip(first, second, strict=True)):
        if a is None or b is None or same_bits(a, b):
            continue
        unwritten = int(((_bytes(a) == one) & (_bytes(b) == other)).sum())
        if unwritten:
            detail = f"{unwritten} bytes of output {position} follow what fresh memory was filled with: nothing wrote them"
            return [Check("poison", False, float(unwritten), 0.0, detail)]
        if all_same_bits(first, _poisoned(trial, sample, one)[0]):
            return [
                Check(
                    "poison",
                    False,
                    detail=f"output {position} depends on what fresh memory was filled with",
                )
            ]
    third, _ = _poisoned(trial, sample, None)
    detail = (
        "3 fillings of fresh memory"
        if shown
        else "NaN in fresh memory; it could not be filled with bytes here"
    )
    for outputs, what in ((first, f"bytes {one:#04x}"), (third, "NaN")):
        wrong = [
            position
            for position, comparison in compared(trial, sample, outputs)
            if not comparison.passed
        ]
        if wrong and outputs is third and _wrong_whatever_fills(trial, sample, third, other):
            detail += "; the values under NaN are those of PyTorch's deterministic algorithms, and were not weighed"
            continue
        if wrong:
            return [
                Check(
                    "poison",
                    False,
                    detail=f"output {wrong[0]} is wrong when fresh memory is filled with {what}",
                )
            ]
    sample.forget_exact()
    return [Check("poison", True, 0.0, 0.0, detail)]


def _wrong_whatever_fills(trial: Trial, sample: Sample, filled: Outputs, byte: int) -> bool:
    """Whether NaN is not at fault: PyTorch fills in its deterministic mode only, and there other
    algorithms of its own run.

    A source may not blame them: it chooses what runs.
    """
    if isinstance(trial.candidate, SourceCandidate):
        return False
    return all_same_bits(filled, _poisoned(trial, sample, byte, deterministic=True)[0])


def _poisoned(
    trial: Trial, sample: Sample, byte: int | None, *, deterministic: bool = False
) -> tuple[Outputs, bool]:
    answer, outputs = trial.fetched(
        "poisoned", inputs=sample.name, byte=byte, deterministic=deterministic
    )
    return _complete(trial, outputs), answer.get("control") is True


def _complete(trial: Trial, outputs: Outputs) -> Outputs:
    if len(outputs) != len(trial.subject.outputs):
        raise CandidateFailure(
            "run", f"{len(outputs)} outputs, expected {len(trial.subject.outputs)}", "fresh_output"
        )
    return outputs


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    extent = storage_extent(tensor.shape, tensor.stride())
    return tensor.as_strided((extent,), (1,)).view(torch.uint8)


def guard_band(trial: Trial) -> list[Check]:
    """Inputs between bands of 64 KiB, random ones and then ones of NaN: bands as they were, results
    as without them.
    """
    sample, _ = first_two(trial)
    positions = [
        i for i, role in enumerate(trial.subject.roles) if role == "input" or _is_eager(trial)
    ]
    if sum(trial.subject.specs[i].size_bytes for i in positions) > _BANDED_BYTES:
        return [
            Check(
                "guard_band",
                True,
                detail="not asked: the inputs are too large to lie between bands",
            )
        ]
    seeds = (
        secrets.randbits(40),
        SOLID - len(trial.subject.specs),
    )  # all negative ones mean solid bands
    runs = [_banded(trial, sample, seed, positions, trial.slot) for seed in seeds]
    checks = [found for found, _ in runs if found]
    if checks:
        return checks[:1]
    if not all_same_bits(runs[0][1], runs[1][1]):
        again = _banded(trial, sample, seeds[0], positions, trial.slot)[1]
        if all_same_bits(runs[0][1], again):
            return [
                Check("guard_band", False, detail="a result depends on what lies beside the inputs")
            ]
    detail = f"{len(positions)} inputs between bands"
    if isinstance(trial.candidate, SourceCandidate) or not trial.candidate.program.launches:
        return [Check("guard_band", True, 0.0, 0.0, detail)]
    return [_allocs_banded(trial, sample, positions, detail)]


def _is_eager(trial: Trial) -> bool:
    """Whether parameters may lie elsewhere at each call: neither a module holds them nor a CUDA
    graph their addresses.
    """
    return not isinstance(trial.candidate, SourceCandidate) and trial.candidate.schedule == "eager"


def _allocs_banded(trial: Trial, sample: Sample, positions: Sequence[int], detail: str) -> Check:
    seed = secrets.randbits(40)
    _instrument(trial, seed=seed)
    found, _ = _banded(trial, sample, seed, positions, _SLOT)
    trial.child.call("forget", slot=_SLOT)
    return found or Check("guard_band", True, 0.0, 0.0, f"{detail}, memory of kernels too")


def _banded(
    trial: Trial, sample: Sample, seed: int, positions: Sequence[int], slot: str
) -> tuple[Check | None, Outputs]:
    """A failed check if a band or a fence changed, and the outputs."""
    holes = sorted(
        {_extent_bytes(out) for out in sample.reference.outputs if out is not None} - {0}
    )
    answer, outputs = trial.fetched(
        "banded", slot=slot, inputs=sample.name, seed=seed, positions=list(positions), holes=holes
    )
    outputs = _complete(trial, outputs)
    for index in positions:
        if answer["bands"].get(str(index)) != expected(seed + index):
            return Check(
                "guard_band", False, detail=f"what lies beside input {index} was written to"
            ), outputs
    for number, digest in enumerate(answer["allocated"]):
        if digest != expected(seed + number):
            return Check(
                "guard_band", False, detail=f"what lies beside allocation {number} was written to"
            ), outputs
    if trial.device.type == "cuda" and answer["fences"] != _fences(holes, seed):
        return Check(
            "guard_band", False, detail="what lies beside freshly allocated memory was written to"
        ), outputs
    return None, outputs


def _fences(holes: Sequence[int], seed: int) -> list[str]:
    return [digest for size in holes for digest in [expected_fence(seed, size)] * (HOLES + 1)]


def guard_page(trial: Trial) -> list[Check]:
    """Inputs that end, and then start, where mapped memory does: whoever goes beyond them loses its
    process, or its GPU context.

    Of a Program with machine code its parameters and Allocs too. Operators of PyTorch stay within
    their tensors; see its test.
    """
    source = isinstance(trial.candidate, SourceCandidate)
    if not isinstance(trial.candidate, SourceCandidate) and not _count_launches(
        trial.candidate.program
    ):
        return [Check("guard_page", True, detail="not applicable: no machine code")]
    positions = [i for i, role in enumerate(trial.subject.roles) if role == "input" or not source]
    if sum(trial.subject.specs[i].size_bytes for i in positions) > _BANDED_BYTES:
        return [
            Check(
                "guard_page",
                True,
                detail="not asked: the inputs are too large for memory of their own",
            )
        ]
    sample, _ = first_two(trial)
    slot = trial.slot if source else _SLOT
    for side in SIDES:
        if not source:
            _instrument(trial, side=side)
        unavailable = _moved_to_edge(trial, sample, side, positions)
        if unavailable:
            return [
                Check(
                    "guard_page",
                    True,
                    detail=f"not applicable: no memory with an edge to be had: {unavailable[:200]}",
                )
            ]
        check = _at_edge(trial, sample, side, slot)
        if check is not None:
            return [check]
        trial.child.call("drop", names=[_EDGE])
    if not source:
        trial.child.call("forget", slot=_SLOT)
    what = "inputs" if source else "inputs, and memory of kernels,"
    return [
        Check(
            "guard_page",
            True,
            0.0,
            0.0,
            f"{len(positions)} {what} at the edge of mapped memory, on either side",
        )
    ]


def _moved_to_edge(trial: Trial, sample: Sample, side: Side, positions: Sequence[int]) -> str:
    """Why that cannot be done on this machine, "" if it was. Raises CandidateFailure when the
    process is lost.
    """
    try:
        trial.child.call(
            "edge", inputs=sample.name, name=_EDGE, side=side, positions=list(positions)
        )
    except CandidateFailure as error:
        if not trial.child.usable:
            raise
        return error.found
    return ""


def _at_edge(trial: Trial, sample: Sample, side: Side, slot: str) -> Check | None:
    """Why the candidate may not pass, None if it may. On a GPU the process is of no more use after
    a fault.
    """
    try:
        outputs = trial.call_slot(slot, _EDGE).outputs
    except CandidateFailure as error:
        if (
            slot == _SLOT and OUT_OF_MEMORY in error.found
        ):  # a Program's Allocs are ours to place; a source could say anything
            return Check(
                "guard_page",
                True,
                detail="not asked: the GPU has no room for its memory at an edge",
            )
        trial.child.usable = False
        detail = f"it goes beyond its tensors: with nothing mapped beside them the call failed: {error.found}"
        return Check("guard_page", False, detail=detail)
    wrong = [
        position
        for position, comparison in compared(trial, sample, outputs)
        if not comparison.passed
    ]
    if wrong:
        return Check(
            "guard_page",
            False,
            detail=f"output {wrong[0]} is wrong when inputs lie at the {side} of mapped memory",
        )
    return None


def _extent_bytes(tensor: torch.Tensor) -> int:
    return storage_extent(tensor.shape, tensor.stride()) * tensor.element_size()


def ghost(trial: Trial) -> list[Check]:
    """Each kernel of a Program left out in turn: an output must change, or the kernel is
    decoration.

    What it would have written holds a secret byte then. By chance that may mean the same (a power
    of two to scale with), so a kernel is idle only when nothing changes for other bytes either. Nor
    where it holds large numbers that differ: deep inside a network of many softmaxes the results
    depend on nothing else. Nor where something changes for an infinity in an input: what a rewrite
    takes care of such numbers with has nothing to do for others.
    """
    if isinstance(trial.candidate, SourceCandidate):
        return [Check("ghost", True, detail="not applicable: a source launches its kernels itself")]
    launches = _count_launches(trial.candidate.program)
    if not launches:
        return [Check("ghost", True, detail="not applicable: no machine code")]
    sample, _ = first_two(trial)
    if all(out is None or _is_one_number(out) for out in sample.reference.outputs):
        return [
            Check(
                "ghost",
                True,
                detail="not applicable: the result is one number, whatever is computed on the way",
            )
        ]
    fills = random.SystemRandom().sample(range(1, 255), _FILLS)
    tried = sorted(random.SystemRandom().sample(range(launches), min(launches, _GHOSTS)))
    whole = _without(trial, sample, fills[0], skip=-1)
    for number in tried:
        if _is_idle(trial, sample, fills, number, whole) and not _minds_infinities(
            trial, sample, fills, number
        ):
            return [
                Check(
                    "ghost",
                    False,
                    float(number),
                    detail=f"no output changes when launch {number} is left out",
                )
            ]
    return [
        Check(
            "ghost",
            True,
            float(len(tried)),
            detail=f"{len(tried)} of {launches} launches left out in turn: outputs change",
        )
    ]


def _is_idle(
    trial: Trial, sample: Sample, fills: Sequence[int], number: int, whole: Outputs
) -> bool:
    contents: tuple[Content, ...] = (*fills, "noise")
    return all(
        all_same_bits(whole, _without(trial, sample, content, skip=number)) for content in contents
    )


def _minds_infinities(trial: Trial, sample: Sample, fills: Sequence[int], number: int) -> bool:
    if trial.contract.assume_finite:
        return False
    with closing(with_an_infinity(trial, sample)) as variants:
        return any(
            not _is_idle(trial, one, fills, number, _without(trial, one, fills[0], skip=-1))
            for one in variants
        )


def _is_one_number(tensor: torch.Tensor) -> bool:
    return not tensor.numel() or bool((tensor == tensor.reshape(-1)[0]).all())


def _without(trial: Trial, sample: Sample, content: Content, *, skip: int) -> Outputs:
    """The outputs with one launch left out (-1: none), fresh memory filled so that what it would
    have written differs.
    """
    _instrument(trial, skip=skip, fill=content)
    byte = _BESIDE_NOISE if content == "noise" else content
    _, outputs = trial.fetched(
        "poisoned", slot=_SLOT, inputs=sample.name, byte=byte, deterministic=False
    )
    trial.child.call("forget", slot=_SLOT)
    return _complete(trial, outputs)


def _count_launches(program: Program) -> int:
    nested = sum(_count_launches(step.program) for step in program.steps if isinstance(step, Call))
    return nested + sum(isinstance(step, Launch) for step in program.steps)


def _instrument(
    trial: Trial,
    *,
    skip: int = -1,
    fill: Content | None = None,
    seed: int | None = None,
    side: Side | None = None,
) -> None:
    """The candidate's Program, run by the Python executor of the child, in a slot of its own."""
    assert not isinstance(trial.candidate, SourceCandidate)
    program = trial.candidate.program
    fields: dict[str, Any] = {
        "program": program.to_json(),
        "payloads": write_payloads(program, trial.child.new_file()),
    }
    trial.child.call("instrument", slot=_SLOT, skip=skip, fill=fill, seed=seed, side=side, **fields)
