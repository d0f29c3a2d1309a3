"""Checks of the numbers and flags that a module is constructed and called with: each must matter as in
eager, in every call.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    compare_call,
    disagree_on_error,
    get_source_reference,
    report_not_applicable,
    summarise,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.inputs import make_inputs
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceReference
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["SCALARS", "check_scalars", "list_scalars"]

_CHANCE = random.SystemRandom()
# Kinds of packed arguments, which say nothing to a reader.
_PACKED_KINDS = ("dict", "tuple", "args", "kwargs")


def check_scalars(trial: Trial) -> list[CheckResult]:
    """The scalars that a source's module is constructed and called with, each changed alone where
    the reference accepts that.
    """
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable("perturb", "the scalars of a Program are part of its region")
    agreements: list[Agreement | None] = []
    variants = [
        # Those of calls first: a constructor's are fixed for a module's life, these may change in
        # every call.
        *(
            (f"argument {question}", reference.with_call(call))
            for question, call in list_scalars(reference.form.call)
        ),
        *(
            (question, reference.with_init(init))
            for question, init in list_scalars(reference.form.init)
        ),
    ]
    # Each takes a module of its own in both processes.
    for question, other in variants[: trial.count_affordable_sets(12)]:
        try:
            other.eager(make_inputs(other, 1, "normal", trial.device, examples=trial.examples))
        # A value that eager's constructor refuses is asked of no candidate.
        except (ReferenceFailure, ValueError):
            agreements.append(None)
            continue
        ask = partial(_compare_with_scalar, trial, other, question)
        if other.form.call != reference.form.call:
            ask = partial(_compare_later_scalar, trial, other, question)
        agreement = disagree_on_error(trial, question, ask)
        agreements.append(agreement)
        if agreement.problem:
            break
    return summarise("perturb", agreements, "no scalar that eager takes another value for")


def _compare_with_scalar(trial: Trial, other: SourceReference, question: str) -> Agreement:
    # Constructed anew: a scalar of the constructor cannot change in a living module.
    aside = trial.load_in_slot(other, f"candidate {question}")
    return compare_call(aside, aside.draw("normal"), question) or Agreement(question)


def _compare_later_scalar(trial: Trial, other: SourceReference, question: str) -> Agreement:
    """A module of its own, then one that has been called with the usual arguments."""
    agreement = _compare_with_scalar(trial, other, question)
    if agreement.problem:
        return agreement
    first, slot = trial.first_two[0], "candidate usual arguments"
    usual = trial.load_in_slot(trial.reference, slot)
    usual.samples[first.name] = first
    usual.run(first)
    later = f"{question} later"
    aside = trial.load_in_slot(other, f"candidate {later}")
    aside.ask("share_instance", of=slot)
    aside.samples[first.name] = first
    return compare_call(aside, aside.derive_sibling(first), later) or Agreement(later)


def list_scalars(init: Any) -> Iterator[tuple[str, Any]]:
    """Packed arguments with one number or flag changed: floats by a secret factor, counts by one,
    flags turned.
    """
    # Ones keep most constructors legal: sizes and counts must stay whole.
    for path, value in _list_leaves(init):
        where = ".".join(str(part) for part in path if part not in _PACKED_KINDS)
        if isinstance(value, bool):
            yield f"{where} = {not value}", _replace_leaf(init, path, not value)
        elif isinstance(value, float):
            number = _scale_secretly(value)
            yield f"{where} = {number:g}", _replace_leaf(init, path, number)
        elif isinstance(value, int):
            yield f"{where} = {value + 1}", _replace_leaf(init, path, value + 1)


def _scale_secretly(value: float) -> float:
    """Another number of the same sign, from a half to double; of 0 a small one."""
    # A candidate could have a value written in for each factor that it knows.
    factor = _CHANCE.choice((_CHANCE.uniform(0.5, 0.85), _CHANCE.uniform(1.2, 2.0)))
    return float(f"{value * factor or 0.1 * factor:.4g}")


def _list_leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    # Which tensor stands there is no scalar.
    if isinstance(data, dict) and set(data) != {"tensor"}:
        for key, item in data.items():
            yield from _list_leaves(item, (*path, key))
    elif isinstance(data, list):
        for index, item in enumerate(data):
            yield from _list_leaves(item, (*path, index))
    elif not isinstance(data, dict):
        yield path, data


def _replace_leaf(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = _replace_leaf(copy[path[0]], path[1:], value)
    return copy


SCALARS = CheckSpec(
    name="perturb",
    run=check_scalars,
    step="scalars",
    knobs=("budget_s",),
    asks="each scalar among the arguments of constructor and call likewise",
)
