"""Check of outputs that are not fresh: their form, and the memory they lie in."""

from __future__ import annotations

from collections.abc import Sequence

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import find_sharing_problem
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import Outputs
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.wire.tensor_bits import same_bits

__all__ = ["FRESH_OUTPUT", "check_fresh_outputs"]


def check_fresh_outputs(trial: Trial) -> list[CheckResult]:
    """Outputs have exactly eager's type, form and strides, memory of their own, and do not change
    while the caller holds them; inputs are not written to.
    """
    first, second = trial.first_two
    other = trial.derive_sibling(first)
    checks = [_check_form(trial, first), _check_inputs(trial, (first, second))]
    # Calls of other instances could not share a buffer with these.
    # one living instance
    turns = [(first, other)[turn % 2] for turn in range(trial.profile.held + 1)]
    held_results = [trial.run(sample, hold=True) for sample in turns]
    shared = [
        i
        for result in held_results
        for i, facts in enumerate(result.facts)
        if facts and facts["held"]
    ]
    # One buffer for all calls shows here: an earlier result changes under its holder.
    changed = [
        i
        for turn, then in enumerate(held_results[:-1])
        for i in _find_changed(then.outputs, trial.reread(turn))
    ]
    detail = ""
    if shared:
        detail = f"output {shared[0]} shares memory with an earlier call's output"
    elif changed:
        detail = f"output {changed[0]} changed while the caller held it"
    # Frees the outputs that the child has held.
    trial.child.call("drop", names=[])
    return [
        *checks,
        CheckResult(
            "fresh_output",
            not detail,
            detail=detail or f"{trial.profile.held} outputs held over later calls",
        ),
    ]


def _find_changed(then: Outputs, now: Outputs) -> list[int]:
    return [
        i for i, (old, new) in enumerate(zip(then, now, strict=True)) if not same_bits(old, new)
    ]


def _check_form(trial: Trial, sample: InputSet) -> CheckResult:
    expected_facts, trees = (
        sample.expected.facts,
        (trial.results[sample.name].tree, sample.expected.tree),
    )
    # A Program's result is flat; only a module chooses how it nests its outputs.
    if trees[0] != trees[1] and isinstance(trial.candidate, SourceCandidate):
        return CheckResult(
            "fresh_output",
            False,
            detail=f"the result is {trees[0][:200]}, eager's {trees[1][:200]}",
        )
    for position, (actual, expected) in enumerate(
        zip(trial.results[sample.name].facts, expected_facts, strict=True)
    ):
        if actual is None or expected is None:
            continue
        where = f"output {position}"
        for name in ("dtype", "shape", "strides", "device"):
            if actual[name] != expected[name]:
                return CheckResult(
                    "fresh_output",
                    False,
                    detail=f"{where}: {name} {actual[name]}, eager's {expected[name]}",
                )
        # A subclass can put off its work until it is compared, and an empty storage until it is
        # read.
        if not actual["exact_type"] or not actual["storage"]:
            return CheckResult(
                "fresh_output", False, detail=f"{where} is no plain tensor with its own bytes"
            )
    # A Program's result is a value: whether it is a copy is its own affair.
    may_copy = not isinstance(trial.candidate, SourceCandidate)
    problem = find_sharing_problem(trial.results[sample.name], sample.expected, may_copy=may_copy)
    if problem:
        return CheckResult("fresh_output", False, detail=problem)
    return CheckResult("fresh_output", True, detail="form, strides and memory as eager's")


def _check_inputs(trial: Trial, samples: Sequence[InputSet]) -> CheckResult:
    for sample in samples:
        changed = trial.find_changed_inputs(sample)
        # None, an unusable answer, is no proof that nothing was written.
        if changed != []:
            return CheckResult("fresh_output", False, detail=f"inputs {changed} were written to")
    return CheckResult("fresh_output", True, detail="inputs unchanged")


FRESH_OUTPUT = CheckSpec(
    name="fresh_output",
    run=check_fresh_outputs,
    failure="hack",
    knobs=("held",),
    asks=(
        "type, form, strides and nesting of the result; memory of its own; inputs left "
        "alone; results that stay as they are while you hold them"
    ),
)
