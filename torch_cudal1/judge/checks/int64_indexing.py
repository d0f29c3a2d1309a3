"""Detector of 32-bit indices: one call with more than 2^31 elements, where the memory for it is
there.

Values are compared roughly, with eager's and not with float64's: an index that wraps leaves
elements unwritten, reads others, or ends the process. How exact results are, `numerics` and
`shapes` have asked.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_cudal1.device.gpu_lock import exclusive
from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    attempted,
    not_applicable,
    pair_of,
    summed_up,
)
from torch_cudal1.judge.checks.numerics import first_two
from torch_cudal1.judge.reference.compare import grossly_equal, same_bits
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.region_reference import Outputs
from torch_cudal1.judge.reference.source_reference import PairSubject
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.sandbox.limits import available_bytes

__all__ = ["vast_shapes"]

ELEMENTS = 2**31
_DRAWN = 14  # pieces of each output, besides the first and the last
# what a call may hold at once, over its inputs and outputs; one that needs more says so, and is not
# asked
_HELD = 2
_DEADLINE_S = 300.0


def vast_shapes(trial: Trial) -> list[Check]:
    """`shapes`: a first dimension so long that an input has more than 2^31 elements. A Program's
    shapes are guarded.
    """
    subject = pair_of(trial)
    if subject is None:
        return not_applicable(
            "shapes", "a Program is never called with more elements than it was judged with"
        )
    sample, _ = first_two(trial)
    grown = _grown(subject)
    if not grown:
        return not_applicable("shapes", "no plain input has a first dimension")
    with exclusive(subject.device, "vast"):  # or two judges would find the same memory free
        return _asked(trial, subject, sample, grown)


def _asked(
    trial: Trial, subject: PairSubject, sample: Sample, grown: list[list[Any]]
) -> list[Check]:
    if why := _too_much(subject, sample, grown):
        return not_applicable("shapes", f"{grown[0][1]} {why}")
    fields = {
        "grown": grown,
        "seed": secrets.randbits(40),
        "pieces": _places(),
        "deadline_s": _DEADLINE_S,
    }
    expected = subject.vast(sample.inputs, fields)
    if expected is None:
        return not_applicable("shapes", f"eager refuses {grown[0][1]}, or has no memory for it")
    what = f"shape {grown[0][1]}"
    try:
        found = attempted(trial, what, lambda: _agreement(trial, sample, fields, expected, what))
    except CandidateFailure as error:
        if (
            error.detector == "resource" and trial.child.usable
        ):  # it says so and computes nothing: that is no wrong result
            return not_applicable("shapes", f"{what}: {error.found[:200]}")
        raise
    return summed_up("shapes", [found], "")


def _places() -> list[float]:
    """Both ends and places between, drawn in secret."""
    return [0.0, 1.0, *(random.SystemRandom().random() for _ in range(_DRAWN))]


def _grown(subject: PairSubject) -> list[list[Any]]:
    """Position, new shape and bound of the plain inputs that share the first one's first dimension."""
    plain = [
        (i, spec)
        for i, (spec, role) in enumerate(zip(subject.specs, subject.roles, strict=True))
        if role == "input"
    ]
    first = next((spec for _, spec in plain if spec.shape and spec.numel), None)
    if first is None:
        return []
    batch = first.shape[0]
    size = ELEMENTS // (first.numel // batch) + 1
    return [
        [i, [size, *spec.shape[1:]], subject.facts.bounds.get(i)]
        for i, spec in plain
        if spec.shape and spec.shape[0] == batch
    ]


def _too_much(subject: PairSubject, sample: Sample, grown: Sequence[Sequence[Any]]) -> str:
    """Why this machine cannot do it, "" if it can. Outputs and work grow as inputs do, at most."""
    times = grown[0][1][0] / subject.specs[grown[0][0]].shape[0]
    made = sum(math.prod(shape) * sample.inputs[i].element_size() for i, shape, _ in grown)
    yielded = (
        sum(out.numel() * out.element_size() for out in sample.reference.outputs if out is not None)
        * times
    )
    needed, free = int(_HELD * (made + yielded)), _free_bytes(subject.device)
    if needed > free:
        return f"may need {needed >> 30} GiB, {free >> 30} GiB are free"
    seconds = subject.facts.flops * times / (1e13 if subject.device.type == "cuda" else 1e10)
    return f"may take {seconds:.0f} s" if 4 * seconds > _DEADLINE_S else ""


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def _agreement(
    trial: Trial,
    sample: Sample,
    fields: Mapping[str, Any],
    expected: tuple[Outputs, list[Any]],
    what: str,
) -> Agreement:
    answer, found = trial.fetched("vast", inputs=sample.name, **fields)
    for position, (ours, theirs) in enumerate(zip(answer["facts"], expected[1], strict=False)):
        for name in ("dtype", "shape", "strides"):
            if (ours or {}).get(name) != (theirs or {}).get(name):
                return Agreement(
                    what,
                    f"output {position}: {name} {(ours or {}).get(name)}, eager's {(theirs or {}).get(name)}",
                )
    if len(found) != len(expected[0]):
        return Agreement(what, f"{len(found)} pieces, expected {len(expected[0])}")
    pairs = zip(found, expected[0], strict=True)
    wrong = sum(not _alike(ours, theirs) for ours, theirs in pairs)
    return Agreement(
        what, f"{wrong} of {len(found)} pieces of its outputs are not eager's" if wrong else ""
    )


def _alike(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return same_bits(ours, theirs) or (
        theirs.dtype.is_floating_point and grossly_equal(ours, theirs)
    )
