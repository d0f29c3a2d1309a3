"""Checks of module semantics, for sources: state dict, train and eval, autocast, inference mode,
copies, devices, gradients.

A Program is a pure function of one mode: its region was captured in it and its guard holds it, and
our own module owns the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    Attempt,
    compare_call,
    compare_result,
    disagree_on_error,
    eager_refuses,
    find_sharing_problem,
    get_source_reference,
    report_not_applicable,
    require_unwritten,
    summarise,
    tolerate_error,
)
from torch_cudal1.judge.checks.module_semantics.gradients import compare_gradients_in
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import Outputs, ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.wire.call_spec import RunMode

__all__ = [
    "GUARD_DOMAIN",
    "MODE",
    "STATE_DICT",
    "TRAIN_MODE",
    "TRANSFORMS",
    "check_guard_domain",
    "check_modes",
    "check_state_dict",
    "check_train_mode",
    "check_transforms",
]

# Of training on one instance.
_STEPS = 4
_OWNED = "a Program is a pure function in the mode of its region; names, copies and modes belong to our own module"


def check_state_dict(trial: Trial) -> list[CheckResult]:
    """The constructed module's state has the reference's names, dtypes and shapes, in the
    reference's order.
    """
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable("mode", _OWNED)
    problem = _find_state_problem(reference, trial.state)
    return [
        CheckResult(
            "mode",
            not problem,
            detail=problem or f"{len(reference.form.names)} tensors of state as the reference's",
        )
    ]


def _find_state_problem(reference: SourceReference, state: Sequence[Any]) -> str:
    expected = {
        name: [spec.dtype, list(spec.shape)]
        for name, spec in zip(reference.form.names, reference.specs, strict=False)
    }
    actual = {str(name): [str(dtype), list(shape)] for name, dtype, shape in state}
    # `load_state_dict` of the reference's checkpoint would raise.
    if missing := [name for name in expected if name not in actual]:
        return f"the state dict lacks {missing}"
    # Its checkpoints could not be loaded into the reference, as strict loading refuses extra keys.
    if extra := [name for name in actual if name not in expected]:
        return f"the state dict has {extra}, the reference's has not"
    return next(
        (
            f"{name} is {actual[name]}, the reference's {expected[name]}"
            for name in expected
            if actual[name] != expected[name]
        ),
        "",
    )


def check_train_mode(trial: Trial) -> list[CheckResult]:
    """In train mode results and buffers are the reference's: at the state that the constructor
    leaves, and at the one that a step of the reference left; so are its gradients.
    """
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable("mode", _OWNED)
    if not trial.gradients:
        return report_not_applicable("mode", "training is not claimed")
    # All other checks run in eval mode, and a module is in train mode until its user calls
    # `eval()`.
    run_mode = RunMode(training=True)
    other = reference.in_way(run_mode)
    try:
        if not any(other.outputs):
            return report_not_applicable("mode", "the reference yields no tensor in train mode")
    except ReferenceFailure as error:
        return report_not_applicable("mode", f"eager refuses train mode: {error.found[:100]}")
    agreements: list[Agreement | None] = [
        disagree_on_error(
            trial, "train mode", partial(_compare_in_train_mode, trial, other, run_mode)
        )
    ]
    if not any(each is not None and each.problem for each in agreements):
        # One instance through several steps: it may follow the first of them only.
        question = f"{_STEPS} steps of training"
        run_mode = RunMode(training=True, steps=_STEPS)
        agreements.append(_compare_run_mode(trial, reference, question, run_mode))
    if not any(each is not None and each.problem for each in agreements):
        # The steps move parameters only: what a layer hands on to those before it is asked here.
        run_mode = RunMode(training=True, gradients=True, step=True)
        agreements += compare_gradients_in(trial, other, "gradients in train mode", run_mode)
    return summarise("mode", agreements, "")


def _compare_in_train_mode(
    trial: Trial, reference: SourceReference, run_mode: RunMode
) -> Agreement:
    # A slot of its own: train mode moves buffers that the other checks rely on.
    aside = trial.load_in_slot(reference, "candidate train mode", run_mode)
    first = aside.draw("normal")
    agreement = Agreement("train mode")
    if not eager_refuses(first):
        agreement = _compare_and_watch_memory(aside, first, "train mode")
    # Constructors leave running means of 0 and variances of 1, which hide a norm that ignores them.
    if not agreement.problem and not eager_refuses(first) and "buffer" in reference.roles:
        stepped = aside.derive(
            first, "a step later", partial(_take_step, reference, first.expected.outputs)
        )
        agreement = compare_call(aside, stepped, "train mode, a step later") or agreement
    aside.drop(*list(aside.samples.values()))
    return agreement


def _take_step(
    reference: SourceReference, outputs: Outputs, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Inputs of the next step: the buffers that a call in train mode left, None for all others."""
    places = [place for place, role in enumerate(reference.roles) if role == "buffer"]
    # In train mode the buffers follow the results, in the order of the state.
    after = dict(zip(places, outputs[len(outputs) - len(places) :], strict=True))
    return [after.get(place) for place in range(len(inputs))]


def check_modes(trial: Trial) -> list[CheckResult]:
    """Late changes of the state; copies of a used module; autocast; inference mode."""
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable("mode", _OWNED)
    agreements: list[Agreement | None] = []
    for part in (_compare_late_state, _compare_copies, _compare_run_modes):
        agreements += part(trial, reference)
        if any(each is not None and each.problem for each in agreements):
            break
    return summarise("mode", agreements, "")


def _compare_late_state(trial: Trial, reference: SourceReference) -> list[Agreement | None]:
    first, _ = trial.first_two
    # Some modules register keys in their first call.
    trial.run(first)
    answer = trial.ask("state")
    problem = _find_state_problem(reference, answer["state"])
    # A constructor that calls `eval()` stays in eval mode when its user trains.
    if not problem and bool(answer["training"]) != reference.way.training:
        problem = f"its training flag is {answer['training']}"
    return [Agreement("state after calls", problem)]


def _compare_copies(trial: Trial, reference: SourceReference) -> list[Agreement | None]:
    """A module that the reference's twin survives: copied and pickled after a call, then given
    other parameters.
    """
    first, _ = trial.first_two
    # Other inputs: a copy that hands out its original's last result is wrong on them.
    other = trial.derive_sibling(first)
    agreements: list[Agreement | None] = []
    for how in ("deepcopy", "pickle"):
        # A candidate need not survive what eager's module does not.
        if not reference.survives(how, first.inputs):
            agreements.append(None)
            continue
        # Used first: what a call adds to the module must survive the copy too.
        trial.run(first)
        agreements.append(disagree_on_error(trial, how, partial(_compare_copy, trial, other, how)))
    return agreements


def _compare_copy(trial: Trial, other: InputSet, how: str) -> Agreement:
    trial.ask("transform", how=how)
    return compare_result(trial, other, trial.run(other), f"after {how}")


def _compare_run_modes(trial: Trial, reference: SourceReference) -> list[Agreement | None]:
    return [
        _compare_run_mode(trial, reference, question, run_mode)
        for question, run_mode in _list_run_modes(trial)
    ]


def check_transforms(trial: Trial) -> list[CheckResult]:
    """Forward-mode derivatives and `vmap`, where the reference has them: right, or an error."""
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable("mode", _OWNED)
    if not trial.gradients:
        return report_not_applicable("mode", "derivatives are not claimed")
    agreements: list[Agreement | None] = []
    for transform, question in (("jvp", "forward-mode derivatives"), ("vmap", "vmap")):
        run_mode = RunMode(transform=transform)
        agreements.append(_compare_run_mode(trial, reference, question, run_mode, tolerate_error))
        if (each := agreements[-1]) is not None and each.problem:
            break
    return summarise("mode", agreements, "the reference has neither")


def _list_run_modes(trial: Trial) -> Iterator[tuple[str, RunMode]]:
    yield "inference mode", RunMode(inference=True)
    # As norms are frozen while a model is tuned.
    if trial.gradients and (paths := _list_parts_with_buffers(trial)):
        yield "train mode of all but what has buffers", RunMode(training=True, frozen=paths)
    for name in ("bfloat16", "float16") if trial.device.type == "cuda" else ("bfloat16",):
        yield f"autocast {name}", RunMode(autocast=name)
    # Compiling takes long, so only some profiles ask it.
    if trial.profile.compiled:
        yield "inside torch.compile", RunMode(compiled="default")


def _list_parts_with_buffers(trial: Trial) -> tuple[str, ...]:
    reference = get_source_reference(trial)
    assert reference is not None
    names = zip(reference.form.names, reference.roles, strict=False)
    paths = {name.rpartition(".")[0] for name, role in names if role == "buffer"}
    # The module itself is no part of it.
    return tuple(sorted(paths - {""}))


def _compare_run_mode(
    trial: Trial,
    reference: SourceReference,
    question: str,
    run_mode: RunMode,
    ask: Attempt = disagree_on_error,
) -> Agreement | None:
    """The candidate in a mode beside eager; None where eager yields nothing there."""
    # Being compiled, or on another GPU, changes nothing about what is right: eager runs as ever.
    other = reference if run_mode.compiled or run_mode.other_gpu else reference.in_way(run_mode)
    try:
        if not any(other.outputs):
            return None
    except ReferenceFailure:
        return None
    return ask(trial, question, partial(_compare_sets, trial, other, question, run_mode))


def _compare_sets(
    trial: Trial, reference: SourceReference, question: str, run_mode: RunMode
) -> Agreement:
    aside = trial.load_in_slot(reference, f"candidate {question}", run_mode)
    agreement = Agreement(question)
    for sample in (aside.draw("normal"), aside.draw("shifted")):
        # An error goes to the caller, who knows whether it is an answer.
        if not eager_refuses(sample):
            agreement = _compare_and_watch_memory(aside, sample, question)
        aside.free_memory_if_short()
        # the reference's own way has met the same sets, and later checks need them
        if sample.name not in trial.samples:
            aside.drop(sample)
        if agreement.problem:
            break
    return agreement


def _compare_and_watch_memory(trial: Trial, sample: InputSet, question: str) -> Agreement:
    """The result of a call, which leaves its arguments alone, and where in memory it lies."""
    result = trial.run(sample)
    agreement = compare_result(trial, sample, result, question)
    agreement = require_unwritten(trial, sample, agreement)
    if agreement.problem:
        return agreement
    sharing = find_sharing_problem(result, sample.expected)
    return Agreement(question, sharing) if sharing else agreement


def check_guard_domain(trial: Trial) -> list[CheckResult]:
    """Module and tensors on another GPU than the current one: results come from there, and are
    right. Where there are two GPUs.
    """
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable(
            "guard_domain", "the devices of a Program's tensors are in its guard"
        )
    # On one device the current device is the right one by chance.
    if trial.device.type != "cuda" or torch.cuda.device_count() < 2:
        return report_not_applicable("guard_domain", "there is one device here")
    return summarise(
        "guard_domain",
        [_compare_run_mode(trial, reference, "on another GPU", RunMode(other_gpu=True))],
        "eager has no result here",
    )


STATE_DICT = CheckSpec(
    name="mode",
    run=check_state_dict,
    step="state_dict",
    is_concurrent=True,
    asks="has its state the reference's names, dtypes and shapes",
)
TRAIN_MODE = CheckSpec(
    name="mode",
    run=check_train_mode,
    step="train_mode",
    replaces_only=True,
    asks=(
        "in train mode results and buffers as the reference's, in memory of their own, at its "
        "first state and a step later, its state after four steps of training, and the gradients of inputs and "
        "parameters (not with `--inference`)"
    ),
)
TRANSFORMS = CheckSpec(
    name="mode",
    run=check_transforms,
    step="transforms",
    since="standard",
    replaces_only=True,
    asks="forward-mode derivatives and `vmap`, which may raise but not be wrong",
)
MODE = CheckSpec(
    name="mode",
    run=check_modes,
    since="standard",
    knobs=("compiled",),
    replaces_only=True,
    asks="autocast, copies, pickling, casts, train mode with its norms in eval mode",
)
GUARD_DOMAIN = CheckSpec(
    name="guard_domain",
    run=check_guard_domain,
    since="standard",
    replaces_only=True,
    asks=("with two GPUs: the module on another than the current one answers there, and rightly"),
)
