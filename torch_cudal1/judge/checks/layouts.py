"""Detectors of form: other shapes, memory layouts and types of the plain inputs than those of the
examples.

A source has no guard, so whatever the reference accepts is asked. A Program is guarded: its shapes,
strides and types are part of its region, and everything else reaches the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    agreement,
    attempted,
    attempted_or_refused,
    not_applicable,
    pair_of,
    refused,
    summed_up,
)
from torch_cudal1.judge.checks.numerics import first_two
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import PairSubject
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.worker.modules import Way

__all__ = ["dtypes", "layouts", "shapes"]

_TILES = (16, 32, 64, 128)
_DTYPES = ("float16", "bfloat16", "float64")
# small forms have few elements, so both errors are estimates; coarser arithmetic is off by a
# hundred times and more
_SLACK = 1.5
_GUARDED = "shapes, strides and types of a Program are guarded: others reach the baseline"
Specs = tuple[TensorSpec, ...]
Attempt: TypeAlias = Callable[[Trial, str, Callable[[], Agreement]], Agreement]


def shapes(trial: Trial) -> list[Check]:
    """Other sizes of the first dimension, then of the others: odd, prime, around a tile, one, half,
    none.
    """
    subject = pair_of(trial)
    if subject is None:
        return not_applicable("shapes", _GUARDED)
    found: list[Agreement | None] = []
    for what, specs in _other_shapes(subject, trial.profile.name == "strict"):
        if sum(one is not None for one in found) == trial.rounds(trial.profile.shapes, 0.2):
            break
        found.append(_in_form(trial, subject.with_specs(specs), what))
        if (one := found[-1]) is not None and one.problem:
            break
    return summed_up(
        "shapes", found, "eager takes no other shape, or no plain input has a dimension"
    )


def _other_shapes(subject: PairSubject, huge: bool) -> Iterator[tuple[str, Specs]]:
    plain = [
        spec
        for spec, role in zip(subject.specs, subject.roles, strict=True)
        if role == "input" and spec.shape
    ]
    if not plain:
        return
    batch = plain[0].shape[0]
    for size in _sizes(batch, huge):
        yield f"batch {size}", _resized(subject, 0, batch, size)
    for dim in range(1, max(len(spec.shape) for spec in plain)):
        old = next(spec.shape[dim] for spec in plain if len(spec.shape) > dim)
        for size in (old + 1, old - 1, max(1, old // 2)):
            if size > 0:
                yield f"dimension {dim} of {size}", _resized(subject, dim, old, size)


def _sizes(batch: int, huge: bool) -> list[int]:
    """In the order in which they are most telling. The first is no multiple of any tile; 65,537
    passes the limit of a grid.
    """
    tile = next((t for t in reversed(_TILES) if t <= batch), 16)
    wanted = [
        batch + 1,
        1,
        _prime_below(batch),
        max(1, batch // 2),
        tile + 1,
        tile - 1,
        0,
        2 * batch,
    ]
    return [size for size in dict.fromkeys([*wanted, *([65_537] if huge else [])]) if size != batch]


def _prime_below(number: int) -> int:
    return next(
        (
            n
            for n in range(max(number - 1, 2), 1, -1)
            if all(n % d for d in range(2, int(n**0.5) + 1))
        ),
        2,
    )


def _resized(subject: PairSubject, dim: int, old: int, new: int) -> Specs:
    """Every plain input that has this size there gets the new one."""

    def one(spec: TensorSpec, role: str) -> TensorSpec:
        if role != "input" or len(spec.shape) <= dim or spec.shape[dim] != old:
            return spec
        return _contiguous(
            spec, tuple(new if i == dim else size for i, size in enumerate(spec.shape))
        )

    return tuple(one(spec, role) for spec, role in zip(subject.specs, subject.roles, strict=True))


def _contiguous(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(spec.dtype, shape, torch.empty(shape, device="meta").stride(), spec.device)


def _in_form(
    trial: Trial, subject: PairSubject, what: str, ask: Attempt = attempted
) -> Agreement | None:
    """The candidate against the reference in another form; None where the reference refuses it."""
    try:
        if not any(subject.outputs):
            return None
    except ReferenceFailure:
        return None
    return ask(trial, what, partial(_compared_in_form, trial, subject, what))


def _compared_in_form(trial: Trial, subject: PairSubject, what: str) -> Agreement:
    aside = trial.aside(subject, f"candidate {subject.key[:8]}")
    sample = aside.draw("normal")
    if refused(sample):
        return Agreement(what)
    found = agreement(aside, sample, aside.run(sample), what, _SLACK)
    aside.ease()
    aside.drop(sample)
    return found


def layouts(trial: Trial) -> list[Check]:
    """Otherwise in memory: transposed, channels last, every second element, one element further,
    expanded, one tensor twice.

    An error is an honest answer: nobody is given a wrong number, and where it runs the strides are
    in the key and the guard.
    """
    subject = pair_of(trial)
    found: list[Agreement | None] = []
    limit = trial.profile.layouts
    if subject is not None:
        for what, specs in _other_layouts(subject):
            if sum(one is not None for one in found) >= limit:
                break
            found.append(_in_form(trial, subject.with_specs(specs), what, attempted_or_refused))
            if (one := found[-1]) is not None and one.problem:
                return summed_up("layouts", found, "")
    found += (
        [_placed(trial, what) for what in ("offset 1", "same tensor twice")] if limit > 2 else []
    )
    if subject is None:
        return not_applicable("layouts", _GUARDED + ", and so are alignment and overlap")
    return summed_up("layouts", found, "no plain input has two dimensions")


def _other_layouts(subject: PairSubject) -> Iterator[tuple[str, Specs]]:
    for what, change in (
        ("transposed", _transposed),
        ("step 2", _step_two),
        ("channels_last", _channels_last),
        ("expanded", _expanded),
    ):
        specs = tuple(
            replace(spec, strides=change(spec.shape, spec.strides)) if role == "input" else spec
            for spec, role in zip(subject.specs, subject.roles, strict=True)
        )
        if specs != subject.specs:
            yield what, specs


Strides = tuple[int, ...]


def _transposed(shape: Sequence[int], strides: Strides) -> Strides:
    """The last two dimensions in the other order in memory."""
    if len(shape) < 2:
        return strides
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    return _in_order(shape, order)


def _channels_last(shape: Sequence[int], strides: Strides) -> Strides:
    return _in_order(shape, [0, *range(2, len(shape)), 1]) if len(shape) in (4, 5) else strides


def _step_two(shape: Sequence[int], strides: Strides) -> Strides:
    return tuple(2 * stride for stride in _in_order(shape, range(len(shape)))) if shape else strides


def _expanded(shape: Sequence[int], strides: Strides) -> Strides:
    return (
        (0, *_in_order(shape[1:], range(len(shape) - 1)))
        if len(shape) > 1 and shape[0] > 1
        else strides
    )


def _in_order(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Dense strides with the dimensions from outermost to innermost in `order`."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _placed(trial: Trial, what: str) -> Agreement | None:
    """Where the tensors of a call may lie besides their strides."""
    first, _ = first_two(trial)
    plain = [i for i, role in enumerate(trial.subject.roles) if role == "input"]
    if pair_of(trial) is None or not plain:
        return None
    same = [
        (i, j)
        for i in plain
        for j in plain
        if i < j and trial.subject.specs[i] == trial.subject.specs[j]
    ][:1]
    if what == "same tensor twice" and not same:
        return None

    def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        values = list(inputs)
        for source, target in same if what == "same tensor twice" else ():
            values[target] = values[source]
        return [value.clone() if i in plain else None for i, value in enumerate(values)]

    sample = trial.derive(first, what, make)
    if refused(sample):
        return None
    trial.child.call(
        "arrange",
        name=sample.name,
        offset=plain if what == "offset 1" else [],
        same=same if what != "offset 1" else [],
    )

    def ask() -> Agreement:
        return agreement(trial, sample, trial.run(sample), what)

    return attempted_or_refused(trial, what, ask)


def dtypes(trial: Trial) -> list[Check]:
    """The module cast after a first call and called with inputs of that type: half types and
    float64, where eager takes them.
    """
    subject = pair_of(trial)
    if subject is None:
        return not_applicable("dtypes", _GUARDED)
    found: list[Agreement | None] = []
    for name in _DTYPES[: trial.profile.dtypes]:
        specs = tuple(_cast(spec, name) for spec in subject.specs)
        if specs == subject.specs:
            continue
        found.append(_in_form(trial, subject.in_way(Way(dtype=name)).with_specs(specs), name))
        if (one := found[-1]) is not None and one.problem:
            break
    return summed_up("dtypes", found, "no floating tensor, or eager takes no other type")


def _cast(spec: TensorSpec, name: str) -> TensorSpec:
    return replace(spec, dtype=name) if spec.torch_dtype.is_floating_point else spec
