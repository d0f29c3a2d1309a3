"""The one comparison: is a result as right as the baseline's own, measured against float64 and
scaled by the output.

Four criteria: (A) the same NaN and infinities, (B) rms error, (C) worst element, (D) equality where
eager is exact by nature. It compares values; form, aliasing and repeatability are other checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from torch_cudal1.judge.reference.error_statistics import (
    ErrorStatistics,
    Results,
    all_finite,
    count_beyond,
    iter_flat_blocks,
    measure_errors,
    root_mean_square,
)
from torch_cudal1.judge.wire.tensor_bits import same_bits

__all__ = [
    "EAGER_AGAINST_ITSELF",
    "Comparison",
    "compare",
    "compare_tied_indices",
    "is_grossly_equal",
    "is_nearer",
    "mask_mismatches",
    "same_masks",
    "same_numbers",
    "sampling_margin",
    "unit_roundoff",
]

# Twice eager's rms error, half types included; PyTorch's `same` takes 3 for these. Its absolute
# term of 1e-5 would admit ten times the error of a float32 product, so there is none.
_RMS_FACTOR = 2.0  # (B)
# Round-offs of the output's format and of the accumulator are separate terms: one limit with both
# would be all of the scale for bfloat16 and 4,096 terms.
_WORST_FACTOR, _ROUND_OFFS, _GROWTH = 4.0, 8.0, 4.0  # (C)
_HALF_FRACTION = 1e-5  # elements of a half type that may exceed (C)
# eager's own relative error above which a distribution has no digits left to compare
_VOID_RATIO = 0.1
# below this many elements eager's rms error is an estimate, and the limit allows for its spread
_POOL = 4_096
# Below this many elements eager's error is one draw. A sum of 65,536 numbers in another order,
# the only result, was refused for an rms error of 6.2e-5 where eager's was 1.1e-6 (one of 130
# judgements on H100s); of 300 honest sums five were refused before this rule, none since.
_FEW = 64
# the public benchmark's; 1e-4 for anything wider
_FLAT_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-2}
_HALF = (torch.float16, torch.bfloat16)
_Sensitivity: TypeAlias = Callable[[], torch.Tensor | None]


@dataclass(frozen=True)
class Comparison:
    """One output on one input set. `ratio`: rms error over the baseline's; `limit`: allowed ratio;
    `void`: nothing to compare.
    """

    passed: bool
    ratio: float | None = None
    limit: float | None = None
    detail: str = ""
    void: bool = False


EAGER_AGAINST_ITSELF = Comparison(True, 1.0, _RMS_FACTOR, "eager's own numbers")


def compare(
    candidate: torch.Tensor,
    baseline: torch.Tensor,
    exact: torch.Tensor | None,
    *,
    precision: str = "match",
    longest: int = 1,
    drift: float = 0.0,
    slack: float = 1.0,
    sensitivity: _Sensitivity = lambda: None,
) -> Comparison:
    """Judge one output. `exact` is the float64 result (None: none can be had); `longest` the
    longest reduction of the region.

    `drift`, without `exact` only: the relative rms that rounding to coarser formats inside the
    region may add. `slack`, with it only: times the error that is allowed, where the question is
    whether a result is this one's or another's. `sensitivity`: asked where only a few elements are
    off, yields how far the float64 result moves with its inputs (None: unknown).
    """
    # Form first: values of another shape or dtype cannot be set against each other.
    if candidate.shape != baseline.shape or candidate.dtype != baseline.dtype:
        form = f"{tuple(candidate.shape)} {candidate.dtype}, expected {tuple(baseline.shape)} {baseline.dtype}"
        return Comparison(False, detail=form)
    if not baseline.numel():
        return Comparison(True, detail="empty")
    if not (baseline.dtype.is_floating_point or baseline.dtype.is_complex):
        return _compare_exactly(candidate, baseline, exact)
    if baseline.dtype.is_complex:
        # Real and imaginary parts each have rounding of their own.
        candidate, baseline, exact = (
            _split_complex(candidate),
            _split_complex(baseline),
            _split_complex(exact),
        )
    special = _compare_special_values(candidate, baseline, exact)
    if special is not None:
        return special
    if precision == "kernelbench":
        return _compare_flat(candidate, baseline)
    if exact is None:
        return _compare_without_float64(candidate, baseline, longest, drift, sensitivity)
    return _compare_with_float64((candidate, baseline, exact), longest, slack, sensitivity)


def compare_tied_indices(
    candidate: torch.Tensor,
    baseline: torch.Tensor,
    values: torch.Tensor,
    dim: int | None,
    longest: int = 1,
) -> Comparison:
    """Indices that differ from eager's pass where the float64 values they point at differ by less
    than criterion (C) lets values differ.
    """
    if dim is None:
        values, dim, candidate, baseline = (
            values.reshape(-1),
            0,
            candidate.reshape(-1),
            baseline.reshape(-1),
        )
    elif candidate.dim() < values.dim():
        candidate, baseline = candidate.unsqueeze(dim), baseline.unsqueeze(dim)
    # An index that appears twice would let one element stand for two of a top-k.
    size = values.shape[dim]
    distinct = candidate.sort(dim).values.diff(dim=dim)
    if int(candidate.min()) < 0 or int(candidate.max()) >= size or not bool((distinct != 0).all()):
        return Comparison(False, detail=f"indices outside 0 to {size - 1}, or one twice")
    gap = (values.gather(dim, candidate) - values.gather(dim, baseline)).abs()
    # Rows of zeros have no scale.
    scale = values.abs().amax(dim, keepdim=True).clamp_min(1e-300)
    # The round-off of float32, in which the values are computed in nearly all regions.
    unit = unit_roundoff(torch.float32)
    limit = _ROUND_OFFS * unit + _GROWTH * math.sqrt(longest) * unit
    worst = float((gap / scale).nan_to_num(nan=math.inf).max())
    return Comparison(
        worst <= limit, worst, limit, f"{int((candidate != baseline).sum())} ties taken otherwise"
    )


def same_numbers(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Whether two results have equal form and values (zeros of either sign are equal), or equal
    bits, so that errors measured of one hold for the other.
    """
    if first is None or second is None:
        return first is second
    if first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second):
        return True
    return same_bits(first, second)


def is_nearer(candidate: torch.Tensor, baseline: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a floating result is at least ten times nearer to float64 than eager's.

    False for random draws: what float64 draws otherwise is as far from a candidate's result as from
    eager's.
    """
    # Integers have no rounding to be nearer by.
    errors = (
        measure_errors((candidate, baseline, exact), 0.0)
        if candidate.dtype.is_floating_point
        else None
    )
    return errors is not None and errors.error <= errors.baseline_error / 10


def same_masks(
    candidate: torch.Tensor, references: Sequence[torch.Tensor], exact: torch.Tensor | None = None
) -> Comparison:
    """NaN and infinities only: each element as one of `references` has it, or as float64 has it
    where eager spread a NaN.
    """
    first = references[0]
    if candidate.shape != first.shape or not (
        first.dtype.is_floating_point or first.dtype.is_complex
    ):
        return Comparison(candidate.shape == first.shape)
    return _describe_mismatch(mask_mismatches(candidate, references, exact))


def mask_mismatches(
    candidate: torch.Tensor, references: Sequence[torch.Tensor], exact: torch.Tensor | None = None
) -> torch.Tensor:
    """The elements at which `same_masks` finds a difference; of complex numbers both parts."""
    return torch.stack(
        [
            _mask_mismatch(_split_complex(candidate), _split_complex(r), _split_complex(exact))
            for r in references
        ]
    ).all(0)


def is_grossly_equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """The same computation in perhaps another precision: rms difference up to 1 % (5 % for half
    types). It proves nothing.
    """
    if first is None or second is None:
        return first is second
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.dtype.is_floating_point:
        return True  # choices among rounded numbers may differ; a baseline is PyTorch's own work
    difference = size = lost = 0.0
    # In blocks: no temporaries of the results' size.
    for block, other_block in iter_flat_blocks(first, second):
        a, b = block.double(), other_block.double()
        finite = a.isfinite() & b.isfinite()
        difference = math.hypot(difference, _compute_norm(torch.where(finite, a - b, 0.0)))
        size = math.hypot(size, _compute_norm(torch.where(finite, b, 0.0)))
        lost += float((~finite).sum())
    # bfloat16 keeps two to three digits. Where half of the elements are NaN or infinite the rest is
    # no evidence.
    return difference <= (5e-2 if first.dtype in _HALF else 1e-2) * size and (
        not lost or lost < 0.5 * first.numel()
    )


def _compute_norm(values: torch.Tensor) -> float:
    return root_mean_square(values) * math.sqrt(values.numel())


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: 2^-24 for float32, 2^-11 float16, 2^-8 bfloat16."""
    return torch.finfo(dtype).eps / 2


def _compare_exactly(
    candidate: torch.Tensor, baseline: torch.Tensor, exact: torch.Tensor | None
) -> Comparison:
    """(D). Where eager itself differs from float64 (a comparison of rounded numbers), up to twice
    as many elements may.
    """
    # Eager's own numbers need no float64 run.
    wrong = int((candidate != baseline).sum())
    if wrong == 0:
        return Comparison(True, 0.0, 0.0)
    if exact is not None and exact.dtype == baseline.dtype:
        allowed = 2 * int((baseline != exact).sum())
        wrong = int((candidate != exact).sum())
    else:
        allowed = 0
    return Comparison(
        wrong <= allowed,
        float(wrong),
        float(allowed),
        f"{wrong} of {baseline.numel()} elements differ",
    )


def _compare_special_values(
    candidate: torch.Tensor, baseline: torch.Tensor, exact: torch.Tensor | None
) -> Comparison | None:
    """None when the masks agree, else the failure."""
    # Sums prove it in the usual case; masks of the results' size are made only otherwise.
    if all_finite(baseline) and all_finite(candidate):
        return None
    comparison = _describe_mismatch(_mask_mismatch(candidate, baseline, exact))
    return None if comparison.passed else comparison


def _mask_mismatch(
    candidate: torch.Tensor, baseline: torch.Tensor, exact: torch.Tensor | None
) -> torch.Tensor:
    """NaN and Inf where eager has them; or what float64 has: a finite number that fits the type, an
    infinity where eager has a NaN (a fast formula may turn an infinite weight into a difference of
    infinities).
    """
    alike = (candidate.isnan() & baseline.isnan()) | (candidate == baseline)
    # Finite beside finite: how far they are apart is for the other criteria.
    allowed = alike | (baseline.isfinite() & candidate.isfinite())
    if exact is not None:
        # Eager may overflow on the way to a finite result; a candidate that does not is no worse.
        allowed |= candidate.isfinite() & (exact.abs() <= torch.finfo(baseline.dtype).max)
        allowed |= baseline.isnan() & (candidate == exact.to(baseline.dtype))
    return ~allowed


def _describe_mismatch(wrong: torch.Tensor) -> Comparison:
    count = int(wrong.sum())
    detail = (
        f"NaN or infinity differs from eager's in {count} of {wrong.numel()} elements"
        if count
        else ""
    )
    return Comparison(not count, detail=detail)


def _split_complex(tensor: Any) -> Any:
    return torch.view_as_real(tensor) if tensor is not None and tensor.dtype.is_complex else tensor


def _compare_flat(candidate: torch.Tensor, baseline: torch.Tensor) -> Comparison:
    # Absolute and relative tolerance are equal, as in KernelBench's `allclose`.
    tolerance = _FLAT_TOLERANCE.get(baseline.dtype, 1e-4)
    a, b = candidate.double(), baseline.double()
    # Where NaN and infinities have to be was compared before.
    finite = a.isfinite() & b.isfinite()
    excess = (
        float(((a - b).abs() / (tolerance + tolerance * b.abs()))[finite].max())
        if bool(finite.any())
        else 0.0
    )
    return Comparison(
        excess <= 1, excess, 1.0, f"largest |a-b| / (tol + tol |b|) at tolerance {tolerance:g}"
    )


def _compare_without_float64(
    candidate: torch.Tensor,
    baseline: torch.Tensor,
    longest: int,
    drift: float,
    sensitivity: _Sensitivity,
) -> Comparison:
    """Without float64: two correctly rounded evaluations differ by no more than their format and
    their sums allow.
    """
    # The baseline stands for float64 too, so its own error is 0 and only the candidate's counts.
    comparison = _compare_within((candidate, baseline, baseline), longest, drift)
    if comparison.passed or (sensitivities := sensitivity()) is None:
        return comparison
    return _compare_within((candidate, baseline, baseline), longest, drift, sensitivities)


def _compare_within(
    results: Results, longest: int, drift: float, sensitivities: torch.Tensor | None = None
) -> Comparison:
    out, accumulate = _choose_roundoffs(results[1].dtype)
    errors = measure_errors(results, accumulate, sensitivities)
    if errors is None:
        return Comparison(True, void=True, detail="no finite element")
    rms, worst = errors.error, errors.worst
    scale = (
        errors.scale
        if sensitivities is None
        else max(errors.scale, root_mean_square(sensitivities))
    )
    # Two roundings of the result on each side, and the accumulated ones of the sums.
    rms_limit = (4 * out + math.sqrt(longest) * accumulate + drift) * scale
    worst_limit = 2 * _ROUND_OFFS * out + 2 * _GROWTH * (math.sqrt(longest) * accumulate + drift)
    detail = f"no float64 result; against eager: rms {rms:.3g} of {rms_limit:.3g}, worst {worst:.3g} of {worst_limit:.3g}"
    return Comparison(
        rms <= rms_limit and worst <= worst_limit,
        rms / rms_limit if rms_limit else rms,
        1.0,
        detail,
    )


def _compare_with_float64(
    results: Results, longest: int, slack: float, sensitivity: _Sensitivity
) -> Comparison:
    out, accumulate = _choose_roundoffs(results[1].dtype)
    errors = measure_errors(results, accumulate)
    if errors is None:
        return Comparison(True, void=True, detail="no finite element")
    baseline_error, error = errors.baseline_error, errors.error
    # Eager has no digits left there, so nothing can be compared: no evidence either way.
    if errors.scale > 0 and baseline_error > _VOID_RATIO * errors.scale:
        return Comparison(
            True,
            void=True,
            detail=f"eager's own relative error is {baseline_error / errors.scale:.2g}",
        )
    # No result is asked to beat one round-off: of few elements, of the output; of many, of the
    # sums.
    floor = (2 * out if errors.count < _FEW else accumulate) * errors.scale
    # Eager's rms of few elements is an estimate that may come out too small by chance.
    limit = slack * max(_RMS_FACTOR * sampling_margin(errors.effective) * baseline_error, floor)
    ratio = (
        error / baseline_error
        if baseline_error
        else (0.0 if error == 0 else error / max(floor, 1e-300))
    )
    # Asked last and only here: it takes four more runs in float64.
    if error > limit and errors.count < _FEW and (sensitivities := sensitivity()) is not None:
        limit = max(
            limit,
            slack * _bound_error(out, accumulate, longest) * root_mean_square(sensitivities),
        )
    if error > limit:
        return Comparison(
            False,
            ratio,
            limit / baseline_error if baseline_error else 1.0,
            f"rms error {error:.3g}, allowed {limit:.3g}, eager {baseline_error:.3g}",
        )
    growth = _ROUND_OFFS * out + _GROWTH * math.sqrt(longest) * accumulate
    problem = _describe_worst(results, errors, growth, slack)
    # Asked last and only here: it takes four more runs in float64.
    if problem and (sensitivities := sensitivity()) is not None:
        problem = _describe_worst(
            results,
            measure_errors(results, accumulate, sensitivities) or errors,
            growth,
            slack,
            sensitivities,
        )
    return Comparison(
        not problem,
        ratio,
        max(_RMS_FACTOR, limit / baseline_error) if baseline_error else _RMS_FACTOR,
        problem,
    )


def _bound_error(out: float, accumulate: float, longest: int) -> float:
    """What a right result of a few elements may be off by, of the size of the terms of its sums.

    Eager's error is one draw then, and the quotient of two is anything: of sums of 65,536 normal
    numbers in two good orders one in a hundred is over twenty. A tree of additions makes a
    round-off at each of its levels.
    """
    return 2 * out + math.log2(max(1, longest)) * accumulate


def _describe_worst(
    results: Results,
    errors: ErrorStatistics,
    growth: float,
    slack: float,
    sensitivities: torch.Tensor | None = None,
) -> str:
    """(C): no element may be far off, however good the average is. What is wrong, or nothing.

    What is left of a row in which sums cancel is as small as chance has it, and eager's error there
    is one draw: their quotient says nothing. With `sensitivities` a row is as large as the terms of
    its sums are.
    """
    dtype = results[1].dtype
    limit = slack * (_WORST_FACTOR * errors.worst_baseline_error + growth)
    if errors.worst <= limit:
        return ""
    # A half type may exceed the limit in one element of 100,000, float32 in none.
    count = count_beyond(results, _choose_roundoffs(dtype)[1], limit, sensitivities)
    if count <= (_HALF_FRACTION * errors.count if dtype in _HALF else 0):
        return ""
    return f"{count} elements off by up to {errors.worst:.3g} of their slice, allowed {limit:.3g}"


def _choose_roundoffs(dtype: torch.dtype) -> tuple[float, float]:
    # Kernels accumulate half types in float32.
    return unit_roundoff(dtype), unit_roundoff(
        torch.float64 if dtype == torch.float64 else torch.float32
    )


def sampling_margin(count: int) -> float:
    """How far an rms of `count` samples may lie below the true one (chi-square 1 % quantile,
    Wilson-Hilferty); 1 from 4,096 on.
    """
    if count >= _POOL:
        return 1.0
    # Wilson and Hilferty: the cube root of a chi-square over its degrees is nearly normal; 2.326 is
    # the 1 % quantile.
    term = 2 / (9 * count)
    root = max(1 - term - 2.326 * math.sqrt(term), 0.0)
    return 1 / math.sqrt(max(root**3, 0.01))
