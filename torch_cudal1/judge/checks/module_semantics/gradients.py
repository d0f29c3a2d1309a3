"""Check `grad`: gradients of all floating inputs and parameters, for sources.

A backward pass of a Program is a region of its own, judged as one. How losses develop over many
steps is `loss_curve`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    compare_result,
    disagree_on_error,
    eager_refuses,
    get_source_reference,
    report_not_applicable,
    summarise,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.wire.call_spec import RunMode

__all__ = ["GRAD", "check_gradients"]


def check_gradients(trial: Trial) -> list[CheckResult]:
    """Gradients of all floating inputs and parameters: there where eager has them, and right
    against eager and float64, for random, expanded and strided cotangents, round after round, in
    float64; gradients of gradients are right or refused.
    """
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable(
            "grad", "a backward pass is a region of its own, judged as one"
        )
    if not trial.gradients:
        return report_not_applicable("grad", "gradients are not claimed")
    try:
        backward = reference.with_gradients(RunMode(gradients=True))
        # Without a gradient in eager a candidate has nothing to reproduce.
        if not any(backward.outputs[len(reference.outputs) :]):
            return report_not_applicable("grad", "eager has no gradient here")
    except ReferenceFailure:
        return report_not_applicable("grad", "eager has no gradient here")
    agreements = [disagree_on_error(trial, "gradients", partial(_compare_rounds, trial, backward))]
    if not agreements[-1].problem and "parameter" in reference.roles:
        agreements += _compare_fixed_inputs(trial, reference)
    # A first backward that is wrong needs no further questions.
    if not agreements[-1].problem and trial.profile.gradient_rounds > 1:
        agreements += _compare_further(trial, reference)
    return summarise("grad", agreements, "")


def _compare_fixed_inputs(trial: Trial, reference: SourceReference) -> list[Agreement]:
    """The gradients of parameters where no input wants one, as in a model's first layer."""
    question = "gradients of parameters alone"
    try:
        backward = reference.with_gradients(RunMode(gradients=True, fixed_inputs=True))
        if not any(backward.outputs[len(reference.outputs) :]):
            return []
    except ReferenceFailure:
        return []
    ask = partial(_compare_one_round, trial, backward, question)
    return [disagree_on_error(trial, question, ask)]


def _compare_rounds(trial: Trial, reference: SourceReference) -> Agreement:
    """The same instance, round after round; from the second on with cotangents as `sum` and slices
    make them.
    """
    # A slot of its own: asking for gradients must not change the instance that the other checks
    # call.
    aside = trial.load_in_slot(reference, "candidate gradients")
    first = aside.draw("normal")
    agreement = _compare_gradients(aside, first, "gradients")
    if not agreement.problem:
        # A graph that is kept alive, or a view that is cached, works in the first round only.
        agreement = _compare_gradients(
            aside, aside.derive_sibling(first), "gradients of a second call"
        )
    # `sum` hands on a cotangent that is one number expanded, a slice one with steps: kernels that
    # assume contiguous ones read other memory.
    for name, odd in (
        (("expanded", _expand), ("strided", _copy_with_gaps))
        if aside.profile.gradient_rounds > 1
        else ()
    ):
        if agreement.problem:
            break
        sample = aside.derive(first, f"{name} cotangents", partial(_replace_cotangents, aside, odd))
        agreement = _compare_gradients(aside, sample, f"{name} cotangents")
    aside.drop(*list(aside.samples.values()))
    return agreement


def _compare_gradients(trial: Trial, sample: InputSet, question: str) -> Agreement:
    result = trial.run(sample)
    for position, (actual, eager) in enumerate(
        zip(result.outputs, sample.expected.outputs, strict=True)
    ):
        if actual is None and eager is not None and not bool(eager.any()):
            # no gradient means zero
            result.outputs[position], result.facts[position] = (
                eager,
                sample.expected.facts[position],
            )
        elif actual is not None and eager is None and not bool(actual.any()):
            result.outputs[position], result.facts[position] = None, None
        elif actual is None and eager is not None:
            return Agreement(
                question, f"{_name_gradient(trial, position)} has no gradient, in eager it has"
            )
    for actual_facts, eager_facts in zip(result.facts, sample.expected.facts, strict=True):
        if actual_facts is not None and eager_facts is not None:
            actual_facts["strides"] = eager_facts["strides"]  # autograd promises none for gradients
    return compare_result(trial, sample, result, question)


def _name_gradient(trial: Trial, position: int) -> str:
    return f"output {position} (results come first, then the gradients of parameters and inputs)"


def _replace_cotangents(
    trial: Trial, odd: Any, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    reference = trial.reference
    assert isinstance(reference, SourceReference)
    # Only cotangents change, so eager's results stay comparable with the first set's.
    start = reference.cotangents
    return [odd(t) if i >= start else None for i, t in enumerate(inputs)]


def _expand(tensor: torch.Tensor) -> torch.Tensor:
    return (
        # All strides 0, as the backward of `sum` makes it.
        tensor.reshape(-1)[:1].clone().as_strided(tensor.shape, (0,) * tensor.dim())
        if tensor.numel()
        else tensor.clone()
    )


def _copy_with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dim():
        return tensor.clone()
    wide = torch.zeros(
        *tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device
    )
    # Every second element of wider rows, as the backward of a slice makes it.
    view = wide[..., ::2]
    return view.copy_(tensor)


def _compare_further(trial: Trial, reference: SourceReference) -> list[Agreement]:
    """In train mode; in float64; gradients of gradients."""
    wide = tuple(
        replace(spec, dtype="float64") if spec.torch_dtype.is_floating_point else spec
        for spec in reference.specs
    )
    variants = (
        (
            "gradients in train mode",
            reference.in_way(RunMode(training=True)),
            RunMode(training=True, gradients=True),
        ),
        (
            "gradients in float64",
            reference.in_way(RunMode(dtype="float64")).with_specs(wide),
            RunMode(dtype="float64", gradients=True),
        ),
        ("gradients of gradients", reference, RunMode(gradients=True, double_backward=True)),
    )
    agreements: list[Agreement] = []
    for question, plain, way in variants:
        try:
            # What eager has no gradient for in this mode is no question to the candidate.
            backward = plain.with_gradients(way)
            if not any(backward.outputs):
                continue
        except ReferenceFailure:
            continue
        try:
            agreements.append(_compare_one_round(trial, backward, question))
        except CandidateFailure as error:
            if not trial.child.usable:
                raise
            # an error is an honest answer there: no caller is given a wrong number
            refusal = way.double_backward
            agreements.append(
                Agreement(
                    f"{question} refused" if refusal else question, "" if refusal else error.found
                )
            )
        if agreements[-1].problem:
            break
    return agreements


def _compare_one_round(trial: Trial, reference: SourceReference, question: str) -> Agreement:
    # A module of its own: casts and train mode would change the instance of the other checks.
    aside = trial.load_in_slot(reference, f"candidate {question}")
    sample = aside.draw("normal")
    # There is nothing to reproduce where eager raises.
    if eager_refuses(sample):
        return Agreement(question)
    agreement = _compare_gradients(aside, sample, question)
    aside.drop(sample)
    return agreement


GRAD = CheckSpec(
    name="grad",
    run=check_gradients,
    knobs=("gradient_rounds",),
    replaces_only=True,
    asks=(
        "gradients of all inputs and parameters: there where eager has them, right against "
        "float64, and again in a second round; of parameters alone, where no input wants one; "
        "the gradients that a backward is handed stay as they are"
    ),
)
