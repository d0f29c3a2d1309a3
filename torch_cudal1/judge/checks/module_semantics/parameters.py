"""Check of what a candidate does with parameters: each alone must matter as in eager."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.linalg import vector_norm

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    disagree_on_error,
    eager_refuses,
    get_source_reference,
    report_not_applicable,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.compare import same_numbers, unit_roundoff
from torch_cudal1.judge.reference.error_statistics import iter_flat_blocks
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.inputs import clone_strided
from torch_cudal1.judge.reference.region_reference import Outputs
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.wire.channel import storage_extent

__all__ = [
    "PERTURB",
    "check_perturbations",
    "perturb_tensor",
]

# tried in turn where a change cannot be seen, at most six
_ADAPTED = ("small", "shifted", "uniform", "large", "sparse", "impulse")
_VISIBLE_RATIO = 4.0  # a change counts as seen when it is so many times what rounding may do to it
# of the result itself: what rounding does to a result that has digits at all is less
_PLAIN_FRACTION = 0.25


@dataclass(frozen=True)
class _Change:
    """A change of a result (rms): the error of the candidate's change, its limit, the size of the
    exact change, and the size of the result.
    """

    error: float
    limit: float
    size: float
    result: float

    @property
    def is_visible(self) -> bool:
        return self.size > _VISIBLE_RATIO * self.limit


def check_perturbations(trial: Trial) -> list[CheckResult]:
    """Each parameter, buffer and, of several, plain input alone moves by 0.1 to 1 of itself:
    eager's change is reproduced.
    """
    first, _ = trial.first_two
    positions = _draw_positions(trial, first)
    if not positions:
        return report_not_applicable("perturb", "one plain input and no parameters")
    # The result before the change, by the candidate itself: it is its change that is compared.
    before = trial.run(first).outputs
    unseen: list[int] = []
    worst = Agreement("")
    for position in positions:
        agreement = _compare_change_of(trial, first, before, position, "normal")
        # A change that drowns in rounding is tried on inputs where it may show.
        for distribution in (
            _ADAPTED[: trial.count_affordable_sets(len(_ADAPTED), 0.02)]
            if agreement is None
            else ()
        ):
            base = trial.derive_sibling(first, distribution)
            agreement = _compare_change_of(trial, base, None, position, distribution)
            if agreement is not None:
                break
        if agreement is None:
            unseen.append(position)
        elif agreement.problem:
            return [
                CheckResult(
                    "perturb",
                    False,
                    agreement.ratio,
                    agreement.limit,
                    f"{_name_input(trial, position)} alone: {agreement.problem}",
                )
            ]
        elif (agreement.ratio or 0.0) >= (worst.ratio or 0.0):
            worst = agreement
    detail = f"{len(positions)} of {len(_list_positions(trial, first))} parameters, buffers and inputs moved alone"
    if unseen:
        detail += (
            f"; unobservable: {', '.join(_name_input(trial, position) for position in unseen)}"
        )
    return [CheckResult("perturb", True, worst.ratio, worst.limit, detail)]


def _list_positions(trial: Trial, sample: InputSet) -> list[int]:
    roles = trial.reference.roles
    plain = [
        i
        for i, role in enumerate(roles)
        if role == "input" and sample.inputs[i].dtype.is_floating_point
    ]
    # A moved mask would be another computation.
    of_module = [
        i for i, role in enumerate(roles) if role != "input" and i not in trial.facts.structural
    ]
    numbers = [i for i in of_module if sample.inputs[i].dtype.is_floating_point]
    # A single plain input has moved in every set of `numerics` already.
    return [i for i in numbers + (plain if len(plain) > 1 else []) if sample.inputs[i].numel()]


# Which of many is secret, and how many is a matter of time.
def _draw_positions(trial: Trial, sample: InputSet) -> list[int]:
    positions = _list_positions(trial, sample)
    return sorted(
        random.SystemRandom().sample(
            positions,
            min(len(positions), trial.count_affordable_sets(trial.profile.perturbed, 0.2)),
        )
    )


def _compare_change_of(
    trial: Trial, base: InputSet, before: Outputs | None, position: int, distribution: str
) -> Agreement | None:
    """None where the change cannot be told from rounding."""
    if eager_refuses(base):
        return None
    before = trial.run(base).outputs if before is None else before

    def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return [perturb_tensor(t) if i == position else None for i, t in enumerate(inputs)]

    variant = trial.derive(base, f"moved {position} {distribution}", make)
    if eager_refuses(variant):
        return None

    def ask() -> Agreement:
        return _compare_changes(trial, (base, before), (variant, trial.run(variant).outputs))

    agreement = disagree_on_error(trial, "moved alone", ask)
    trial.drop(variant)
    # Neither wrong nor visible: other inputs may show it.
    return agreement if agreement.problem or agreement.ratio is not None else None


def _compare_changes(
    trial: Trial, old: tuple[InputSet, Outputs], new: tuple[InputSet, Outputs]
) -> Agreement:
    """The first output whose change is wrong, else the worst ratio; no ratio where no output shows
    the change.
    """
    worst: float | None = None
    for position, there in enumerate(trial.reference.outputs):
        if (
            not there
            or (change := _measure_change(trial, old, new, position)) is None
            or not change.is_visible
        ):
            continue
        # Only visible changes count: noise has no direction to be compared.
        if change.error > change.limit:
            problem = f"output {position} changes by {change.size:.3g} rms in float64, the candidate is {change.error:.3g} off"
            return Agreement("", problem, change.error / change.limit, 1.0)
        worst = max(worst or 0.0, change.error / change.limit)
    return Agreement("", "", worst, None if worst is None else 1.0)


def _measure_change(
    trial: Trial, old: tuple[InputSet, Outputs], new: tuple[InputSet, Outputs], position: int
) -> _Change | None:
    """Differences of two results carry the rounding of both, so eager's own difference sets the
    limit.

    Where both results are eager's own numbers and the change is plain, no float64 run need tell
    that it is there, and right.
    """
    actual = [outputs[position] for _, outputs in (old, new)]
    eager = [sample.expected.outputs[position] for sample, _ in (old, new)]
    # Eager's own numbers: the difference is right, and only its visibility is open.
    if all(same_numbers(x, y) for x, y in zip(actual, eager, strict=True)):
        change = _measure_difference(actual, eager, [None, None])
        if change is None or change.size > _PLAIN_FRACTION * change.result:
            return change
    exact = [sample.get_exact(position) for sample, _ in (old, new)]
    change = _measure_difference(actual, eager, exact)
    if change is not None and change.is_visible and change.error > change.limit:
        # Where TF32 is allowed eager may have used none; the candidate's difference may carry its
        # error.
        granted = [trial.reference.eager_with_tf32(sample.inputs) for sample, _ in (old, new)]
        used = [None if outputs is None else outputs[position] for outputs in granted]
        if all(each is not None for each in used):  # eager may leave unused what it has a right to
            change = _measure_difference(actual, used, exact)
    return change


def _measure_difference(actual: Outputs, eager: Outputs, exact: Outputs) -> _Change | None:
    """Each before and after; eager's in place of float64's where there is none. None where there is
    no floating output.
    """
    a, b = actual
    c, d = eager
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
    # Eager's change stands in where there is no float64 run.
    before, after = (
        (eager_change if each is None else each).double()
        for eager_change, each in zip((c, d), exact, strict=True)
    )
    sums, count = torch.zeros(5, dtype=torch.float64, device=d.device), 0
    for x, y, u, v, e, f in iter_flat_blocks(a, b, c, d, before, after):
        exact_change, actual_change, eager_change = (
            f - e,
            y.double() - x.double(),
            v.double() - u.double(),
        )
        # NaN and infinities are compared as masks elsewhere.
        mask = exact_change.isfinite() & actual_change.isfinite() & eager_change.isfinite()
        here = int(mask.sum())
        parts = [e, f, exact_change, eager_change - exact_change, actual_change - exact_change]
        if here < mask.numel():
            parts = [torch.where(mask, part, 0.0) for part in parts]
        sums += torch.stack([vector_norm(part).square() for part in parts])
        count += here
    if not count:
        return None
    old_rms, new_rms, size, eager_error, error = (sums / count).sqrt().tolist()
    # Eager's error of the difference, and round-offs of both results whose difference it is.
    limit = max(
        3 * eager_error,
        (8 if exact[0] is None else 2) * unit_roundoff(d.dtype) * max(old_rms, new_rms),
    )
    return _Change(error, limit, size, max(old_rms, new_rms))


def perturb_tensor(tensor: torch.Tensor, size: float = 1.0) -> torch.Tensor:
    """Each element times 1 + `size` U(0.1, 1); zeros become `size` U(0.1, 1)."""
    copy = clone_strided(tensor)
    flat = copy.as_strided((storage_extent(copy.shape, copy.stride()),), (1,))
    # A generator of its own: the user's sequence of random numbers stays as it is.
    generator = torch.Generator(flat.device).manual_seed(secrets.randbits(63))
    factor = size * (0.1 + 0.9 * torch.rand(flat.shape, device=flat.device, generator=generator))
    # Nothing times zero would not move.
    flat.copy_(torch.where(flat == 0, factor, flat * (1 + factor)))
    return copy


def _name_input(trial: Trial, position: int) -> str:
    reference = get_source_reference(trial)
    if reference is not None and position < len(reference.form.names):
        return reference.form.names[position]
    return f"{trial.reference.roles[position]} {position}"


PERTURB = CheckSpec(
    name="perturb",
    run=check_perturbations,
    knobs=("perturbed", "budget_s"),
    asks=("each parameter, buffer and input changed alone: is eager's change reproduced"),
)
