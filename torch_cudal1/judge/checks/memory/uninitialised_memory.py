"""Check `poison`: results may not depend on what fresh memory holds.

Fill bytes are drawn here from the operating system; what came out is compared here.
"""

from __future__ import annotations

import random

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.memory.instrumented_program import require_all_outputs
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.output_comparison import compare_outputs
from torch_cudal1.judge.reference.region_reference import Outputs
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.wire.channel import storage_extent
from torch_cudal1.judge.wire.tensor_bits import all_same_bits, same_bits

__all__ = ["POISON", "check_uninitialised_memory"]


def check_uninitialised_memory(trial: Trial) -> list[CheckResult]:
    """Results do not depend on what fresh memory holds: two secret bytes, then what PyTorch fills
    in (NaN).
    """
    sample, _ = trial.first_two
    # Secret, or a kernel could skip what holds a known pattern. Two, because a right result may
    # hold one of them.
    first_byte, second_byte = random.SystemRandom().sample(range(1, 255), 2)
    first, shown = _run_with_fill(trial, sample, first_byte)
    second, _ = _run_with_fill(trial, sample, second_byte)
    for position, (a, b) in enumerate(zip(first, second, strict=True)):
        if a is None or b is None or same_bits(a, b):
            continue
        # A byte that follows both fillings was never written.
        unwritten = int(((_view_bytes(a) == first_byte) & (_view_bytes(b) == second_byte)).sum())
        if unwritten:
            detail = f"{unwritten} bytes of output {position} follow what fresh memory was filled with: nothing wrote them"
            return [CheckResult("poison", False, float(unwritten), 0.0, detail)]
        # The candidate may vary by itself: only a result that repeats under the same filling
        # depends on it.
        if all_same_bits(first, _run_with_fill(trial, sample, first_byte)[0]):
            return [
                CheckResult(
                    "poison",
                    False,
                    detail=f"output {position} depends on what fresh memory was filled with",
                )
            ]
    # NaN shows where a garbage value takes part in arithmetic and small bytes would vanish in it.
    third, _ = _run_with_fill(trial, sample, None)
    detail = (
        "3 fillings of fresh memory"
        if shown
        else "NaN in fresh memory; it could not be filled with bytes here"
    )
    for outputs, content in ((first, f"bytes {first_byte:#04x}"), (third, "NaN")):
        wrong = [
            position
            for position, comparison in compare_outputs(trial, sample, outputs)
            if not comparison.passed
        ]
        # PyTorch fills with NaN in its deterministic mode only, in which its other algorithms have
        # other errors.
        if (
            wrong
            and outputs is third
            and _is_wrong_whatever_fills(trial, sample, third, second_byte)
        ):
            detail += "; the values under NaN are those of PyTorch's deterministic algorithms, and were not weighed"
            continue
        if wrong:
            return [
                CheckResult(
                    "poison",
                    False,
                    detail=f"output {wrong[0]} is wrong when fresh memory is filled with {content}",
                )
            ]
    # Float64 results are the largest tensors here.
    sample.forget_exact()
    return [CheckResult("poison", True, 0.0, 0.0, detail)]


def _is_wrong_whatever_fills(trial: Trial, sample: InputSet, filled: Outputs, byte: int) -> bool:
    """Whether the values are wrong in PyTorch's deterministic mode whatever memory is filled
    with, so that NaN is not at fault.
    """
    # A source chooses itself which of PyTorch's algorithms run, so it cannot blame them.
    if isinstance(trial.candidate, SourceCandidate):
        return False
    return all_same_bits(filled, _run_with_fill(trial, sample, byte, deterministic=True)[0])


def _run_with_fill(
    trial: Trial, sample: InputSet, byte: int | None, *, deterministic: bool = False
) -> tuple[Outputs, bool]:
    answer, outputs = trial.fetch(
        "poisoned", inputs=sample.name, byte=byte, deterministic=deterministic
    )
    return require_all_outputs(trial, outputs), answer.get("control") is True


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    extent = storage_extent(tensor.shape, tensor.stride())
    # As bytes, gaps between strides included, whatever the dtype.
    return tensor.as_strided((extent,), (1,)).view(torch.uint8)


POISON = CheckSpec(
    name="poison",
    run=check_uninitialised_memory,
    asks="is every byte of a result written, whatever fresh memory was filled with",
)
