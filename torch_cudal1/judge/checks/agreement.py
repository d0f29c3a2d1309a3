"""Does the candidate agree with eager on one more input set: form, structure, values; and how
checks sum up many such answers.

It draws nothing and decides nothing by itself: a check says which sets are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.reference.compare import compare, is_nearer, same_numbers, unit_roundoff
from torch_cudal1.judge.reference.error_statistics import root_mean_square
from torch_cudal1.judge.reference.float64 import measure_input_sensitivity
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.output_comparison import compare_outputs
from torch_cudal1.judge.reference.region_reference import Reference, ReferenceFailure, Result
from torch_cudal1.judge.reference.source_reference import SourceReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = [
    "Agreement",
    "Attempt",
    "compare_call",
    "compare_result",
    "disagree_on_error",
    "eager_refuses",
    "eager_repeats",
    "find_form_problem",
    "find_sharing_problem",
    "get_source_reference",
    "report_not_applicable",
    "require_unwritten",
    "summarise",
    "tolerate_error",
]


# Of the terms: what rounding them and adding them up leaves.
_NOISE_ROUND_OFFS = 16.0
# By how much eager's own result may vary and be the same still: less than a small step moves it.
_SAME_ROUND_OFFS = 16.0


@dataclass(frozen=True)
class Agreement:
    """A comparison by name, what differs ("" if nothing), and the worst error ratio with its limit."""

    question: str
    problem: str = ""
    ratio: float | None = None
    limit: float | None = None


# How a question is asked that the candidate may answer with an error: `disagree_on_error` or
# `tolerate_error`.
Attempt: TypeAlias = "Callable[[Trial, str, Callable[[], Agreement]], Agreement]"


def compare_call(
    trial: Trial, sample: InputSet, question: str, slack: float = 1.0
) -> Agreement | None:
    """The candidate beside eager on a set; None when eager itself refuses it. Raises
    CandidateFailure when the child is lost.
    """
    # What eager refuses the candidate need not take.
    if eager_refuses(sample):
        return None
    agreement = disagree_on_error(
        trial, question, lambda: compare_result(trial, sample, trial.run(sample), question, slack)
    )
    # Float64 results of large sets add up over many questions.
    trial.free_memory_if_short()
    return agreement


def require_unwritten(trial: Trial, sample: InputSet, agreement: Agreement) -> Agreement:
    """`agreement` about a call on a set, unless that call wrote to its arguments."""
    place = "" if agreement.problem else _find_written(trial, sample)
    if not place:
        return agreement
    return Agreement(agreement.question, f"the call wrote to the memory of {place}")


def _find_written(trial: Trial, sample: InputSet) -> str:
    """The first argument that is not what it was; "" for none. Parameters are other checks'."""
    changed = trial.find_changed_inputs(sample, parameters=False)
    if changed is None:
        return "an input that cannot be read"
    return f"input {changed[0]}" if changed else ""


def disagree_on_error(trial: Trial, question: str, ask: Callable[[], Agreement]) -> Agreement:
    """An error of the candidate is a disagreement. Raises CandidateFailure when the child is lost, a
    limit is exceeded, or its answer breaks the protocol.
    """
    try:
        return ask()
    except CandidateFailure as error:
        # A lost process, spent limits and a broken protocol have detectors of their own.
        if not trial.child.usable or error.detector in ("resource", "protocol"):
            raise
        return Agreement(question, f"eager accepts it, the candidate: {error.found}")


def tolerate_error(trial: Trial, question: str, ask: Callable[[], Agreement]) -> Agreement:
    """An error of the candidate is no disagreement: the question records it. Raises CandidateFailure as
    `disagree_on_error` does.
    """
    try:
        return ask()
    except CandidateFailure as error:
        # A lost process, spent limits and a broken protocol have detectors of their own.
        if not trial.child.usable or error.detector in ("resource", "protocol"):
            raise
        return Agreement(f"{question} refused ({error.found[:80]})")


def eager_refuses(sample: InputSet) -> bool:
    """Whether eager raises on these inputs."""
    try:
        return sample.expected is None
    except ReferenceFailure:
        return True


def eager_repeats(reference: Reference, turns: Sequence[InputSet], update: str = "") -> bool:
    """Whether one instance of the reference yields its own results again when it is called on these
    sets in turn, the states of which it is given by `update`. Asked when a candidate did not.
    """
    if not isinstance(reference, SourceReference):
        return True
    results = reference.run_in_turn([turn.inputs for turn in turns], update)
    return results is not None and all(
        _is_about_the_same(now, expected)
        for turn, outputs in zip(turns, results, strict=True)
        for now, expected in zip(outputs, turn.expected.outputs, strict=True)
    )


def _is_about_the_same(now: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    # Eager's own results may vary by rounding.
    if now is None or expected is None or same_numbers(now, expected):
        return (now is None) == (expected is None)
    if now.shape != expected.shape or not expected.dtype.is_floating_point:
        return False
    difference = now.double() - expected.double()
    allowed = _SAME_ROUND_OFFS * unit_roundoff(expected.dtype)
    return root_mean_square(difference) <= allowed * root_mean_square(expected)


def compare_result(
    trial: Trial, sample: InputSet, result: Result, question: str, slack: float = 1.0
) -> Agreement:
    """Form, structure and values of a result against eager's on the same set; `slack`: see
    `compare`.
    """
    expected = sample.expected
    # Form before values: comparing tensors of another shape would raise.
    if problem := find_form_problem(result, expected):
        return Agreement(question, problem)
    worst: tuple[float, float] | None = None
    for position, comparison in compare_outputs(trial, sample, result.outputs, slack):
        out, eager = result.outputs[position], expected.outputs[position]
        # Where the candidate is nearer to float64 than eager is, a difference from eager is no
        # fault.
        if (
            comparison.void
            and out is not None
            and eager is not None
            and not _is_nearer(sample, position, out, eager)
            and not _is_rounding_noise(sample, position, out, eager)
        ):
            # float64 took another way (dropout's draws): eager is what is left
            comparison = compare(
                out,
                eager,
                None,
                precision=trial.contract.precision,
                longest=trial.facts.longest_reduction,
            )
        if not comparison.passed:
            return Agreement(
                question,
                f"output {position}: {comparison.detail or 'differs'}",
                comparison.ratio,
                comparison.limit,
            )
        if (
            comparison.ratio is not None
            and comparison.limit is not None
            and (worst is None or comparison.ratio > worst[0])
        ):
            worst = (comparison.ratio, comparison.limit)
    return Agreement(question, "", *(worst or (None, None)))


def _is_rounding_noise(
    sample: InputSet, position: int, out: torch.Tensor, eager: torch.Tensor
) -> bool:
    """Whether both results are off by no more than the rounding of terms that cancel to nothing, as
    the gradient of a softmax under a constant cotangent.
    """
    exact = sample.get_exact(position)
    if exact is None or not out.dtype.is_floating_point or out.shape != exact.shape:
        return False
    # Elements of an expanded input move one by one: together they cancel as the terms do.
    inputs = [tensor.contiguous() for tensor in sample.inputs]
    assert not isinstance(sample.exact, Refusal)
    moved = measure_input_sensitivity(sample.oracle, inputs, sample.exact)[position]
    if moved is None:
        return False
    allowed_error = _NOISE_ROUND_OFFS * unit_roundoff(out.dtype) * root_mean_square(moved)
    errors = (root_mean_square(result.double() - exact) for result in (out, eager))
    # `<=` refuses NaN; what draws numbers is off by all of its size.
    return all(error <= allowed_error for error in errors)


def _is_nearer(sample: InputSet, position: int, out: torch.Tensor, eager: torch.Tensor) -> bool:
    exact = sample.get_exact(position)
    return exact is not None and out.shape == exact.shape and is_nearer(out, eager, exact)


def find_form_problem(result: Result, expected: Result) -> str:
    """Where dtype, shape, strides, device or the structure of the result is not eager's; "" if
    nowhere.
    """
    # Tuples, lists and dictionaries of the same tensors are different answers to a caller.
    if expected.tree and result.tree != expected.tree:
        return f"the result is {result.tree[:200]}, eager's {expected.tree[:200]}"
    for position, (actual, eager) in enumerate(zip(result.facts, expected.facts, strict=True)):
        if (actual is None) != (eager is None):
            return f"output {position}: {'no tensor' if actual is None else 'a tensor'} where eager yields {'one' if eager else 'none'}"
        if actual is None or eager is None:
            continue
        # Strides too: a caller may hand the result to code that reads memory in order.
        for name in ("dtype", "shape", "strides", "device"):
            if actual[name] != eager[name]:
                return f"output {position}: {name} {actual[name]}, eager's {eager[name]}"
    return ""


def find_sharing_problem(result: Result, expected: Result, *, may_copy: bool = False) -> str:
    """Where an output lies in the memory of an input or of another output and eager's does not, or
    the other way round unless it `may_copy`; "" if nowhere.
    """
    for position, (actual, eager) in enumerate(zip(result.facts, expected.facts, strict=True)):
        if actual is None or eager is None:
            continue
        for name in ("inputs", "outputs"):
            # A caller that writes into its result must not change anything else.
            if extra := set(actual[name]) - set(eager[name]):
                return (
                    f"output {position} shares memory with {name} {sorted(extra)}, eager's does not"
                )
            # A caller that writes into eager's view reaches the input, as some programs mean to.
            if (lost := set(eager[name]) - set(actual[name])) and not may_copy:
                return (
                    f"output {position} is a copy, eager's shares memory with {name} {sorted(lost)}"
                )
    return ""


def summarise(
    name: str, agreements: Sequence[Agreement | None], nothing_to_ask: str
) -> list[CheckResult]:
    """One check for all comparisons: the first disagreement, else the worst ratio.
    `nothing_to_ask`: why nothing could be asked.
    """
    answered = [each for each in agreements if each is not None]
    for each in answered:
        if each.problem:
            return [
                CheckResult(name, False, each.ratio, each.limit, f"{each.question}: {each.problem}")
            ]
    if not answered:
        return report_not_applicable(name, nothing_to_ask)
    # Refusals and questions of form have no ratio.
    measured = [each for each in answered if each.ratio is not None]
    worst = max(measured, key=lambda each: each.ratio or 0.0, default=Agreement(""))
    refusals = len(agreements) - len(answered)
    detail = ", ".join(each.question for each in answered[:12]) + (
        f" and {len(answered) - 12} more" if len(answered) > 12 else ""
    )
    return [
        CheckResult(
            name,
            True,
            worst.ratio,
            worst.limit,
            detail + (f"; eager refuses {refusals} others" if refusals else ""),
        )
    ]


def report_not_applicable(name: str, why: str) -> list[CheckResult]:
    """A passed check that says why there was nothing to test."""
    return [CheckResult(name, True, detail=f"not applicable: {why}")]


def get_source_reference(trial: Trial) -> SourceReference | None:
    """The reference source, None when a Program is on trial."""
    return trial.reference if isinstance(trial.reference, SourceReference) else None
