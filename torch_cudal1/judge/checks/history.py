"""Detectors of history: results that depend on earlier calls, on addresses or on a cache; bits that
vary from run to run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch.linalg import vector_norm

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.agreement import Agreement, agreement, summed_up, tried
from torch_cudal1.judge.checks.numerics import first_two
from torch_cudal1.judge.reference.compare import all_same_bits
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.inputs import clone_strided
from torch_cudal1.judge.reference.region_reference import Result
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.wire.channel import storage_extent

__all__ = ["call_history", "repeat"]

_SOAK_S = {"fast": 0.5, "standard": 20.0, "strict": 300.0}
_FLIPS = 4
# how exact a result is, `numerics` has asked on many more numbers; here it need only be this set's
# own
_SLACK = 4.0
_PARTS_OF_RMS = (
    8.0,
    1e-1,
    1e-3,
)  # by how much a single element moves: a cache may look at all, at some, or at roughly all
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_BYTES = 8 << 30  # of outputs that `repeat` reads


def call_history(trial: Trial) -> list[Check]:
    """What was computed before has no influence: other inputs, the same memory with new values, new
    memory with the same values, single elements, overwritten outputs, many calls, a life in another
    process.
    """
    first, _ = first_two(trial)
    found: list[Agreement | None] = []
    for part in (
        _alternated,
        _same_place,
        _new_place,
        _single_elements,
        _scribbled,
        _soaked,
        _aged,
    ):
        found += part(trial, first)
        if any(one is not None and one.problem for one in found):
            break
    return summed_up("call_history", found, "eager refuses every further input set")


def _agreement(trial: Trial, sample: Sample, result: Result, what: str) -> Agreement:
    return agreement(trial, sample, result, what, _SLACK)


def _tried(trial: Trial, sample: Sample, what: str) -> Agreement | None:
    return tried(trial, sample, what, _SLACK)


def _alternated(trial: Trial, first: Sample) -> list[Agreement | None]:
    """A, B, A on a living instance; then inputs that a decision made on A would not fit."""
    other = trial.sibling(first)
    found = [
        _tried(trial, sample, what)
        for sample, what in ((first, "A"), (other, "B after A"), (first, "A after B"))
    ]
    unlike: list[tuple[str, Callable[[], Sample]]] = [
        ("negated", lambda: trial.derive(first, "negated", _of_inputs(trial, _scaled(-1.0)))),
        ("tiny", lambda: trial.derive(first, "tiny", _of_inputs(trial, _scaled(1e-3)))),
        ("shifted", lambda: trial.sibling(first, "shifted")),
    ]
    for what, make in random.SystemRandom().sample(unlike, trial.rounds(len(unlike))):
        found.append(_tried(trial, make(), f"{what} inputs after A"))
    return found


def _same_place(trial: Trial, first: Sample) -> list[Agreement | None]:
    """New values at the addresses of A, then the old ones again."""
    other = trial.sibling(first)
    trial.run(first)
    moving = [
        new if role == "input" else None
        for new, role in zip(other.inputs, trial.subject.roles, strict=True)
    ]
    back = [
        old if role == "input" else None
        for old, role in zip(first.inputs, trial.subject.roles, strict=True)
    ]
    trial.rewrite(first, moving)
    found: list[Agreement | None] = [
        _agreement(trial, other, trial.run(first), "same pointer, new data")
    ]
    trial.rewrite(first, back)
    return [*found, _agreement(trial, first, trial.run(first), "same pointer, old data again")]


def _new_place(trial: Trial, first: Sample) -> list[Agreement | None]:
    moved = trial.derive(first, "new pointer", _of_inputs(trial, clone_strided))
    moved.answers_as(first)
    return [_tried(trial, moved, "new pointer, same data")]


def _single_elements(trial: Trial, first: Sample) -> list[Agreement | None]:
    """One element, the last or one drawn in secret, moves by much, by little, by very little;
    everything else is as before.
    """
    found: list[Agreement | None] = []
    for number in range(trial.rounds(trial.profile.history * len(_PARTS_OF_RMS))):
        part = _PARTS_OF_RMS[number % len(_PARTS_OF_RMS)]
        changed = _one_changed(trial, first, f"element {number}", last=number == 0, part=part)
        if changed is None:
            return found
        trial.run(first)
        found.append(_tried(trial, changed, f"one element moved by {part:g} rms"))
        trial.drop(changed)
        if found[-1] is not None and found[-1].problem:
            break
    return found


def _scribbled(trial: Trial, first: Sample) -> list[Agreement | None]:
    """The caller overwrites what it got: later results are its own."""
    trial.run(first, hold=True)
    trial.child.call("scribble")
    again = trial.run(first)
    trial.child.call("drop", names=[])
    return [_agreement(trial, first, again, "after the caller overwrote its outputs")]


def _soaked(trial: Trial, first: Sample) -> list[Agreement | None]:
    """After many calls, inputs never seen before."""
    other, fresh = trial.sibling(first), trial.sibling(first, "normal", 1)
    budget_s = _SOAK_S[trial.profile.name]
    trial.present(first, other)
    answer = trial.told(
        "soak",
        sets=[first.name, other.name],
        calls=trial.profile.soak,
        budget_s=budget_s,
        deadline_s=budget_s + 600,
    )
    return [_tried(trial, fresh, f"new inputs after {int(answer['calls'])} calls")]


def _aged(trial: Trial, first: Sample) -> list[Agreement | None]:
    """A process that has run nothing before agrees with this one, on inputs that differ from
    earlier ones in the last bit of one element too: where eager's bits change and a fresh process's
    do, but this one's do not, a stored result was handed out.
    """
    if trial.profile.processes < 2:
        return []
    other = trial.sibling(first)
    flips = _flips(trial, first)
    aged = [trial.run(sample).outputs for sample in (first, *flips)]
    with trial.elsewhere() as fresh:
        results = [fresh.run(fresh.hand(sample)) for sample in (*flips[:1], other, first)]
    found = [
        _agreement(trial, sample, result, "in a fresh process")
        for sample, result in zip((other, first), results[-2:], strict=True)
    ]
    stuck = flips and all(all_same_bits(outputs, aged[0]) for outputs in aged[1:])
    if stuck and not all_same_bits(results[0].outputs, aged[0]):
        found.append(
            Agreement(
                "one bit of one element flipped",
                "the result is an earlier call's, a fresh process yields another",
            )
        )
    trial.drop(*flips)
    return list(found)


def _flips(trial: Trial, first: Sample) -> list[Sample]:
    """Sets that differ from A in the last bit of one element, and for which eager's result has
    other bits.
    """
    found: list[Sample] = []
    for number in range(4 * _FLIPS):
        sample = _one_changed(trial, first, f"flip {number}", last=False, part=0.0)
        if sample is None or len(found) == _FLIPS:
            break
        if all_same_bits(sample.reference.outputs, first.reference.outputs):
            trial.drop(sample)
        else:
            found.append(sample)
    return found


def _one_changed(
    trial: Trial, base: Sample, what: str, *, last: bool, part: float
) -> Sample | None:
    """A set that differs in one element of one floating plain input; None without such inputs."""
    chance = random.SystemRandom()
    positions = [
        i
        for i, t in enumerate(base.inputs)
        if trial.subject.roles[i] == "input" and t.dtype.is_floating_point and t.numel()
    ]
    if not positions:
        return None
    position = chance.choice(positions)

    def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        copy = clone_strided(inputs[position])
        index = tuple(size - 1 if last else chance.randrange(size) for size in copy.shape)
        element = copy.as_strided(
            (1,), (1,), sum(i * s for i, s in zip(index, copy.stride(), strict=True))
        )
        if part:
            element += part * _rms(copy) or part
        else:
            element.view(_BITS[copy.element_size()]).add_(1)
        return [copy if i == position else None for i in range(len(inputs))]

    return trial.derive(base, what, make)


def _rms(tensor: torch.Tensor) -> float:
    """Without a copy of the whole in another type."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return float(vector_norm(tensor, dtype=wide)) / math.sqrt(tensor.numel())


def _of_inputs(
    trial: Trial, make: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., list[torch.Tensor | None]]:
    def made(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return [
            make(t) if role == "input" else None
            for t, role in zip(inputs, trial.subject.roles, strict=True)
        ]

    return made


def _scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def scale(tensor: torch.Tensor) -> torch.Tensor:
        copy = clone_strided(tensor)
        if copy.dtype.is_floating_point:
            copy.as_strided((storage_extent(copy.shape, copy.stride()),), (1,)).mul_(factor)
        return copy

    return scale


def repeat(trial: Trial) -> list[Check]:
    """The same inputs give the same bits, run after run; a candidate may vary only where eager
    does.
    """
    first, _ = first_two(trial)
    size = sum(t.numel() * t.element_size() for t in first.reference.outputs if t is not None)
    runs = max(3, min(trial.profile.repeats, _MOST_BYTES // max(size, 1)))
    known = trial.run(first).outputs
    different = sum(not all_same_bits(known, trial.run(first).outputs) for _ in range(runs - 1))
    if not different:
        return [Check("repeat", True, 0.0, 0.0, f"{runs} runs, equal bits")]
    own = [trial.subject.eager(first.inputs).outputs for _ in range(4)]
    varies = any(not all_same_bits(first.reference.outputs, other) for other in own)
    detail = (
        f"bits differ in {different} of {runs - 1} runs, eager's do {'too' if varies else 'not'}"
    )
    return [Check("repeat", varies, float(different), 0.0, detail)]
