"""Is a contender's answer right: its error against float64, measured in units of eager's own error.

Per output, `rms(y - y64) <= max(2 * rms(eager - y64), u * rms(y64))` with u the round-off of the
computation; the reported ratio is normalised so that 2 is the limit. It does not look at strides (a
whole model's are torch.compile's to choose) nor at single elements: one unwritten element of two
million already moves the rms by a factor of a thousand.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from torch_cudal1.judge.reference.compare import sampling_margin
from torch_cudal1.judge.reference.error_statistics import measure_errors

__all__ = ["LIMIT", "Comparison", "Reference", "compare", "make_reference"]

Outputs: TypeAlias = Mapping[str, Tensor]

LIMIT = 2.0  # the precision contract: at most twice the error of the user's own baseline
# Where eager keeps no digits (a gradient that is zero in exact arithmetic, such as that of an
# attention key's bias), two correct programs differ by their noise; the output is counted as void
# and only has to stay within this multiple of eager's noise.
VOID_LIMIT, VOID_ERROR = 10.0, 0.1
# elements in float64 at once: results of several GB would not fit a second and third time
_PART_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Reference:
    """What one set of inputs should give: in float64, by eager, and eager's rms error per output
    (the largest of its runs).

    An error rests on few elements where a ReLU has left few of them, and is a draw as lucky as that
    of a small result.
    """

    exact: Outputs
    eager: Outputs
    eager_rms: Mapping[str, float]
    # elements that eager's error rests on, per output
    effective: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """The verdict on one set of outputs. `error_ratio` is the worst over outputs that are not void;
    None if none was measured.
    """

    passed: bool
    error_ratio: float | None
    reason: str = ""
    outputs: int = 0
    void: int = 0

    def __add__(self, other: Comparison) -> Comparison:
        """Both verdicts as one: passed if both did, the first reason, the larger ratio."""
        ratios = [c.error_ratio for c in (self, other) if c.error_ratio is not None]
        return Comparison(
            self.passed and other.passed,
            max(ratios, default=None),
            self.reason or other.reason,
            self.outputs + other.outputs,
            self.void + other.void,
        )


def make_reference(exact: Outputs, eager_runs: Sequence[Outputs]) -> Reference:
    """The reference from a float64 run and several eager runs, because atomics make some of eager's
    results differ from run to run.
    """
    rms, effective = dict[str, float](), dict[str, int]()
    for name, exact_tensor in exact.items():
        rms[name], largest = max(
            ((_rms_error(run[name], exact_tensor), run[name]) for run in eager_runs),
            key=operator.itemgetter(0),
        )
        statistics = (
            measure_errors((largest, largest, exact_tensor), 0.0)
            if largest.is_floating_point()
            else None
        )
        effective[name] = exact_tensor.numel() if statistics is None else statistics.effective
    return Reference(exact, eager_runs[0], rms, effective)


def compare(got: Outputs, ref: Reference) -> Comparison:
    """Compare every output of `got`; a missing or additional one fails."""
    if list(got) != list(ref.exact):
        return Comparison(False, None, f"outputs {list(got)}; expected {list(ref.exact)}")
    verdict = Comparison(True, None)
    for name, tensor in got.items():
        verdict += _compare_one(name, tensor, ref)
    return verdict


def _compare_one(name: str, got: Tensor, ref: Reference) -> Comparison:
    exact, eager = ref.exact[name], ref.eager[name]
    if problem := _find_layout_difference(got, eager):
        return Comparison(False, None, f"{name}: {problem}", 1)
    if not eager.is_floating_point():
        same = torch.equal(got, eager)
        return Comparison(same, None, "" if same else f"{name}: integers differ from eager's", 1)
    scale, eager_rms, rms = _rms(exact), ref.eager_rms[name], _rms_error(got, exact)
    void = eager_rms > VOID_ERROR * scale
    ratio = _ratio(rms, max(eager_rms, _round_off(eager.dtype) * scale / LIMIT))
    # Of a scalar, eager's error is one draw, often a lucky one: the limit allows for the spread of
    # so few, as the judge's does.
    limit = VOID_LIMIT if void else LIMIT * sampling_margin(ref.effective.get(name, got.numel()))
    reason = (
        ""
        if ratio <= limit
        else f"{name}: error {rms:.3g} is {ratio:.3g}x eager's {eager_rms:.3g}; the limit is {limit:g}x"
    )
    return Comparison(
        not reason, None if void or math.isinf(ratio) else ratio, reason, 1, int(void)
    )


def _find_layout_difference(got: Tensor, eager: Tensor) -> str:
    """The first difference in shape, dtype, device or the places of NaN and infinity; "" if there
    is none.
    """
    for attribute in ("shape", "dtype", "device"):
        if getattr(got, attribute) != getattr(eager, attribute):
            return f"{attribute} is {getattr(got, attribute)}; expected {getattr(eager, attribute)}"
    if not eager.is_floating_point():
        return ""
    if not torch.equal(got.isnan(), eager.isnan()):
        return f"{int(got.isnan().sum())} NaN; eager has {int(eager.isnan().sum())}, or at other places"
    if not torch.equal(torch.where(got.isinf(), got, 0), torch.where(eager.isinf(), eager, 0)):
        return "infinities differ from eager's"
    return ""


def _ratio(error: float, unit: float) -> float:
    if error == 0.0:
        return 0.0
    return error / unit if unit > 0.0 else math.inf


def _rms(tensor: Tensor) -> float:
    """Root mean square over the finite elements, 0 for none."""
    return _rms_of(part.double() for part in tensor.reshape(-1).split(_PART_ELEMENTS))


def _rms_error(tensor: Tensor, exact: Tensor) -> float:
    parts = zip(
        tensor.reshape(-1).split(_PART_ELEMENTS),
        exact.reshape(-1).split(_PART_ELEMENTS),
        strict=True,
    )
    return _rms_of(part.double() - exact_part.double() for part, exact_part in parts)


def _rms_of(parts: Iterable[Tensor]) -> float:
    """Root mean square of the finite elements of all parts together."""
    total, count = 0.0, 0
    for part in parts:
        finite = part[part.isfinite()]
        total, count = total + float(finite.square().sum()), count + finite.numel()
    return math.sqrt(total / count) if count else 0.0


def _round_off(dtype: torch.dtype) -> float:
    """Unit round-off of the accumulation: that of float32 for float32 and narrower types."""
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24
