"""Check of updates: the latest values of parameters and buffers are used, however and by however
little programs change them.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    compare_call,
    compare_result,
    disagree_on_error,
    eager_refuses,
    eager_repeats,
    get_source_reference,
    report_not_applicable,
    summarise,
)
from torch_cudal1.judge.checks.module_semantics.parameters import perturb_tensor
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.profiles import UPDATE_WAYS
from torch_cudal1.judge.reference.compare import unit_roundoff
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.inputs import clone_strided, make_inputs
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["UPDATE_PATH", "check_updates"]

Facts: TypeAlias = dict[str, Any]
_STEPPED = ("sgd", "foreach", "fused")
_REPLACING = ("assign", "swap")
# Of the whole module, which would be copied for every weight that moves.
_COPYING = ("deepcopy",)
# Of each element: less than `torch.allclose` tells apart in float32, then more. Above 1: round-offs.
_STEP_SIZES = (128.0, 1e-3, 1e-2)
_MOST_MOVED = 24
# `numerics` asks how exact results are; here a result need only belong to the latest values
_SLACK = 4.0


@dataclass(frozen=True)
class _Update:
    """A change of parameters and buffers in one of `UPDATE_WAYS`."""

    question: str
    method: str
    kind: str
    make: Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]]


def check_updates(trial: Trial) -> list[CheckResult]:
    """After a first call the parameters get other values, in the ways that programs use: the next
    result is of the new ones.
    """
    first, _ = trial.first_two
    if "parameter" not in trial.reference.roles and "buffer" not in trial.reference.roles:
        return report_not_applicable("update_path", "no parameters")
    if get_source_reference(trial) is None:
        return _compare_given(trial, first)
    agreements: list[Agreement | None] = []
    methods = _draw_ways(trial.profile.update_ways)
    for method in methods:
        kind = f"update {method in _STEPPED}"
        change = _Update(method, method, kind, partial(_draw_state, trial, method))
        agreements += _compare_in_sequence(trial, first, [change])
        if (each := agreements[-1]) is not None and each.problem:
            return summarise("update_path", agreements, "")
    for changes in (_list_small_steps(trial), _list_moves(trial, first, methods)):
        agreements += _compare_in_sequence(trial, first, changes, _SLACK)
        if any(each is not None and each.problem for each in agreements):
            break
    return summarise("update_path", agreements, "eager refuses other parameters")


def _draw_ways(count: int) -> list[str]:
    """The hardest way to write in place, a way that puts new objects, and others in a secret
    order.
    """
    chance = random.SystemRandom()
    ways = [UPDATE_WAYS[0], chance.choice(_REPLACING)]
    further_ways = [way for way in UPDATE_WAYS if way not in ways]
    return [*ways, *chance.sample(further_ways, len(further_ways))][:count]


def _list_small_steps(trial: Trial) -> list[_Update]:
    """Steps of optimizers, each larger than all before it together: the first is smaller than what
    a look at the weights may take for nothing, the last shows where the first are lost in rounding.
    """
    chance = random.SystemRandom()
    return [
        _Update(
            f"step of {size:g} round-offs" if size > 1 else f"step of {size:g}",
            chance.choice(_STEPPED),
            f"step {size:g}",
            partial(_move_all, trial, size),
        )
        for size in _STEP_SIZES
    ]


def _list_moves(trial: Trial, first: InputSet, methods: Sequence[str]) -> list[_Update]:
    """One element of each tensor in turn, of many tensors of some: what is derived from weights is
    not kept by a look at some of them.
    """
    positions = _list_floating_state(trial, first.inputs)
    count = trial.count_affordable_sets(_MOST_MOVED, 0.2)
    ways = [method for method in methods if method not in (*_STEPPED, *_COPYING)]
    # Those that stay are in order: a set is derived once for all candidates where all are moved.
    if len(positions) > count:
        positions = sorted(random.SystemRandom().sample(positions, count))
    # Each way is met, where there are fewer tensors than ways too.
    turns = max(len(positions), len(ways)) if positions else 0
    return [
        _Update(
            f"one weight by {ways[turn % len(ways)]}",
            ways[turn % len(ways)],
            f"one weight of {positions[turn % len(positions)]}",
            partial(_move_one, positions[turn % len(positions)]),
        )
        for turn in range(turns)
    ]


def _compare_in_sequence(
    trial: Trial, first: InputSet, changes: Sequence[_Update], slack: float = 1.0
) -> list[Agreement | None]:
    """Updates of one instance after a call on `first`, each of the values that the last one left:
    no other call comes between, in which what is kept could be made anew.
    """
    # Whatever is derived from parameters once and kept is derived here.
    trial.run(first)
    agreements: list[Agreement | None] = []
    targets = [first]
    for change in changes:
        target = trial.derive(targets[-1], change.kind, change.make)
        targets.append(target)
        # An optimizer's step may lead where eager itself raises.
        if eager_refuses(target):
            agreements.append(None)
            break
        ask = partial(_compare_updated, trial, change, target, slack)
        agreement = disagree_on_error(trial, change.question, ask)
        # A reference that ties two weights follows no new objects.
        if agreement.problem and not eager_repeats(trial.reference, targets[-2:], change.method):
            agreements.append(None)
            break
        agreements.append(agreement)
        if agreement.problem:
            break
    trial.drop(*targets[1:])
    return agreements


def _compare_updated(trial: Trial, change: _Update, target: InputSet, slack: float) -> Agreement:
    trial.ask("update", way=change.method, name=target.name)
    result = trial.run(target)
    if change.method == "channels_last":
        # A convolution's result lies as its weight does, and eager's was computed of another.
        pairs = zip(result.facts, target.expected.facts, strict=True)
        result = replace(result, facts=[_with_strides_of(eager, facts) for facts, eager in pairs])
    return compare_result(trial, target, result, change.question, slack)


def _with_strides_of(eager: Facts | None, facts: Facts | None) -> Facts | None:
    return facts if facts is None or eager is None else {**facts, "strides": eager["strides"]}


def _list_floating_state(trial: Trial, inputs: Sequence[torch.Tensor]) -> list[int]:
    return [
        position
        for position, (tensor, role) in enumerate(zip(inputs, trial.reference.roles, strict=True))
        if role != "input" and tensor.dtype.is_floating_point and tensor.numel()
    ]


def _move_one(position: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """One element of a parameter or buffer, drawn in secret, moved by four times the size of its
    tensor.
    """
    changed: list[torch.Tensor | None] = [None] * len(inputs)
    copy = clone_strided(inputs[position])
    place = tuple(secrets.randbelow(size) for size in copy.shape)
    # Upwards: a variance stays one.
    copy[place] += 4.0 * float(copy.double().square().mean().sqrt()) or 1.0
    changed[position] = copy
    return changed


def _move_all(
    trial: Trial, size: float, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """All parameters and buffers moved by up to `size` of each element, or so many round-offs."""
    changed: list[torch.Tensor | None] = [None] * len(inputs)
    for position in _list_floating_state(trial, inputs):
        if position not in trial.facts.structural:
            tensor = inputs[position]
            part = size * unit_roundoff(tensor.dtype) if size > 1 else size
            changed[position] = perturb_tensor(tensor, part)
    return changed


def _compare_given(trial: Trial, first: InputSet) -> list[CheckResult]:
    """A Program is given its parameters at every call; what can go stale is an address it has
    prepared for.
    """
    target = trial.derive(first, "update", partial(_draw_state, trial, ""))
    if eager_refuses(target):
        return summarise("update_path", [None], "eager refuses other parameters")
    static = [role != "input" for role in trial.reference.roles]
    trial.run(first)
    agreements: list[Agreement | None] = [
        # A CUDA graph or a descriptor may have the first addresses built in.
        compare_call(trial, target, "parameters at other addresses")
    ]
    # Prepares for the old addresses again.
    trial.run(first)
    trial.rewrite(
        first, [new if there else None for new, there in zip(target.inputs, static, strict=True)]
    )
    agreements.append(
        compare_result(trial, target, trial.run(first), "other parameters at the same addresses")
    )
    # Later checks start from this set.
    trial.rewrite(
        first, [old if there else None for old, there in zip(first.inputs, static, strict=True)]
    )
    return summarise("update_path", agreements, "")


def _draw_state(
    trial: Trial, method: str, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Other parameters and buffers; an optimiser's step lands on old - (old - new), which rounding
    keeps from being new.
    """
    seed = random.SystemRandom().randrange(1 << 62)
    drawn = make_inputs(trial.reference, seed, "normal", trial.device, examples=trial.examples)
    values: list[torch.Tensor | None] = []
    for old, new, role in zip(inputs, drawn, trial.reference.roles, strict=True):
        if role == "parameter" and method in _STEPPED and old.dtype.is_floating_point:
            new = old - (old - new)
        values.append(None if role == "input" else new)
    return values


UPDATE_PATH = CheckSpec(
    name="update_path",
    run=check_updates,
    knobs=("update_ways",),
    asks=(
        "are new weights seen after a first call, all of them and a single one, in the ways that "
        "programs write them: `copy_`, `.data`, `load_state_dict`, optimizers, for one call, into a copy "
        "of the module, laid out channels-last, ..."
    ),
)
