"""Detector of outputs that are not fresh: their form, and the memory they lie in."""

from __future__ import annotations

from collections.abc import Sequence

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.numerics import first_two
from torch_cudal1.judge.reference.compare import same_bits
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.region_reference import Outputs
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["fresh_output"]


def fresh_output(trial: Trial) -> list[Check]:
    """Exact type, form and strides of eager's outputs; memory of its own; an output in the caller's
    hands never changes.
    """
    first, second = first_two(trial)
    other = trial.sibling(first)
    checks = [_form(trial, first), _inputs_kept(trial, (first, second))]
    turns = [
        (first, other)[turn % 2] for turn in range(trial.profile.held + 1)
    ]  # one living instance
    held = [trial.run(sample, hold=True) for sample in turns]
    shared = [
        i for result in held for i, facts in enumerate(result.facts) if facts and facts["held"]
    ]
    changed = [
        i for turn, then in enumerate(held[:-1]) for i in _changed(then.outputs, trial.reread(turn))
    ]
    detail = ""
    if shared:
        detail = f"output {shared[0]} shares memory with an earlier call's output"
    elif changed:
        detail = f"output {changed[0]} changed while the caller held it"
    trial.child.call("drop", names=[])
    return [
        *checks,
        Check(
            "fresh_output",
            not detail,
            detail=detail or f"{trial.profile.held} outputs held over later calls",
        ),
    ]


def _changed(then: Outputs, now: Outputs) -> list[int]:
    return [
        i for i, (old, new) in enumerate(zip(then, now, strict=True)) if not same_bits(old, new)
    ]


def _form(trial: Trial, sample: Sample) -> Check:
    reference, trees = (
        sample.reference.facts,
        (trial.results[sample.name].tree, sample.reference.tree),
    )
    if trees[0] != trees[1] and isinstance(trial.candidate, SourceCandidate):
        return Check(
            "fresh_output",
            False,
            detail=f"the result is {trees[0][:200]}, eager's {trees[1][:200]}",
        )
    for position, (found, expected) in enumerate(
        zip(trial.results[sample.name].facts, reference, strict=True)
    ):
        if found is None or expected is None:
            continue
        where = f"output {position}"
        for name in ("dtype", "shape", "strides", "device"):
            if found[name] != expected[name]:
                return Check(
                    "fresh_output",
                    False,
                    detail=f"{where}: {name} {found[name]}, eager's {expected[name]}",
                )
        if not found["exact_type"] or not found["storage"]:
            return Check(
                "fresh_output", False, detail=f"{where} is no plain tensor with its own bytes"
            )
        for name in ("inputs", "outputs"):
            if extra := set(found[name]) - set(expected[name]):
                return Check(
                    "fresh_output",
                    False,
                    detail=f"{where} shares memory with {name} {sorted(extra)}, eager's does not",
                )
            if (lost := set(expected[name]) - set(found[name])) and isinstance(
                trial.candidate, SourceCandidate
            ):
                return Check(
                    "fresh_output",
                    False,
                    detail=f"{where} is a copy, eager's shares memory with {name} {sorted(lost)}",
                )
    return Check("fresh_output", True, detail="form, strides and memory as eager's")


def _inputs_kept(trial: Trial, samples: Sequence[Sample]) -> Check:
    for sample in samples:
        changed = trial.changed_inputs(sample)
        if changed != []:
            return Check("fresh_output", False, detail=f"inputs {changed} were written to")
    return Check("fresh_output", True, detail="inputs unchanged")
