"""Detectors of module semantics, for sources: state dict, train and eval, autocast, inference mode,
copies, devices, gradients.

A Program is a pure function of one mode: its region was captured in it and its guard holds it, and
our own module owns the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    agreement,
    attempted,
    not_applicable,
    pair_of,
    refused,
    summed_up,
    tried,
)
from torch_cudal1.judge.checks.numerics import first_two
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.region_reference import Outputs, ReferenceFailure
from torch_cudal1.judge.reference.source_reference import PairSubject
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.worker.modules import Way

__all__ = ["grad", "guard_domain", "mode", "state_dict", "train_mode"]

_OWNED = "a Program is a pure function in the mode of its region; names, copies and modes belong to our own module"


def state_dict(trial: Trial) -> list[Check]:
    """The constructed module's state has the reference's names, dtypes and shapes, in the
    reference's order.
    """
    subject = pair_of(trial)
    if subject is None:
        return not_applicable("mode", _OWNED)
    problem = _state_problem(subject, trial.state)
    return [
        Check(
            "mode",
            not problem,
            detail=problem or f"{len(subject.form.names)} tensors of state as the reference's",
        )
    ]


def _state_problem(subject: PairSubject, state: Sequence[Any]) -> str:
    expected = {
        name: [spec.dtype, list(spec.shape)]
        for name, spec in zip(subject.form.names, subject.specs, strict=False)
    }
    found = {str(name): [str(dtype), list(shape)] for name, dtype, shape in state}
    if missing := [name for name in expected if name not in found]:
        return f"the state dict lacks {missing}"
    if extra := [name for name in found if name not in expected]:
        return f"the state dict has {extra}, the reference's has not"
    return next(
        (
            f"{name} is {found[name]}, the reference's {expected[name]}"
            for name in expected
            if found[name] != expected[name]
        ),
        "",
    )


def train_mode(trial: Trial) -> list[Check]:
    """In train mode results and buffers are the reference's: at the state that the constructor
    leaves, and at the one that a step of the reference left. A pair is judged in eval mode
    otherwise, and its user's module trains unless told not to.
    """
    subject = pair_of(trial)
    if subject is None:
        return not_applicable("mode", _OWNED)
    if not trial.gradients:
        return not_applicable("mode", "training is not claimed")
    way = Way(training=True)
    other = subject.in_way(way)
    try:
        if not any(other.outputs):
            return not_applicable("mode", "the reference yields no tensor in train mode")
    except ReferenceFailure as error:
        return not_applicable("mode", f"eager refuses train mode: {error.found[:100]}")
    return summed_up(
        "mode", [attempted(trial, "train mode", partial(_trained, trial, other, way))], ""
    )


def _trained(trial: Trial, subject: PairSubject, way: Way) -> Agreement:
    aside = trial.aside(subject, "candidate train mode", way)
    first = aside.draw("normal")
    found = tried(aside, first, "train mode") or Agreement("train mode")
    if not found.problem and not refused(first) and "buffer" in subject.roles:
        stepped = aside.derive(
            first, "a step later", partial(_stepped, subject, first.reference.outputs)
        )
        found = tried(aside, stepped, "train mode, a step later") or found
    aside.drop(*list(aside.samples.values()))
    return found


def _stepped(
    subject: PairSubject, outputs: Outputs, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The buffers that a call in train mode left, which come last among its outputs, in place of
    those that it was given.
    """
    places = [place for place, role in enumerate(subject.roles) if role == "buffer"]
    after = dict(zip(places, outputs[len(outputs) - len(places) :], strict=True))
    return [after.get(place) for place in range(len(inputs))]


def mode(trial: Trial) -> list[Check]:
    """Late changes of the state; copies of a used module; autocast; inference mode."""
    subject = pair_of(trial)
    if subject is None:
        return not_applicable("mode", _OWNED)
    found: list[Agreement | None] = []
    for part in (_late_state, _copies, _ways):
        found += part(trial, subject)
        if any(one is not None and one.problem for one in found):
            break
    return summed_up("mode", found, "")


def _late_state(trial: Trial, subject: PairSubject) -> list[Agreement | None]:
    first, _ = first_two(trial)
    trial.run(first)
    told = trial.told("state")
    problem = _state_problem(subject, told["state"])
    if not problem and bool(told["training"]) != subject.way.training:
        problem = f"its training flag is {told['training']}"
    return [Agreement("state after calls", problem)]


def _copies(trial: Trial, subject: PairSubject) -> list[Agreement | None]:
    """A module that the reference's twin survives: copied and pickled after a call, then given
    other parameters.
    """
    first, _ = first_two(trial)
    other = trial.sibling(first)
    found: list[Agreement | None] = []
    for how in ("deepcopy", "pickle"):
        if not subject.survives(how, first.inputs):
            found.append(None)
            continue
        trial.run(first)
        found.append(attempted(trial, how, partial(_copied, trial, other, how)))
    return found


def _copied(trial: Trial, other: Sample, how: str) -> Agreement:
    trial.told("transform", how=how)
    return agreement(trial, other, trial.run(other), f"after {how}")


def _ways(trial: Trial, subject: PairSubject) -> list[Agreement | None]:
    return [_in_way(trial, subject, what, way) for what, way in _other_ways(trial)]


def _other_ways(trial: Trial) -> Iterator[tuple[str, Way]]:
    yield "inference mode", Way(inference=True)
    for name in ("bfloat16", "float16") if trial.device.type == "cuda" else ("bfloat16",):
        yield f"autocast {name}", Way(autocast=name)
    if trial.profile.compiled:
        yield "inside torch.compile", Way(compiled="default")


def _in_way(trial: Trial, subject: PairSubject, what: str, way: Way) -> Agreement | None:
    """`compiled` and `elsewhere` are the candidate's ways only: eager stays what is right."""
    other = subject if way.compiled or way.elsewhere else subject.in_way(way)
    try:
        if not any(other.outputs):
            return None
    except ReferenceFailure:
        return None
    return attempted(trial, what, partial(_compared_in_way, trial, other, what, way))


def _compared_in_way(trial: Trial, subject: PairSubject, what: str, way: Way) -> Agreement:
    aside = trial.aside(subject, f"candidate {what}", way)
    found = Agreement(what)
    for sample in (aside.draw("normal"), aside.draw("shifted")):
        found = tried(aside, sample, what) or found
        if (
            sample.name not in trial.samples
        ):  # the reference's own way has met the same sets, and later detectors need them
            aside.drop(sample)
        if found.problem:
            break
    return found


def guard_domain(trial: Trial) -> list[Check]:
    """Module and tensors on another GPU than the current one: results come from there, and are
    right. Where there are two GPUs.
    """
    subject = pair_of(trial)
    if subject is None:
        return not_applicable("guard_domain", "the devices of a Program's tensors are in its guard")
    if trial.device.type != "cuda" or torch.cuda.device_count() < 2:
        return not_applicable("guard_domain", "there is one device here")
    return summed_up(
        "guard_domain",
        [_in_way(trial, subject, "on another GPU", Way(elsewhere=True))],
        "eager has no result here",
    )


def grad(trial: Trial) -> list[Check]:
    """Gradients of all floating inputs and parameters: there where eager has them, and right
    against eager and float64, for random, expanded and strided cotangents, round after round, in
    float64; gradients of gradients are right or refused.
    """
    subject = pair_of(trial)
    if subject is None:
        return not_applicable("grad", "a backward pass is a region of its own, judged as one")
    if not trial.gradients:
        return not_applicable("grad", "gradients are not claimed")
    try:
        backward = subject.with_gradients(Way(gradients=True))
        if not any(backward.outputs[len(subject.outputs) :]):
            return not_applicable("grad", "eager has no gradient here")
    except ReferenceFailure:
        return not_applicable("grad", "eager has no gradient here")
    found = [attempted(trial, "gradients", partial(_rounds, trial, backward))]
    if not found[-1].problem and trial.profile.gradient_rounds > 1:
        found += _further(trial, subject)
    return summed_up("grad", found, "")


def _rounds(trial: Trial, subject: PairSubject) -> Agreement:
    """The same instance, round after round; from the second on with cotangents as `sum` and slices
    make them.
    """
    aside = trial.aside(subject, "candidate gradients")
    first = aside.draw("normal")
    found = _gradients_agree(aside, first, "gradients")
    if not found.problem:
        found = _gradients_agree(aside, aside.sibling(first), "gradients of a second call")
    for name, odd in (
        (("expanded", _expanded), ("strided", _strided))
        if aside.profile.gradient_rounds > 1
        else ()
    ):
        if found.problem:
            break
        made = aside.derive(first, f"{name} cotangents", partial(_odd_cotangents, aside, odd))
        found = _gradients_agree(aside, made, f"{name} cotangents")
    aside.drop(*list(aside.samples.values()))
    return found


def _gradients_agree(trial: Trial, sample: Sample, what: str) -> Agreement:
    result = trial.run(sample)
    for position, (ours, theirs) in enumerate(
        zip(result.outputs, sample.reference.outputs, strict=True)
    ):
        if ours is None and theirs is not None and not bool(theirs.any()):
            result.outputs[position], result.facts[position] = (
                theirs,
                sample.reference.facts[position],
            )  # no gradient means zero
        elif ours is not None and theirs is None and not bool(ours.any()):
            result.outputs[position], result.facts[position] = None, None
        elif ours is None and theirs is not None:
            return Agreement(
                what, f"{_gradient_name(trial, position)} has no gradient, in eager it has"
            )
    for ours_told, theirs_told in zip(result.facts, sample.reference.facts, strict=True):
        if ours_told is not None and theirs_told is not None:
            ours_told["strides"] = theirs_told["strides"]  # autograd promises none for gradients
    return agreement(trial, sample, result, what)


def _gradient_name(trial: Trial, position: int) -> str:
    return f"output {position} (results come first, then the gradients of parameters and inputs)"


def _odd_cotangents(
    trial: Trial, odd: Any, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    subject = trial.subject
    assert isinstance(subject, PairSubject)
    start = subject.cotangents
    return [odd(t) if i >= start else None for i, t in enumerate(inputs)]


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.reshape(-1)[:1].clone().as_strided(tensor.shape, (0,) * tensor.dim())
        if tensor.numel()
        else tensor.clone()
    )


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dim():
        return tensor.clone()
    wide = torch.zeros(
        *tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device
    )
    view = wide[..., ::2]
    return view.copy_(tensor)


def _further(trial: Trial, subject: PairSubject) -> list[Agreement]:
    """In train mode; in float64; gradients of gradients."""
    wide = tuple(
        replace(spec, dtype="float64") if spec.torch_dtype.is_floating_point else spec
        for spec in subject.specs
    )
    asked = (
        (
            "gradients in train mode",
            subject.in_way(Way(training=True)),
            Way(training=True, gradients=True),
        ),
        (
            "gradients in float64",
            subject.in_way(Way(dtype="float64")).with_specs(wide),
            Way(dtype="float64", gradients=True),
        ),
        ("gradients of gradients", subject, Way(gradients=True, second=True)),
    )
    found: list[Agreement] = []
    for what, plain, way in asked:
        try:
            backward = plain.with_gradients(way)
            if not any(backward.outputs):
                continue
        except ReferenceFailure:
            continue
        try:
            found.append(_one_round(trial, backward, what))
        except CandidateFailure as error:
            if not trial.child.usable:
                raise
            refusal = (
                way.second
            )  # an error is an honest answer there: nobody is given a wrong number
            found.append(
                Agreement(f"{what} refused" if refusal else what, "" if refusal else error.found)
            )
        if found[-1].problem:
            break
    return found


def _one_round(trial: Trial, subject: PairSubject, what: str) -> Agreement:
    aside = trial.aside(subject, f"candidate {what}")
    sample = aside.draw("normal")
    if refused(sample):
        return Agreement(what)
    found = _gradients_agree(aside, sample, what)
    aside.drop(sample)
    return found
