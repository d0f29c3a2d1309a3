"""Does the candidate agree with eager on one more input set: form, structure, values; and how
detectors sum up many such answers.

It draws nothing and decides nothing by itself: a detector says which sets are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.numerics import compared
from torch_cudal1.judge.reference.compare import compare, is_nearer
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.region_reference import ReferenceFailure, Result
from torch_cudal1.judge.reference.source_reference import PairSubject
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = [
    "Agreement",
    "agreement",
    "attempted",
    "attempted_or_refused",
    "form_problem",
    "not_applicable",
    "pair_of",
    "refused",
    "summed_up",
    "tried",
]


@dataclass(frozen=True)
class Agreement:
    """What was asked, what differs ("" if nothing), and the worst error ratio with its limit."""

    what: str
    problem: str = ""
    ratio: float | None = None
    limit: float | None = None


def tried(trial: Trial, sample: Sample, what: str, slack: float = 1.0) -> Agreement | None:
    """The candidate beside eager on a set; None when eager itself refuses it. Raises
    CandidateFailure when the child is lost.
    """
    if refused(sample):
        return None
    found = attempted(trial, what, lambda: agreement(trial, sample, trial.run(sample), what, slack))
    trial.ease()
    return found


def attempted(trial: Trial, what: str, ask: Callable[[], Agreement]) -> Agreement:
    """An error of the candidate is a disagreement; a lost child is not ours to explain. Raises
    CandidateFailure for that.
    """
    try:
        return ask()
    except CandidateFailure as error:
        if not trial.child.usable or error.detector in ("resource", "protocol"):
            raise
        return Agreement(what, f"eager accepts it, the candidate: {error.found}")


def attempted_or_refused(trial: Trial, what: str, ask: Callable[[], Agreement]) -> Agreement:
    """An error of the candidate is a refusal, which is told. Raises CandidateFailure as `attempted`
    does.
    """
    try:
        return ask()
    except CandidateFailure as error:
        if not trial.child.usable or error.detector in ("resource", "protocol"):
            raise
        return Agreement(f"{what} refused ({error.found[:80]})")


def refused(sample: Sample) -> bool:
    """Whether eager raises on these inputs."""
    try:
        return sample.reference is None
    except ReferenceFailure:
        return True


def agreement(
    trial: Trial, sample: Sample, result: Result, what: str, slack: float = 1.0
) -> Agreement:
    """Form, structure and values of a result against eager's on the same set; `slack`: see
    `compare`.
    """
    expected = sample.reference
    if problem := form_problem(result, expected):
        return Agreement(what, problem)
    worst: tuple[float, float] | None = None
    for position, found in compared(trial, sample, result.outputs, slack):
        out, eager = result.outputs[position], expected.outputs[position]
        if (
            found.void
            and out is not None
            and eager is not None
            and not _nearer(sample, position, out, eager)
        ):
            # float64 took another way (dropout's draws): eager is what is left
            found = compare(
                out,
                eager,
                None,
                precision=trial.contract.precision,
                longest=trial.facts.longest_reduction,
            )
        if not found.passed:
            return Agreement(
                what, f"output {position}: {found.detail or 'differs'}", found.ratio, found.limit
            )
        if (
            found.ratio is not None
            and found.limit is not None
            and (worst is None or found.ratio > worst[0])
        ):
            worst = (found.ratio, found.limit)
    return Agreement(what, "", *(worst or (None, None)))


def _nearer(sample: Sample, position: int, out: torch.Tensor, eager: torch.Tensor) -> bool:
    exact = sample.exact_at(position)
    return exact is not None and out.shape == exact.shape and is_nearer(out, eager, exact)


def form_problem(found: Result, expected: Result) -> str:
    """Where dtype, shape, strides, device or the structure of the result is not eager's; "" if
    nowhere.
    """
    if expected.tree and found.tree != expected.tree:
        return f"the result is {found.tree[:200]}, eager's {expected.tree[:200]}"
    for position, (ours, theirs) in enumerate(zip(found.facts, expected.facts, strict=True)):
        if (ours is None) != (theirs is None):
            return f"output {position}: {'no tensor' if ours is None else 'a tensor'} where eager yields {'one' if theirs else 'none'}"
        if ours is None or theirs is None:
            continue
        for name in ("dtype", "shape", "strides", "device"):
            if ours[name] != theirs[name]:
                return f"output {position}: {name} {ours[name]}, eager's {theirs[name]}"
    return ""


def summed_up(name: str, found: Sequence[Agreement | None], none: str) -> list[Check]:
    """One check for all that was asked: the first disagreement, else the worst ratio. `none`: why
    nothing could be asked.
    """
    asked = [one for one in found if one is not None]
    for one in asked:
        if one.problem:
            return [Check(name, False, one.ratio, one.limit, f"{one.what}: {one.problem}")]
    if not asked:
        return not_applicable(name, none)
    measured = [one for one in asked if one.ratio is not None]
    worst = max(measured, key=lambda one: one.ratio or 0.0, default=Agreement(""))
    refusals = len(found) - len(asked)
    detail = ", ".join(one.what for one in asked[:12]) + (
        f" and {len(asked) - 12} more" if len(asked) > 12 else ""
    )
    return [
        Check(
            name,
            True,
            worst.ratio,
            worst.limit,
            detail + (f"; eager refuses {refusals} others" if refusals else ""),
        )
    ]


def not_applicable(name: str, why: str) -> list[Check]:
    """A passed check that says why there was nothing to test."""
    return [Check(name, True, detail=f"not applicable: {why}")]


def pair_of(trial: Trial) -> PairSubject | None:
    """The reference source, None when a Program is on trial."""
    return trial.subject if isinstance(trial.subject, PairSubject) else None
