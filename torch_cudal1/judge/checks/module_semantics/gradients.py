"""Check `grad`: gradients of all floating inputs and parameters, for sources.

A backward pass of a Program is a region of its own, judged as one. How losses develop over many
steps is `loss_curve`'s.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    Attempt,
    compare_call,
    compare_result,
    disagree_on_error,
    eager_refuses,
    get_source_reference,
    report_not_applicable,
    require_unwritten,
    summarise,
    tolerate_error,
)
from torch_cudal1.judge.checks.layouts import list_shapes
from torch_cudal1.judge.checks.module_semantics.scalars import list_scalars
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.inputs import clone_strided
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.wire.call_spec import RunMode

__all__ = ["GRAD", "check_gradients", "compare_gradients_in"]

# Unknown to every candidate: by it the halves of inputs are drawn.
_SECRET = secrets.token_hex(16)
# Of the inputs, beside the usual ones, at other sizes; below that, any growth.
_MOST_GROWTH = 1.1
_SMALL_BYTES = 1 << 24


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
    # Gradients are enabled wherever nobody disables them, whoever wants one.
    agreements = _compare_plain(trial, reference)
    if not trial.gradients:
        return summarise("grad", agreements, "gradients are not claimed")
    try:
        backward = reference.with_gradients(RunMode(gradients=True))
        # Without a gradient in eager a candidate has nothing to reproduce.
        is_asked = any(backward.outputs[len(reference.outputs) :])
    except ReferenceFailure:
        is_asked = False
    if not is_asked or any(each.problem for each in agreements):
        return summarise("grad", agreements, "eager has no gradient here")
    agreements.append(
        disagree_on_error(trial, "gradients", partial(_compare_rounds, trial, backward))
    )
    # A first backward that is wrong needs no further questions.
    further = [_compare_further] if trial.profile.gradient_rounds > 1 else []
    for ask in (_compare_ways, _compare_elsewhere, *further):
        if not any(each.problem for each in agreements):
            agreements += ask(trial, reference)
    return summarise("grad", agreements, "")


def _compare_plain(trial: Trial, reference: SourceReference) -> list[Agreement]:
    """A call by a caller who sets nothing: with gradients enabled, and wanted of no input."""
    question = "a call with gradients enabled"
    plain = reference.in_way(RunMode(plain=True))
    try:
        if not any(plain.outputs):
            return []
    except ReferenceFailure:
        return []
    # Who wants no gradients may disable them where that is all that works.
    ask = disagree_on_error if trial.gradients else tolerate_error
    return [ask(trial, question, partial(_compare_plain_call, trial, plain, question))]


def _compare_plain_call(trial: Trial, reference: SourceReference, question: str) -> Agreement:
    aside = trial.load_in_slot(reference, f"candidate {question}")
    sample = aside.draw("normal")
    agreement = compare_call(aside, sample, question) or Agreement(question)
    aside.drop(sample)
    return agreement


def _compare_ways(trial: Trial, reference: SourceReference) -> list[Agreement]:
    """The gradients of some inputs, parameters or outputs, and those of a step of training."""
    agreements: list[Agreement] = []
    for question, way in _list_ways(reference):
        agreements += compare_gradients_in(trial, reference, question, way)
        if any(each.problem for each in agreements):
            return agreements
    # Where these raise, as a step that was compiled does, no caller is given a wrong number.
    question, way = "gradients of a second backward", RunMode(gradients=True, retained=True)
    agreements += compare_gradients_in(trial, reference, question, way, tolerate_error)
    # Of several results one may lie in the memory of another.
    if len(reference.outputs) == 1:
        agreements += compare_gradients_in(
            trial,
            reference,
            "gradients of a result that its caller doubles in place",
            RunMode(gradients=True, doubled="copied"),
            tolerate_error,
            RunMode(gradients=True, doubled="in place"),
        )
    return agreements


def _compare_elsewhere(trial: Trial, reference: SourceReference) -> list[Agreement]:
    """Gradients at another size, at yet another one in train mode, and with another scalar among the
    arguments of the call and of the constructor; each is the first, in a secret order, that eager
    has gradients for.
    """
    generator = random.Random(f"{_SECRET} {reference.key} elsewhere")
    # Gradients take several times the memory of the inputs, so no size is much larger than usual.
    most_bytes = max(_SMALL_BYTES, _MOST_GROWTH * _count_bytes(reference.specs))
    shapes = [
        (name, specs)
        for name, specs in list_shapes(reference)
        # Of nothing the gradient is nothing, whoever computes it.
        if _count_bytes(specs) <= most_bytes and all(spec.numel for spec in specs)
    ]
    calls = list(list_scalars(reference.form.call))
    constructors = list(list_scalars(reference.form.init))
    training = RunMode(training=True)
    variants: list[list[tuple[str, SourceReference]]] = [
        [(f"gradients at {name}", reference.with_specs(specs)) for name, specs in shapes],
        [
            (f"gradients in train mode at {name}", reference.in_way(training).with_specs(specs))
            for name, specs in shapes
        ],
        [(f"gradients with {name}", reference.with_call(call)) for name, call in calls],
        [(f"gradients with {name}", reference.with_init(init)) for name, init in constructors],
    ]
    agreements: list[Agreement] = []
    for kind in variants:
        for question, other in generator.sample(kind, len(kind)):
            way = replace(other.way, gradients=True)
            answered = compare_gradients_in(trial, other, question, way)
            agreements += answered
            if answered:
                break
        if any(each.problem for each in agreements):
            break
    return agreements


def _count_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.size_bytes for spec in specs)


def compare_gradients_in(
    trial: Trial,
    reference: SourceReference,
    question: str,
    way: RunMode,
    ask: Attempt = disagree_on_error,
    candidate_way: RunMode | None = None,
) -> list[Agreement]:
    """The gradients that are asked in a way, beside those of a reference whose results have the
    same form; nothing where eager has none. `candidate_way`: the candidate's, where it is not the
    reference's.
    """
    try:
        backward = reference.with_gradients(way)
        if not any(backward.outputs[len(reference.outputs) :]):
            return []
    except ReferenceFailure:
        return []
    compare = partial(_compare_one_round, trial, backward, question, candidate_way)
    return [ask(trial, question, compare)]


def _list_ways(reference: SourceReference) -> Iterator[tuple[str, RunMode]]:
    """What else callers want gradients of. Halves are drawn in secret, and the other half is asked
    too.
    """
    floating = [i for i, spec in enumerate(reference.specs) if spec.torch_dtype.is_floating_point]
    inputs = tuple(i for i in floating if reference.roles[i] == "input")
    parameters = tuple(i for i in floating if reference.roles[i] == "parameter")
    yield "gradients in a step of training", RunMode(gradients=True, step=True)
    # As where the batches of a step do not fit at once.
    added = RunMode(gradients=True, step=True, accumulate=True)
    yield "gradients added to those of an earlier backward", added
    if parameters:
        # As in a model's first layer.
        way = RunMode(gradients=True, gradient_places=parameters)
        yield "gradients of parameters alone", way
    if parameters and inputs:
        # As in a layer that is frozen.
        way = RunMode(gradients=True, gradient_places=inputs)
        yield "gradients of inputs alone", way
    # The same for every candidate of a reference, so that its own results serve them all.
    generator = random.Random(f"{_SECRET} {reference.key}")
    if len(inputs) > 1:
        halves = zip(_halve(inputs, generator), _halve(parameters, generator), strict=True)
        for some_inputs, some_parameters in halves:
            way = RunMode(gradients=True, gradient_places=(*some_parameters, *some_inputs))
            yield "gradients of some inputs", way
    if len(reference.outputs) > 1:
        for half in _halve(range(len(reference.outputs)), generator):
            yield "gradients of some outputs", RunMode(gradients=True, used=half)


def _halve(
    places: Sequence[int], generator: random.Random
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    drawn = generator.sample(places, len(places) // 2)
    return tuple(sorted(drawn)), tuple(place for place in places if place not in drawn)


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
    if not agreement.problem:
        agreement = _compare_where_zero(aside, first)
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


def _compare_where_zero(trial: Trial, first: InputSet) -> Agreement:
    """What is finite in eager is finite where a row of each input is zero, as padding is: the slope
    of a root there is infinite. Which of several slopes a kernel takes at a kink is its own matter.
    """
    question = "gradients where a row is zero"
    sample = trial.derive(first, question, partial(_zero_a_row, trial))
    if eager_refuses(sample):
        return Agreement(question)
    result = trial.run(sample)
    problem = ""
    for position, (actual, eager) in enumerate(
        zip(result.outputs, sample.expected.outputs, strict=True)
    ):
        if actual is None or eager is None or actual.shape != eager.shape:
            continue
        if lost_count := int((eager.isfinite() & ~actual.isfinite()).sum()):
            problem = f"{_name_gradient(trial, position)} is not finite in {lost_count} of {actual.numel()} places, in eager it is"
            break
    trial.drop(sample)
    return Agreement(question, problem)


def _zero_a_row(trial: Trial, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The arguments of the call with one entry of the first dimension zero, the same one of all that
    are as long; cotangents stay.
    """
    reference, place_in_row = trial.reference, random.SystemRandom().random()
    assert isinstance(reference, SourceReference)
    values: list[torch.Tensor | None] = [None] * len(inputs)
    for place, (tensor, role) in enumerate(
        zip(inputs[: reference.cotangents], reference.roles, strict=False)
    ):
        if role == "input" and tensor.dtype.is_floating_point and tensor.numel() and tensor.dim():
            copy = clone_strided(tensor)
            copy[int(place_in_row * copy.shape[0])] = 0.0
            values[place] = copy
    return values


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
    agreement = compare_result(trial, sample, result, question)
    return require_unwritten(trial, sample, agreement)


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


def _compare_one_round(
    trial: Trial, reference: SourceReference, question: str, way: RunMode | None = None
) -> Agreement:
    # A module of its own: casts and train mode would change the instance of the other checks.
    aside = trial.load_in_slot(reference, f"candidate {question}", way)
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
        "float64, and again in a second round; in a step of training, where inputs are no leaves "
        "and another call comes before `backward`, also added to earlier ones; of parameters alone, of inputs alone, of some "
        "inputs, of some outputs; finite where a row of each input is zero; at another size, in eval and in train mode, and with another "
        "number among the arguments of the call or of the constructor; of a second backward over "
        "one graph and of a result that its caller changes in place, which may raise but not be wrong; the result of "
        "a call with gradients enabled that wants none (with `--inference` too); the gradients "
        "that a backward is handed, and the activations that a step of training hands in, stay as "
        "they are"
    ),
)
