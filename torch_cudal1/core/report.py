"""The answers of `cudal1.explain()` and `cudal1 plan`: frozen values that say what runs, what was
tried and why the rest was refused.

Pure data with a JSON form; nothing here measures, decides or prints. `torch_cudal1.cli.view` turns
these values into text and pages. Speed-ups are baseline time over our time (above 1 is faster),
times are microseconds per call, errors are against a float64 run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

__all__ = [
    "OWN_FORWARD",
    "EndToEnd",
    "Explanation",
    "Interval",
    "Plan",
    "PlanRow",
    "RegionReport",
    "per_call",
    "plain",
]

# The text of `runs` where nothing is known and the module is left alone.
OWN_FORWARD = "the module's own forward"


def per_call(us: float) -> str:
    """A time per call for people, of three digits: "4.10 us", "12.3 ms", "1.20 s"."""
    for limit, unit, scale in ((1e3, "us", 1.0), (1e6, "ms", 1e3)):
        if us < limit:
            return f"{_format_three_digits(us / scale)} {unit}"
    return f"{_format_three_digits(us / 1e6)} s"


@dataclass(frozen=True)
class Interval:
    """A measured ratio with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.value <= self.high:
            raise ValueError(
                f"interval [{self.low}, {self.high}] does not hold the value {self.value}"
            )

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return _encode_object(self)


@dataclass(frozen=True, kw_only=True)
class RegionReport:
    """One region of a model: what runs there now, what was tried, and the evidence.

    - runs: label of what runs now, such as "eager" or "diag_matmul -> inductor"; origin: who
      proposed it, or "baseline".
    - speedup, low, high: against the best baseline, measured when the decision was made; None when
      a baseline runs.
    - vs_eager, vs_inductor: against these two alone; None when that one was not measured.
    - error_ratio: the candidate's rms error over the baseline's own, both against float64;
      worst_error: the candidate's largest scaled error.
    - raced: one mapping a baseline: "label", "decision" ("runs", "beaten" or "failed") and
      "reason", with what it measured.
    - tried: one mapping a candidate with at least "label", "decision" ("accepted", "rejected" or
      "not judged") and "reason"; also "detector", "speedup", "low", "high" and "error_ratio" where
      they were measured.
    - reason: one sentence on why this runs and not something else.
    """

    name: str
    key: str
    kind: str
    granularity: str
    runs: str
    origin: str
    techniques: tuple[str, ...] = ()
    schedule: str = ""
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    vs_eager: Interval | None = None
    vs_inductor: Interval | None = None
    baselines_us: Mapping[str, float] = field(default_factory=dict)
    runs_us: float | None = None
    error_ratio: float | None = None
    worst_error: float | None = None
    raced: tuple[Mapping[str, Any], ...] = ()
    tried: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""

    @property
    def swapped(self) -> bool:
        """True when something other than a baseline runs here."""
        return self.origin != "baseline"

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return _encode_object(self)


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """The whole model, host time included; None where Inductor cannot compile it."""

    eager_us: float
    inductor_us: float | None
    ours_us: float
    vs_eager: Interval
    vs_inductor: Interval | None

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return _encode_object(self)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A model's regions, why other parts are none (`left_out`, one sentence each), and the
    end-to-end measurement if made.

    `gate` holds one sentence a call signature: what the whole call gained where it runs, measured
    before anything was swapped in. `undone` is empty, or says why the model's own forward runs
    although regions were won (the whole call did not get faster).
    """

    target: str
    device: str
    regions: tuple[RegionReport, ...] = ()
    left_out: tuple[str, ...] = ()
    end_to_end: EndToEnd | None = None
    undone: str = ""
    gate: tuple[str, ...] = ()

    @property
    def untouched(self) -> bool:
        """True when the module's own forward runs, so that its speed-up over eager is 1 by
        construction.
        """
        return bool(self.undone) or all(
            # "eager" in every region runs the operators that the module's own forward runs.
            region.runs in ("eager", OWN_FORWARD)
            for region in self.regions
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return _encode_object(self)


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """The expectation for one region before anything is built. `share_of_time` is of the model's
    time, None when not measured.

    `cached`: a decision is already stored, and `expected_speedup` is its measured lower bound, not
    a guess.
    """

    region: str
    key: str
    share_of_time: float | None
    techniques: tuple[str, ...]
    expected_speedup: float
    cached: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return _encode_object(self)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Expected gain of a model, region by region, and end to end (Amdahl's law over the shares)."""

    target: str
    device: str
    rows: tuple[PlanRow, ...]
    expected_end_to_end: float

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return _encode_object(self)


def plain(value: Any) -> Any:
    """`value` with records as dicts and tuples as lists. A float that JSON has no word for becomes
    "inf", "-inf" or "nan".
    """
    if is_dataclass(value) and not isinstance(value, type):
        return _encode_object(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    # json.dumps would write NaN and Infinity, which other readers of JSON refuse.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # A Path, dtype or schedule has a text, and a report must not fail because of a value in it.
    return str(value)


def _encode_object(record: Any) -> dict[str, Any]:
    # Not dataclasses.asdict: that leaves tuples and infinite floats as they are.
    return {f.name: plain(getattr(record, f.name)) for f in fields(record)}


def _format_three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
