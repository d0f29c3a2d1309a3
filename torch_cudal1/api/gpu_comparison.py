"""What a workload costs on each GPU type, from the evidence of cached decisions, and from prices
where the user gives them.

Every decision was timed where it was validated, so a cache that was filled on several GPU types can be
asked what a call costs on each: published work on serving with mixed GPUs (Melange,
arXiv:2404.14527) shows that the cheapest type depends on the workload. Nothing is measured or run
here, and nothing is guessed: where a decision is missing for a type, its row says so and has no
time. Times are those of the regions; what a module does around them, and several calls side by
side, are not in them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.core.errors import SettingError
from torch_cudal1.ir.cost import DEVICE_RATES, estimate_cost
from torch_cudal1.ir.program import Alloc, Arg, Aten, Call, Program, Step, TensorSpec
from torch_cudal1.ir.records import Entry, Region, Target

__all__ = [
    "GpuComparison",
    "GpuPrices",
    "HardwareRow",
    "Load",
    "Price",
    "compare",
    "move_program",
    "read_prices",
]

# A bound on what is parsed; a price list has a few lines.
MAX_PRICES_BYTES = 1 << 20
_FIELDS = {"price_per_hour", "watts"}


@dataclass(frozen=True)
class Load:
    """A part of the workload: regions that one call runs one after the other, and how often it is
    called.
    """

    name: str
    regions: tuple[Region, ...]
    calls: float = 1.0

    def __post_init__(self) -> None:
        if not self.regions or not 0 < self.calls < math.inf:
            raise ValueError(
                f"load {self.name!r} has {len(self.regions)} regions and {self.calls} calls; expected some of both"
            )


@dataclass(frozen=True)
class Price:
    """What a GPU of a type costs; None where the user did not say."""

    per_hour: float | None = None
    watts: float | None = None


@dataclass(frozen=True)
class GpuPrices:
    """Prices by the GPU's name in the driver ("NVIDIA H200"), in one currency."""

    of: Mapping[str, Price] = field(default_factory=dict)
    currency: str = ""


@dataclass(frozen=True, kw_only=True)
class HardwareRow:
    """One GPU type. `us_per_call` is the mean over the workload's calls, None unless every region
    has a timed decision there.

    - share_decided: the share of the workload's estimated time whose regions have a timed decision
      on this type, 0 to 1.
    - gain: the same workload under the best baselines over `us_per_call`, None where that was not
      measured.
    - cost_per_million, kwh_per_million: of a million calls one after the other; None without a time
      or a price.
    - missing: what would have to be known, one sentence each.
    """

    hardware: str
    family: str
    us_per_call: float | None
    share_decided: float
    gain: float | None
    cost_per_million: float | None
    kwh_per_million: float | None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuComparison:
    """All GPU types, the cheapest first (the fastest where no price is known), and those without a
    time last.
    """

    workload: tuple[str, ...]
    rows: tuple[HardwareRow, ...]
    currency: str = ""


@dataclass(frozen=True)
class _CallTime:
    """What a decision says of a call of its region."""

    us: float
    baseline_us: float | None


def compare(
    loads: Sequence[Load], entries: Iterable[Entry], prices: GpuPrices = GpuPrices()
) -> GpuComparison:
    """The rows of every GPU type that `entries` or `prices` name. Of several decisions for a region
    the newest counts.
    """
    decisions: dict[Target, dict[str, Entry]] = {}
    # Oldest first, so that the newest decision overwrites the others.
    for entry in sorted(entries, key=lambda entry: (entry.created, entry.choice.digest)):
        # Driver and library versions do not make another GPU type.
        kind = replace(entry.target, driver="", torch="", triton="")
        # CPU decisions have no price per GPU hour.
        if kind.device == "cuda":
            decisions.setdefault(kind, {})[entry.region_key] = entry
    rows = [
        _make_hardware_row(kind, loads, by_key, prices.of.get(kind.sku, Price()))
        for kind, by_key in decisions.items()
    ]
    rows += [
        _make_undecided_row(name)
        for name in prices.of
        if name not in {kind.sku for kind in decisions}
    ]
    by_price = any(row.cost_per_million is not None for row in rows)

    def order(row: HardwareRow) -> tuple[float, float, str]:
        money = row.cost_per_million if row.cost_per_million is not None else math.inf
        time = row.us_per_call if row.us_per_call is not None else math.inf
        # Without a price anywhere the fastest type comes first; rows without a time come last.
        return (money if by_price else time, time, row.hardware)

    total = sum(load.calls for load in loads)
    named = tuple(f"{load.name}: {load.calls / total:.0%} of the calls" for load in loads)
    return GpuComparison(
        workload=named, rows=tuple(sorted(rows, key=order)), currency=prices.currency
    )


def read_prices(path: Path) -> GpuPrices:
    """The prices in a JSON file: {"currency": "EUR", "NVIDIA H200": {"price_per_hour": 3.5,
    "watts": 700}, ...}; both are optional.

    Raises SettingError for anything else, with what was expected.
    """
    expected = '{"NVIDIA H200": {"price_per_hour": 3.5, "watts": 700}, "currency": "EUR"} with numbers above 0'
    try:
        data = json.loads(path.read_bytes()[:MAX_PRICES_BYTES])
        currency = data.pop("currency", "")
        of = {name: _parse_price(price) for name, price in data.items()}
    except OSError as error:
        raise SettingError(
            "prices", str(path), f"a file that can be read ({error.strerror})"
        ) from error
    # RecursionError: `json` raises it for thousands of nested brackets.
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SettingError("prices", str(path), f"{expected}; found: {error}") from error
    if not isinstance(currency, str):
        raise SettingError("prices", str(path), f"a currency that is text; found: {currency!r}")
    return GpuPrices(of, currency)


def move_program(program: Program, device: str) -> Program:
    """`program` as it would be on another device type: what a module that was captured here would
    be there.

    PyTorch takes some operators apart differently on a GPU (attention, some normalisations); such a
    region has another key there.
    """

    def argument(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(argument, arg))
        return torch.device(device) if isinstance(arg, torch.device) else arg

    def place_spec(spec: TensorSpec) -> TensorSpec:
        return replace(spec, device=device)

    def move_step(original: Step) -> Step:
        if isinstance(original, Aten):
            return replace(
                original,
                args=argument(original.args),
                kwargs=tuple((name, argument(arg)) for name, arg in original.kwargs),
            )
        if isinstance(original, Alloc):
            return replace(original, spec=place_spec(original.spec))
        return (
            replace(original, program=move_program(original.program, device))
            if isinstance(original, Call)
            else original
        )

    return replace(
        program,
        inputs=tuple(map(place_spec, program.inputs)),
        steps=tuple(map(move_step, program.steps)),
    )


def _make_hardware_row(
    kind: Target, loads: Sequence[Load], entries: Mapping[str, Entry], price: Price
) -> HardwareRow:
    calls = sum(load.calls for load in loads)
    us, baseline_us, decided, total = 0.0, 0.0, 0.0, 0.0
    missing: list[str] = []
    for load in loads:
        for region in load.regions:
            # A region captured on a CPU has the key of a CPU Program; on a GPU it would be another
            # one.
            program = (
                region.program
                if region.program.device == kind.device
                else move_program(region.program, kind.device)
            )
            # An estimate from FLOPs and bytes: a type without decisions has no measured shares.
            share = (
                load.calls / calls * DEVICE_RATES[kind.device].estimate_s(estimate_cost(program))
            )
            # By the Program's digest, which is the region's key on that device type.
            timed = _time_of_entry(entries.get(program.digest))
            total += share
            if isinstance(timed, str):
                missing.append(f"{load.name}, {region.name or region.kind}: {timed}")
                continue
            decided += share
            us += load.calls / calls * timed.us
            # NaN marks a gain that is not known, and stays NaN under addition.
            baseline_us = (
                math.nan
                if timed.baseline_us is None
                else baseline_us + load.calls / calls * timed.baseline_us
            )
    # A sum over some of the regions would look like a fast GPU.
    known_us = None if missing else us
    # Without a time a price would change nothing, so its absence is not named.
    missing += [] if missing or price.per_hour is not None else ["no price was given (--prices)"]
    return HardwareRow(
        hardware=kind.sku,
        family=kind.family,
        us_per_call=known_us,
        share_decided=decided / total if total else 0.0,
        gain=None if known_us is None or math.isnan(baseline_us) or not us else baseline_us / us,
        # A million calls of t microseconds take t seconds.
        cost_per_million=None
        if known_us is None or price.per_hour is None
        else known_us / 3600 * price.per_hour,
        kwh_per_million=None
        if known_us is None or price.watts is None
        else known_us / 3600 * price.watts / 1000,
        missing=tuple(missing),
    )


def _time_of_entry(entry: Entry | None) -> _CallTime | str:
    """A call's microseconds under the decision, or why they are not known."""
    if entry is None:
        return "no decision; run `cudal1 warmup` there"
    baselines, timing = (
        _read_mapping(entry.evidence.get("baselines_us")),
        _read_mapping(entry.evidence.get("timing")),
    )
    # A baseline has no candidate's timing; its time is the median of the baseline benchmark.
    if entry.choice.origin == "baseline":
        us = _read_positive_number(baselines.get(entry.choice.schedule))
        return (
            _CallTime(us, us)
            if us
            else "decided, but never timed alone (a training step is measured as a whole)"
        )
    us = _read_positive_number(timing.get("candidate_us"))
    return (
        _CallTime(us, _read_positive_number(timing.get("baseline_us")))
        if us
        else "decided, but never timed alone"
    )


def _read_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read_positive_number(value: Any) -> float | None:
    number = (
        # `bool` is an `int` in Python, and JSON of others may hold Infinity.
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
    )
    return float(value) if number else None


def _make_undecided_row(name: str) -> HardwareRow:
    missing = (
        "a price, but no decision that was made on a GPU of this name; run `cudal1 warmup` on one and bring its cache",
    )
    none = dict.fromkeys(("us_per_call", "gain", "cost_per_million", "kwh_per_million"))
    return HardwareRow(hardware=name, family="", share_decided=0.0, missing=missing, **none)


def _parse_price(fields: Any) -> Price:
    # An unknown field is refused: a misspelt "price_per_hour" would be no price at all.
    if not isinstance(fields, dict) or not set(fields) <= _FIELDS or not fields:
        raise ValueError(f"{fields!r}; a GPU has {' and '.join(sorted(_FIELDS))}")
    for name, value in fields.items():
        # A price of 0 would make a GPU the cheapest by a slip of the keyboard.
        if _read_positive_number(value) is None:
            raise ValueError(f"{name} {value!r}")
    return Price(fields.get("price_per_hour"), fields.get("watts"))
