"""Check of 32-bit indices: one call with more than 2^31 elements, where there is memory for it.

Values are compared roughly, with eager's and not with float64's: an index that wraps leaves
elements unwritten, reads others, or ends the process. `numerics` and `shapes` test how exact
results are.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.gpu_lock import lock_gpu
from torch_cudal1.device.specs import CHECK_RATES
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    disagree_on_error,
    get_source_reference,
    report_not_applicable,
    summarise,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.compare import is_grossly_equal
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import Outputs
from torch_cudal1.judge.reference.source_reference import SourceReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.sandbox.limits import read_free_bytes
from torch_cudal1.judge.wire.tensor_bits import same_bits

__all__ = ["INT64_INDEXING", "check_int64_indexing"]

ELEMENTS = 2**31
_DRAWN_PIECES = 14  # pieces of each output, besides the first and the last
# what a call may hold at once, over its inputs and outputs; one that needs more says so, and is not
# asked
_COPIES_HELD = 2
_DEADLINE_S = 300.0


def check_int64_indexing(trial: Trial) -> list[CheckResult]:
    """`shapes`: a first dimension so long that an input has more than 2^31 elements. A Program's
    shapes are guarded.
    """
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable(
            "shapes", "a Program is never called with more elements than it was judged with"
        )
    sample, _ = trial.first_two
    large_shapes = _list_grown_shapes(reference)
    if not large_shapes:
        return report_not_applicable("shapes", "no plain input has a first dimension")
    # Fourteen judges on one GPU of 80 GiB left 23 to 33 GiB: the call was not made, and no cheat
    # caught.
    # Without the lock two judges would find the same memory free.
    with lock_gpu(reference.device, "int64 indexing"):
        return _compare_large(trial, reference, sample, large_shapes)


def _compare_large(
    trial: Trial, reference: SourceReference, sample: InputSet, large_shapes: list[list[Any]]
) -> list[CheckResult]:
    if refusal := _find_obstacle(reference, sample, large_shapes):
        return report_not_applicable("shapes", f"{large_shapes[0][1]} {refusal}")
    fields = {
        "grown": large_shapes,
        "seed": secrets.randbits(40),
        "pieces": _draw_places(),
        "deadline_s": _DEADLINE_S,
    }
    # Eager first: where it refuses the size, a candidate may as well.
    expected = reference.run_int64_pieces(sample.inputs, fields)
    if expected is None:
        return report_not_applicable(
            "shapes", f"eager refuses {large_shapes[0][1]}, or has no memory for it"
        )
    question = f"shape {large_shapes[0][1]}"
    try:
        agreement = disagree_on_error(
            trial, question, lambda: _compare_pieces(trial, sample, fields, expected, question)
        )
    except CandidateFailure as error:
        # it says so and computes nothing: that is no wrong result
        if error.detector == "resource" and trial.child.usable:
            return report_not_applicable("shapes", f"{question}: {error.found[:200]}")
        raise
    return summarise("shapes", [agreement], "")


def _draw_places() -> list[float]:
    """Both ends and places between, drawn in secret."""
    # An index that wraps goes wrong past the middle, a tail that is left out at the end.
    return [0.0, 1.0, *(random.SystemRandom().random() for _ in range(_DRAWN_PIECES))]


def _list_grown_shapes(reference: SourceReference) -> list[list[Any]]:
    """Position, new shape and bound of the plain inputs that share the first one's first dimension."""
    plain = [
        (i, spec)
        for i, (spec, role) in enumerate(zip(reference.specs, reference.roles, strict=True))
        if role == "input"
    ]
    first = next((spec for _, spec in plain if spec.shape and spec.numel), None)
    if first is None:
        return []
    batch = first.shape[0]
    # One row more, so that the count of elements is above 2^31 and not at it.
    size = ELEMENTS // (first.numel // batch) + 1
    return [
        [i, [size, *spec.shape[1:]], reference.facts.bounds.get(i)]
        for i, spec in plain
        if spec.shape and spec.shape[0] == batch
    ]


def _find_obstacle(
    reference: SourceReference, sample: InputSet, large_shapes: Sequence[Sequence[Any]]
) -> Refusal | None:
    """Why this machine cannot do it. Outputs and work grow as inputs do, at most."""
    times = large_shapes[0][1][0] / reference.specs[large_shapes[0][0]].shape[0]
    input_bytes = sum(
        math.prod(shape) * sample.inputs[i].element_size() for i, shape, _ in large_shapes
    )
    output_bytes = (
        sum(out.numel() * out.element_size() for out in sample.expected.outputs if out is not None)
        * times
    )
    # Memory that is free now: the lock keeps other judges of this machine from counting on it too.
    needed, free = (
        int(_COPIES_HELD * (input_bytes + output_bytes)),
        read_free_bytes(reference.device),
    )
    if needed > free:
        return Refusal(f"may need {needed >> 30} GiB, {free >> 30} GiB are free")
    # A rate is an estimate, hence the factor.
    seconds = reference.facts.flops * times / CHECK_RATES[reference.device.type].flops_per_s
    return Refusal(f"may take {seconds:.0f} s") if 4 * seconds > _DEADLINE_S else None


def _compare_pieces(
    trial: Trial,
    sample: InputSet,
    fields: Mapping[str, Any],
    expected: tuple[Outputs, list[Any]],
    question: str,
) -> Agreement:
    answer, pieces = trial.fetch("vast", inputs=sample.name, **fields)
    # The process may list fewer outputs than eager has: the count of pieces is compared below.
    for position, (actual, eager) in enumerate(zip(answer["facts"], expected[1], strict=False)):
        for name in ("dtype", "shape", "strides"):
            if (actual or {}).get(name) != (eager or {}).get(name):
                return Agreement(
                    question,
                    f"output {position}: {name} {(actual or {}).get(name)}, eager's {(eager or {}).get(name)}",
                )
    if len(pieces) != len(expected[0]):
        return Agreement(question, f"{len(pieces)} pieces, expected {len(expected[0])}")
    pairs = zip(pieces, expected[0], strict=True)
    wrong = sum(not _is_alike(actual, eager) for actual, eager in pairs)
    return Agreement(
        question, f"{wrong} of {len(pieces)} pieces of its outputs are not eager's" if wrong else ""
    )


def _is_alike(actual: torch.Tensor | None, eager: torch.Tensor | None) -> bool:
    if actual is None or eager is None:
        return actual is eager
    # Exactness is `numerics`' question; wrapped indices are off by whole values.
    return same_bits(actual, eager) or (
        eager.dtype.is_floating_point and is_grossly_equal(actual, eager)
    )


INT64_INDEXING = CheckSpec(
    name="shapes",
    run=check_int64_indexing,
    step="vast_shapes",
    since="strict",
    replaces_only=True,
    asks="more than 2^31 elements, where there is memory for them",
)
