"""How far two results lie from float64: rms, worst element and kurtosis, in blocks that stay in the
cache.

On a host a judgement is mostly this arithmetic, so it takes one pass over the results and makes no
temporaries of their size. It sets no limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.linalg import vector_norm

__all__ = [
    "ErrorStatistics",
    "Results",
    "all_finite",
    "count_beyond",
    "iter_flat_blocks",
    "measure_errors",
    "root_mean_square",
]

Results: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # candidate, baseline, float64 (or the baseline instead)
# elements: 1 MiB in float64 on a host, launches that fill the device elsewhere
_BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}
_MIN_ROW_ELEMENTS = 8
_MIN_PEAK, _MAX_PEAK = 1e-70, 1e70  # between these a fourth power is a float64
_ZERO_ROW_SCALE = 1e-300  # the scale of a row of zeros


@dataclass(frozen=True)
class ErrorStatistics:
    """Of the elements that are finite in all three. `baseline_error` is the baseline's error,
    `error` the candidate's, `scale` float64's rms.

    Worst ones are relative to the largest magnitude of their row (of the whole where rows are
    short). `effective`: how many elements `baseline_error` rests on, their number for normal
    errors, fewer where a few large ones make it up.
    """

    count: int
    scale: float
    baseline_error: float
    error: float
    worst_baseline_error: float
    worst: float
    effective: int


def measure_errors(
    results: Results, floor: float, sensitivity: torch.Tensor | None = None
) -> ErrorStatistics | None:
    """Statistics of the errors; a row's scale is never below `floor` of the largest. None where no
    element is finite.

    # Elements that are not finite were compared as masks.
    `sensitivity`: how far each element moves with the inputs, which is what a row that cancels is
    measured by.
    """
    finite = _find_finite(results)
    count = results[2].numel() if finite is None else int(finite.sum())
    if not count:
        return None
    scales = _compute_row_scales(results[2], floor, sensitivity, finite=finite is None)
    # float64, own, candidate; own to the fourth
    squares = torch.zeros(4, dtype=torch.float64, device=results[2].device)
    worst = torch.zeros(2, dtype=torch.float64, device=results[2].device)
    unit = _choose_unit(scales)
    for candidate, baseline, exact, scale in _iter_blocks(results, scales, finite):
        baseline_error, error = (baseline - exact) / unit, (candidate - exact) / unit
        # Sums of squares give both rms errors, that of fourths the kurtosis of eager's.
        own2 = baseline_error.square()
        squares += torch.stack(
            ((exact / unit).square_().sum(), own2.sum(), error.square().sum(), own2.square_().sum())
        )
        worst = torch.maximum(
            worst, torch.stack((_find_worst(baseline_error, scale), _find_worst(error, scale)))
        )
    # a device is asked once: each answer is waited for, and others may use it meanwhile
    scale2, own_2, error_2, fourths, worst_baseline_error, error_worst = torch.cat(
        (squares, worst)
    ).tolist()
    scale_rms, own_rms, error_rms = (
        unit * math.sqrt(value / count) for value in (scale2, own_2, error_2)
    )
    effective = _estimate_effective_count(count, own_2, fourths)
    return ErrorStatistics(
        count,
        scale_rms,
        own_rms,
        error_rms,
        unit * worst_baseline_error,
        unit * error_worst,
        effective,
    )


def _estimate_effective_count(count: int, squares: float, fourths: float) -> int:
    """How many normal errors would spread as these do; all of them where they are too small for a
    fourth power.
    """
    # Squares that vanish in float64 leave no kurtosis.
    if not squares * squares:
        return count
    # 3 is the kurtosis of normal errors; a higher one means that a few large errors make up the
    # rms.
    kurtosis = fourths * count / squares / squares
    return (
        max(1, min(count, round(3 * count / max(kurtosis, 1.0)))) if math.isfinite(kurtosis) else 1
    )


def count_beyond(
    results: Results, floor: float, limit: float, sensitivity: torch.Tensor | None = None
) -> int:
    """How many of the candidate's elements are off by more than `limit` of their row's scale."""
    finite = _find_finite(results)
    blocks = _iter_blocks(
        results, _compute_row_scales(results[2], floor, sensitivity, finite=finite is None), finite
    )
    return sum(
        int(((candidate - exact).abs_() > limit * scale).sum())
        for candidate, _, exact, scale in blocks
    )


def iter_flat_blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of as many elements, side by side in flat blocks."""
    block = _BLOCK_ELEMENTS.get(tensors[0].device.type, _BLOCK_ELEMENTS["cpu"])
    return zip(*(tensor.reshape(-1).split(block) for tensor in tensors), strict=True)


def root_mean_square(values: torch.Tensor) -> float:
    """Root of the mean square; on scaled values where squares would overflow or vanish."""
    plain = float(vector_norm(values)) / math.sqrt(max(values.numel(), 1))
    if values.dtype == torch.float64 and 1e-140 < plain < math.inf:  # one pass without temporaries
        return plain
    peak = float(values.abs().max()) if values.numel() else 0.0
    return (
        peak * math.sqrt(float((values / peak).square().mean()))
        if peak > 0 and math.isfinite(peak)
        else peak
    )


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; a finite sum proves it without a mask."""
    # The sum costs one pass without temporaries; it can overflow although all elements are finite.
    return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())


def _find_finite(results: Results) -> torch.Tensor | None:
    """Where all three are finite; None for everywhere."""
    sums = torch.stack(
        [tensor.sum().double() for tensor in results]
    ).tolist()  # finite ones prove it without a mask
    if all(
        math.isfinite(total) or all_finite(tensor)
        for total, tensor in zip(sums, results, strict=True)
    ):
        return None
    candidate, baseline, exact = results
    return candidate.isfinite() & baseline.isfinite() & exact.isfinite()


def _compute_row_scales(
    exact: torch.Tensor,
    floor: float,
    sensitivity: torch.Tensor | None = None,
    *,
    finite: bool = False,
) -> torch.Tensor:
    """One per row, (rows, 1); one for the whole, (1, 1), where rows are short. `finite`: `exact` is
    known to be.
    """
    width = exact.shape[-1] if _has_rows(exact) else exact.numel()
    scales = _find_row_maxima(exact.reshape(-1, width), finite=finite).double()
    if sensitivity is not None:
        scales = torch.maximum(scales, _find_row_maxima(sensitivity.reshape(-1, width)))
    # A row of zeros would be a division by zero.
    return torch.maximum(scales, (floor * scales.max()).clamp_min(_ZERO_ROW_SCALE))


def _find_row_maxima(rows: torch.Tensor, *, finite: bool = False) -> torch.Tensor:
    """The largest finite magnitude of each row."""
    scales: torch.Tensor = vector_norm(rows, math.inf, dim=1, keepdim=True)
    # One infinity in a row hides the scale of its other elements.
    if finite or bool(scales.isfinite().all()):
        return scales
    return rows.abs().nan_to_num_(nan=0.0, posinf=0.0).amax(1, keepdim=True)


def _has_rows(exact: torch.Tensor) -> bool:
    return exact.dim() > 1 and exact.shape[-1] >= _MIN_ROW_ELEMENTS


def _iter_blocks(
    results: Results, scales: torch.Tensor, finite: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Blocks of candidate, baseline, float64 and the scales of their rows; elements that are not
    finite are 0 in all three.
    """
    parts = (*results, finite) if finite is not None else results
    if scales.numel() == 1:
        cut: Iterator[tuple[torch.Tensor, ...]] = (
            (scales, *block) for block in iter_flat_blocks(*parts)
        )
    else:
        height = max(
            1,
            _BLOCK_ELEMENTS.get(scales.device.type, _BLOCK_ELEMENTS["cpu"]) // results[2].shape[-1],
        )
        rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in parts)
        cut = zip(*(tensor.split(height) for tensor in (scales, *rows)), strict=True)
    for scale, candidate, baseline, exact, *mask in cut:
        three = (candidate.double(), baseline.double(), exact.double())
        yield (
            # Equal numbers in all three have no error.
            (*(torch.where(mask[0], tensor, 0.0) for tensor in three), scale)
            if mask
            else (*three, scale)
        )


def _choose_unit(scales: torch.Tensor) -> float:
    """What values are divided by so that their fourth powers are float64 numbers; 1 unless float64
    lies far outside float32.
    """
    peak = float(scales.max())
    # Division by 1 is exact; another unit is needed only where fourth powers leave float64.
    return 1.0 if _MIN_PEAK < peak < _MAX_PEAK or peak <= _ZERO_ROW_SCALE else peak


def _find_worst(errors: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.numel() == 1:
        return torch.div(vector_norm(errors, math.inf), scale.reshape(()))
    return torch.amax(vector_norm(errors, math.inf, dim=1, keepdim=True) / scale, (0, 1))
