"""Detectors of what a candidate does with parameters: each alone must matter as in eager, and the
latest value must be used.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.linalg import vector_norm

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
from torch_cudal1.judge.checks.profiles import UPDATE_WAYS
from torch_cudal1.judge.reference.compare import same_numbers, unit_roundoff
from torch_cudal1.judge.reference.error_statistics import flat_blocks
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.inputs import clone_strided, make_inputs
from torch_cudal1.judge.reference.region_reference import Outputs, ReferenceFailure
from torch_cudal1.judge.reference.source_reference import PairSubject
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.wire.channel import storage_extent

__all__ = ["perturb", "scalars", "update_path"]

_ADAPTED = (
    "small",
    "shifted",
    "uniform",
    "large",
    "sparse",
    "impulse",
)  # tried in turn where a change cannot be seen, at most six
_VISIBLE = 4.0  # a change counts as seen when it is so many times what rounding may do to it
_PLAIN = 0.25  # of the result itself: what rounding does to a result that has digits at all is less
_STEPPED = ("sgd", "foreach", "fused")


@dataclass(frozen=True)
class _Change:
    """How far the candidate's change is from the exact one, what is allowed, how large the exact
    one is and the result (rms).
    """

    error: float
    limit: float
    size: float
    result: float

    @property
    def seen(self) -> bool:
        return self.size > _VISIBLE * self.limit


def perturb(trial: Trial) -> list[Check]:
    """Each parameter, buffer and, of several, plain input alone moves by 0.1 to 1 of itself:
    eager's change is reproduced.
    """
    first, _ = first_two(trial)
    positions = _perturbed(trial, first)
    if not positions:
        return not_applicable("perturb", "one plain input and no parameters")
    before = trial.run(first).outputs
    unseen: list[int] = []
    worst = Agreement("")
    for position in positions:
        found = _moved(trial, first, before, position, "normal")
        for distribution in _ADAPTED[: trial.rounds(len(_ADAPTED), 0.02)] if found is None else ():
            base = trial.sibling(first, distribution)
            found = _moved(trial, base, None, position, distribution)
            if found is not None:
                break
        if found is None:
            unseen.append(position)
        elif found.problem:
            return [
                Check(
                    "perturb",
                    False,
                    found.ratio,
                    found.limit,
                    f"{_name(trial, position)} alone: {found.problem}",
                )
            ]
        elif (found.ratio or 0.0) >= (worst.ratio or 0.0):
            worst = found
    detail = f"{len(positions)} of {len(_candidates(trial, first))} parameters, buffers and inputs moved alone"
    if unseen:
        detail += f"; unobservable: {', '.join(_name(trial, position) for position in unseen)}"
    return [Check("perturb", True, worst.ratio, worst.limit, detail)]


def _candidates(trial: Trial, sample: Sample) -> list[int]:
    roles = trial.subject.roles
    plain = [
        i
        for i, role in enumerate(roles)
        if role == "input" and sample.inputs[i].dtype.is_floating_point
    ]
    others = [i for i, role in enumerate(roles) if role != "input" and i not in trial.facts.kept]
    numbers = [i for i in others if sample.inputs[i].dtype.is_floating_point]
    return [i for i in numbers + (plain if len(plain) > 1 else []) if sample.inputs[i].numel()]


def _perturbed(trial: Trial, sample: Sample) -> list[int]:
    everything = _candidates(trial, sample)
    return sorted(
        random.SystemRandom().sample(
            everything, min(len(everything), trial.rounds(trial.profile.perturbed, 0.2))
        )
    )


def _moved(
    trial: Trial, base: Sample, before: Outputs | None, position: int, distribution: str
) -> Agreement | None:
    """None where the change cannot be told from rounding."""
    if refused(base):
        return None
    before = trial.run(base).outputs if before is None else before

    def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return [_nudged(t) if i == position else None for i, t in enumerate(inputs)]

    variant = trial.derive(base, f"moved {position} {distribution}", make)
    if refused(variant):
        return None

    def ask() -> Agreement:
        return _change_reproduced(trial, (base, before), (variant, trial.run(variant).outputs))

    found = attempted(trial, "moved alone", ask)
    trial.drop(variant)
    return found if found.problem or found.ratio is not None else None


def _change_reproduced(
    trial: Trial, old: tuple[Sample, Outputs], new: tuple[Sample, Outputs]
) -> Agreement:
    """The first output whose change is wrong, else the worst ratio; no ratio where no output shows
    the change.
    """
    worst: float | None = None
    for position, there in enumerate(trial.subject.outputs):
        if not there or (change := _change(trial, old, new, position)) is None or not change.seen:
            continue
        if change.error > change.limit:
            problem = f"output {position} changes by {change.size:.3g} rms in float64, the candidate is {change.error:.3g} off"
            return Agreement("", problem, change.error / change.limit, 1.0)
        worst = max(worst or 0.0, change.error / change.limit)
    return Agreement("", "", worst, None if worst is None else 1.0)


def _change(
    trial: Trial, old: tuple[Sample, Outputs], new: tuple[Sample, Outputs], position: int
) -> _Change | None:
    """Differences of two results carry the rounding of both, so eager's own difference sets the
    limit.

    Where both results are eager's own numbers and the change is plain, no float64 run need tell
    that it is there, and right.
    """
    ours = [outputs[position] for _, outputs in (old, new)]
    theirs = [sample.reference.outputs[position] for sample, _ in (old, new)]
    if all(same_numbers(x, y) for x, y in zip(ours, theirs, strict=True)):
        found = _told(ours, theirs, [None, None])
        if found is None or found.size > _PLAIN * found.result:
            return found
    exact = [sample.exact_at(position) for sample, _ in (old, new)]
    found = _told(ours, theirs, exact)
    if found is not None and found.seen and found.error > found.limit:
        granted = [trial.subject.granted(sample.inputs) for sample, _ in (old, new)]
        used = [None if outputs is None else outputs[position] for outputs in granted]
        if all(one is not None for one in used):  # eager may leave unused what it has a right to
            found = _told(ours, used, exact)
    return found


def _told(ours: Outputs, theirs: Outputs, exact: Outputs) -> _Change | None:
    """Each before and after; eager's in place of float64's where there is none. None where there is
    no floating output.
    """
    a, b = ours
    c, d = theirs
    if (
        a is None
        or b is None
        or c is None
        or d is None
        or not d.numel()
        or not d.dtype.is_floating_point
        or a.shape != c.shape
    ):
        return None
    before, after = (
        (eager if one is None else one).double() for eager, one in zip((c, d), exact, strict=True)
    )
    sums, count = torch.zeros(5, dtype=torch.float64, device=d.device), 0
    for x, y, u, v, e, f in flat_blocks(a, b, c, d, before, after):
        wanted, found, eager = f - e, y.double() - x.double(), v.double() - u.double()
        mask = wanted.isfinite() & found.isfinite() & eager.isfinite()
        here = int(mask.sum())
        parts = [e, f, wanted, eager - wanted, found - wanted]
        if here < mask.numel():
            parts = [torch.where(mask, part, 0.0) for part in parts]
        sums += torch.stack([vector_norm(part).square() for part in parts])
        count += here
    if not count:
        return None
    old_rms, new_rms, size, own, error = (sums / count).sqrt().tolist()
    limit = max(
        3 * own, (8 if exact[0] is None else 2) * unit_roundoff(d.dtype) * max(old_rms, new_rms)
    )
    return _Change(error, limit, size, max(old_rms, new_rms))


def _nudged(tensor: torch.Tensor) -> torch.Tensor:
    """Each element times 1 + U(0.1, 1); zeros become that."""
    copy = clone_strided(tensor)
    flat = copy.as_strided((storage_extent(copy.shape, copy.stride()),), (1,))
    generator = torch.Generator(flat.device).manual_seed(secrets.randbits(63))
    factor = 0.1 + 0.9 * torch.rand(flat.shape, device=flat.device, generator=generator)
    flat.copy_(torch.where(flat == 0, factor, flat * (1 + factor)))
    return copy


def _name(trial: Trial, position: int) -> str:
    subject = pair_of(trial)
    if subject is not None and position < len(subject.form.names):
        return subject.form.names[position]
    return f"{trial.subject.roles[position]} {position}"


def update_path(trial: Trial) -> list[Check]:
    """After a first call the parameters get other values, in the ways that programs use: the next
    result is of the new ones.
    """
    first, _ = first_two(trial)
    if "parameter" not in trial.subject.roles and "buffer" not in trial.subject.roles:
        return not_applicable("update_path", "no parameters")
    if pair_of(trial) is None:
        return _given_anew(trial, first)
    found: list[Agreement | None] = []
    for way in UPDATE_WAYS[: trial.profile.update_ways]:
        target = trial.derive(first, f"update {way in _STEPPED}", partial(_new_state, trial, way))
        if refused(target):
            found.append(None)
            continue
        trial.run(first)
        found.append(attempted(trial, way, partial(_updated, trial, way, target)))
        if (one := found[-1]) is not None and one.problem:
            break
    return summed_up("update_path", found, "eager refuses other parameters")


def _updated(trial: Trial, way: str, target: Sample) -> Agreement:
    trial.told("update", way=way, name=target.name)
    return agreement(trial, target, trial.run(target), way)


def _given_anew(trial: Trial, first: Sample) -> list[Check]:
    """A Program is given its parameters at every call; what can go stale is an address it has
    prepared for.
    """
    target = trial.derive(first, "update", partial(_new_state, trial, ""))
    if refused(target):
        return summed_up("update_path", [None], "eager refuses other parameters")
    static = [role != "input" for role in trial.subject.roles]
    trial.run(first)
    found: list[Agreement | None] = [tried(trial, target, "parameters at other addresses")]
    trial.run(first)
    trial.rewrite(
        first, [new if there else None for new, there in zip(target.inputs, static, strict=True)]
    )
    found.append(
        agreement(trial, target, trial.run(first), "other parameters at the same addresses")
    )
    trial.rewrite(
        first, [old if there else None for old, there in zip(first.inputs, static, strict=True)]
    )
    return summed_up("update_path", found, "")


def _new_state(trial: Trial, way: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Other parameters and buffers; an optimiser's step lands on old - (old - new), which rounding
    keeps from being new.
    """
    seed = random.SystemRandom().randrange(1 << 62)
    drawn = make_inputs(trial.subject, seed, "normal", trial.device, examples=trial.examples)
    made: list[torch.Tensor | None] = []
    for old, new, role in zip(inputs, drawn, trial.subject.roles, strict=True):
        if role == "parameter" and way in _STEPPED and old.dtype.is_floating_point:
            new = old - (old - new)
        made.append(None if role == "input" else new)
    return made


def scalars(trial: Trial) -> list[Check]:
    """The scalars that a source's module is constructed with, each changed alone where the
    reference accepts that.
    """
    subject = pair_of(trial)
    if subject is None:
        return not_applicable("perturb", "the scalars of a Program are part of its region")
    found: list[Agreement | None] = []
    variants = list(_other_scalars(subject.form.init))
    for what, init in variants[: trial.rounds(12)]:
        other = subject.with_init(init)
        try:
            other.eager(make_inputs(other, 1, "normal", trial.device, examples=trial.examples))
        except (ReferenceFailure, ValueError):
            found.append(None)
            continue
        found.append(attempted(trial, what, partial(_with_scalar, trial, other, what)))
    return summed_up("perturb", found, "no constructor scalar that eager takes another value for")


def _with_scalar(trial: Trial, other: PairSubject, what: str) -> Agreement:
    aside = trial.aside(other, f"candidate {what}")
    return tried(aside, aside.draw("normal"), what) or Agreement(what)


def _other_scalars(init: Any) -> Iterator[tuple[str, Any]]:
    """Packed arguments with one number or flag changed: floats by half, counts by one, flags
    turned.
    """
    for path, value in _leaves(init):
        where = ".".join(map(str, path))
        if isinstance(value, bool):
            yield f"{where} = {not value}", _replaced(init, path, not value)
        elif isinstance(value, float):
            yield f"{where} = {value * 1.5 or 0.1:g}", _replaced(init, path, value * 1.5 or 0.1)
        elif isinstance(value, int):
            yield f"{where} = {value + 1}", _replaced(init, path, value + 1)


def _leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(data, dict):
        for key, item in data.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(data, list):
        for index, item in enumerate(data):
            yield from _leaves(item, (*path, index))
    else:
        yield path, data


def _replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = _replaced(copy[path[0]], path[1:], value)
    return copy
