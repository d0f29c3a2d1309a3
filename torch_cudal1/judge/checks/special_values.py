"""Detector of special values: NaN, infinities, signed zeros, ties, the ends of the half types,
denormals, values just above one.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.agreement import Agreement, agreement, attempted, refused
from torch_cudal1.judge.checks.numerics import first_two
from torch_cudal1.judge.reference.compare import mask_mismatches, same_masks, unit_roundoff
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.inputs import clone_strided
from torch_cudal1.judge.reference.region_reference import Outputs, ReferenceFailure, Result
from torch_cudal1.judge.reference.source_reference import PairSubject
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.wire.channel import storage_extent

__all__ = ["special", "with_an_infinity"]

_SPECIAL_INPUTS = 6
_TINY = {torch.float16: 1e-6, torch.float64: 1e-310}  # denormals; 1e-40 in float32 and bfloat16
_TURNED = 1e-5  # of the infinities: numbers so near zero that rounding decides their sign
_FEW, _MOST_STIRRED = (
    1e-4,
    1e-3,
)  # of all elements: those that may differ, and those that rounding may decide at all
# what rounding decides changes sides in half of them: of six such numbers 12 would miss one in 700
# trials
_STIRS = 20
_STIRRED_BY, _MOST_STIRRED_BY, _STIRRED_BY_TF32 = (
    64,
    2.0**-6,
    2.0**-8,
)  # units in the last place; where products round to ten bits
_FLUSHED = 0.25  # of the result's size: rounding a denormal loses less, flushing it loses all
Fill = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def special(trial: Trial) -> list[Check]:
    """One NaN, one infinity, in each floating input in turn: they must reach what they reach in
    eager. Then whole inputs of values that fast arithmetic gets wrong.
    """
    if trial.contract.assume_finite:
        return [
            Check(
                "special",
                True,
                detail="not tested: the user promised finite values (assume_finite)",
            )
        ]
    sample, _ = first_two(trial)
    positions = _special_positions(trial, sample)
    if not positions:
        return [Check("special", True, detail="not applicable: no floating input")]
    checks: list[Check] = []
    values = (
        ("NaN", float("nan")),
        ("infinity", float("inf")),
        ("negative infinity", -float("inf")),
    )
    for what, value in values if trial.profile.all_specials else values[:2]:
        for position in positions:
            variant = _variant(trial, sample, position, what, value)
            failed = _masks_differ(trial, variant, trial.run(variant).outputs)
            trial.drop(variant)
            if failed:
                return [
                    *checks,
                    Check("special", False, detail=f"one {what} in input {position}{failed}"),
                ]
        checks.append(Check("special", True, detail=f"one {what} in each of inputs {positions}"))
    return [*checks, *_whole_inputs(trial, sample)] if trial.profile.all_specials else checks


def with_an_infinity(trial: Trial, sample: Sample) -> Generator[Sample]:
    """`sample` with an infinity in each of some floating inputs in turn, as `special` takes it;
    each is dropped after use.
    """
    for position in _special_positions(trial, sample):
        variant = _variant(trial, sample, position, "infinity", float("inf"))
        try:
            yield variant
        finally:
            trial.drop(variant)


def _variant(trial: Trial, sample: Sample, position: int, what: str, value: float) -> Sample:
    return trial.derive(
        sample, f"{what} in input {position}", partial(_one_replaced, position, value)
    )


def _special_positions(trial: Trial, sample: Sample) -> list[int]:
    """Floating inputs, those that are no parameters first, at most six; which of many is a secret."""
    floating = [i for i, t in enumerate(sample.inputs) if t.dtype.is_floating_point and t.numel()]
    drawn = random.SystemRandom().sample(floating, len(floating))
    return sorted(sorted(drawn, key=lambda i: trial.subject.roles[i] != "input")[:_SPECIAL_INPUTS])


def _one_replaced(
    position: int, value: float, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    return [_with_one(tensor, value) if i == position else None for i, tensor in enumerate(inputs)]


def _with_one(tensor: torch.Tensor, value: float) -> torch.Tensor:
    copy = clone_strided(tensor)
    index = tuple(random.SystemRandom().randrange(size) for size in tensor.shape)
    copy.as_strided(
        (1,), (1,), sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
    ).fill_(value)
    return copy


def _masks_differ(trial: Trial, sample: Sample, outputs: Outputs) -> str:
    """What differs, "" if nothing does. PyTorch's own ways differ too, and each is as good a
    witness: whether a product with a zero that stands for nothing is formed is up to the algorithm
    that cuDNN chooses, and Inductor lowers some operators to formulas that treat infinities
    differently from eager's kernels.
    """
    for position, (out, expected) in enumerate(zip(outputs, sample.reference.outputs, strict=True)):
        if out is None or expected is None or same_masks(out, [expected]).passed:
            continue
        witnesses = [expected]
        exact = sample.exact_at(
            position
        )  # eager's algorithm may spread a NaN where float64 does not
        found = same_masks(out, witnesses, exact)
        if not found.passed and (native := _without_cudnn(trial, sample, position)) is not None:
            witnesses.append(native)
            found = same_masks(out, witnesses, exact)
        if not found.passed and (compiled := _by_inductor(trial, sample, position)) is not None:
            witnesses.append(compiled)
            found = same_masks(out, witnesses, exact)
        if found.passed or _chance_signs(out, witnesses, exact):
            continue
        if not _by_rounding(trial, sample, position, mask_mismatches(out, witnesses, exact)):
            return f"; output {position}: {found.detail}"
    return ""


def _by_inductor(trial: Trial, sample: Sample, position: int) -> torch.Tensor | None:
    """One output as torch.compile computes it, None where it cannot. Sources do not reach that
    process; Programs cannot meddle.
    """
    if isinstance(trial.subject, PairSubject):
        try:
            return (
                trial.subject.in_way(replace(trial.subject.way, compiled="default"))
                .eager(sample.inputs)
                .outputs[position]
            )
        except ReferenceFailure:
            return None
    own = trial.candidate.schedule
    try:
        return trial.reference_in_child(own if own.startswith("inductor") else "inductor", sample)[
            position
        ]
    except CandidateFailure:
        if not trial.child.usable:
            raise
        return None


def _chance_signs(
    out: torch.Tensor, witnesses: Sequence[torch.Tensor], exact: torch.Tensor | None
) -> bool:
    """Whether all that differs are signs of infinities, no more often than between right
    evaluations: an infinite scale makes an infinity of a number that rounding leaves on one side of
    zero or the other.
    """
    eager = witnesses[0]
    turned = out.isinf() & (out == -eager)
    if not same_masks(torch.where(turned, eager, out), witnesses, exact).passed:
        return False
    by_rounding = (
        0 if exact is None else max(int((w.isinf() & (w == -exact)).sum()) for w in witnesses)
    )
    return int(turned.sum()) <= 2 * by_rounding + _TURNED * int(eager.isinf().sum())


def _by_rounding(trial: Trial, sample: Sample, position: int, wrong: torch.Tensor) -> bool:
    """Whether rounding decides at each of the few `wrong` elements: there eager itself yields
    another of NaN, infinities and finite numbers when its inputs move by little more than rounding.
    A ReLU before an infinite weight makes NaN of a zero and an infinity of a number just above it.

    Inputs at which eager changes in many places prove nothing: what is compared with a constant
    would excuse anything.
    """
    eager = sample.reference.outputs[position]
    if eager is None or eager.shape != wrong.shape or int(wrong.sum()) > _FEW * wrong.numel():
        return False
    try:
        return _changes_where(trial, sample, position, wrong)
    except (ReferenceFailure, torch.OutOfMemoryError):
        return False


def _changes_where(trial: Trial, sample: Sample, position: int, wrong: torch.Tensor) -> bool:
    eager, changed = sample.reference.outputs[position], torch.zeros_like(wrong)
    for _ in range(_STIRS):
        moved = sample.eager(_stirred(trial, sample.inputs)).outputs[position]
        if eager is None or moved is None:
            return False
        changed |= (
            (moved.isnan() != eager.isnan())
            | (moved.isinf() != eager.isinf())
            | (moved.isinf() & (moved != eager))
        )
        if not bool((wrong & ~changed).any()):
            return int(changed.sum()) <= _MOST_STIRRED * changed.numel()
    return False


def _stirred(trial: Trial, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Every floating number a little larger or smaller; zeros, infinities and NaN stay what they
    are.
    """
    tf32 = _STIRRED_BY_TF32 if trial.device.type == "cuda" and trial.contract.rights else 0.0

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dtype.is_floating_point or not tensor.numel():
            return tensor
        by = max(min(_STIRRED_BY * unit_roundoff(tensor.dtype), _MOST_STIRRED_BY), tf32)
        copy = clone_strided(tensor)
        flat = copy.as_strided((storage_extent(copy.shape, copy.stride()),), (1,))
        flat.mul_(1 + by * (2 * _chance(flat, flat.dtype) - 1))
        return copy

    return [moved(tensor) for tensor in inputs]


def _chance(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As many numbers in [0, 1), none of them from the user's generators."""
    generator = torch.Generator(flat.device).manual_seed(secrets.randbits(63))
    return torch.rand(flat.shape, dtype=dtype, device=flat.device, generator=generator)


def _without_cudnn(trial: Trial, sample: Sample, position: int) -> torch.Tensor | None:
    """One output of eager in kernels of PyTorch's own, None where that cannot be had. Sums over
    taps of a transposed convolution are over those that exist there.
    """
    if trial.device.type != "cuda" or not torch.backends.cudnn.enabled:
        return None
    torch.backends.cudnn.enabled = False
    try:
        return sample.eager(sample.inputs).outputs[position]
    except ReferenceFailure:  # more memory than there is, or no such kernel
        return None
    finally:
        torch.backends.cudnn.enabled = True


def _whole_inputs(trial: Trial, base: Sample) -> Iterator[Check]:
    for what, fill, judged in _FILLS:
        sample = trial.derive(base, what, partial(_filled, trial, fill))
        if refused(sample):
            continue
        found = attempted(trial, what, partial(_judged, trial, sample, what, judged))
        trial.drop(sample)
        yield Check(
            "special",
            not found.problem,
            found.ratio,
            found.limit,
            f"{what}: {found.problem}" if found.problem else what,
        )
        if found.problem:
            return


def _judged(
    trial: Trial,
    sample: Sample,
    what: str,
    judged: Callable[[Trial, Sample, Result, str], Agreement],
) -> Agreement:
    return judged(trial, sample, trial.run(sample), what)


def _filled(trial: Trial, fill: Fill, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    made: list[torch.Tensor | None] = []
    for tensor, role in zip(inputs, trial.subject.roles, strict=True):
        if role != "input" or not tensor.dtype.is_floating_point:
            made.append(None)
            continue
        copy = clone_strided(tensor)
        flat = copy.as_strided((storage_extent(copy.shape, copy.stride()),), (1,))
        flat.copy_(fill(flat, _chance(flat, torch.float32)))
        made.append(copy)
    return made


def _floats_agree(trial: Trial, sample: Sample, result: Result, what: str) -> Agreement:
    """Which of equal values an index points at is nobody's promise, so indices are left out."""
    outputs: Outputs = [
        theirs
        if ours is not None and theirs is not None and not theirs.dtype.is_floating_point
        else ours
        for ours, theirs in zip(result.outputs, sample.reference.outputs, strict=True)
    ]
    return agreement(trial, sample, Result(outputs, result.facts, result.tree), what)


def _not_flushed(trial: Trial, sample: Sample, result: Result, what: str) -> Agreement:
    """Denormals have few digits, so only losing them counts."""
    worst = 0.0
    for position, (ours, theirs) in enumerate(
        zip(result.outputs, sample.reference.outputs, strict=True)
    ):
        exact = sample.exact_at(position)
        if (
            ours is None
            or theirs is None
            or exact is None
            or not theirs.dtype.is_floating_point
            or not theirs.numel()
        ):
            continue
        peak = (
            float(exact.abs().nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
        )  # squares of denormals vanish even in float64
        own, error, size = (
            _rms_of(t, peak) for t in (theirs.double() - exact, ours.double() - exact, exact)
        )
        limit = max(4 * own, _FLUSHED * size)
        if error > limit:
            return Agreement(
                what,
                f"output {position} is off by {error / size if size else error:.2g} of itself",
                error,
                limit,
            )
        worst = max(worst, error / limit if limit else 0.0)
    return Agreement(what, "", worst, 1.0)


def _rms_of(values: torch.Tensor, peak: float) -> float:
    finite = values[values.isfinite()] / peak
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _zero_signs(trial: Trial, sample: Sample, result: Result, what: str) -> Agreement:
    """Signs of zeros, where eager hands values of its inputs on: copies, gathers."""
    given = torch.cat([t.reshape(-1).double() for t in sample.inputs if t.dtype.is_floating_point])
    found = agreement(trial, sample, result, what)
    for position, (ours, theirs) in enumerate(
        zip(result.outputs, sample.reference.outputs, strict=True)
    ):
        if (
            found.problem
            or ours is None
            or theirs is None
            or not theirs.dtype.is_floating_point
            or not _copied(given, theirs)
        ):
            continue
        wrong = int(((theirs == 0) & (ours.signbit() != theirs.signbit())).sum())
        if wrong:
            return Agreement(
                what, f"output {position}: {wrong} zeros have the other sign", float(wrong), 0.0
            )
    return found


def _copied(given: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether every value of a result is a value of the inputs; zeros alone prove nothing."""
    other = result[result != 0].double()
    return other.numel() > 0 and bool(torch.isin(other, given).all())


def _beyond_half(flat: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """65,504 to 70,000 with a random sign; float16 itself ends where this begins."""
    top = 65_504.0 if flat.dtype == torch.float16 else 65_504.0 + 4_496.0 * chance
    return torch.where(flat < 0, -1.0, 1.0) * top


_FILLS: tuple[tuple[str, Fill, Callable[[Trial, Sample, Result, str], Agreement]], ...] = (
    ("ties", lambda flat, chance: flat.round(), _floats_agree),
    (
        "negative zeros",
        lambda flat, chance: torch.where(chance < 0.5, -0.0 * torch.ones_like(flat), flat),
        _zero_signs,
    ),
    ("values around 65,504 to 70,000", _beyond_half, agreement),
    ("1 + k / 4096", lambda flat, chance: 1 + (chance * 8).floor() / 4_096, agreement),
    ("denormals", lambda flat, chance: flat * _TINY.get(flat.dtype, 1e-40), _not_flushed),
)
