"""What a deployment will and will not have decided, asked of files alone: region keys, target families and a cache.

Each stored decision is looked up as a process on the machine that judged it would look it up, so what that refuses (damage, trust,
revocation, quarantine) is not counted as covered. It traces nothing, needs no device of the family asked for, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch_cudal1.records import TOLERANCE_VERSION, Contract, Entry, Miss
from torch_cudal1.source.cache import LocalCache
from torch_cudal1.source.inventory import Inventory
from torch_cudal1.source.quarantine import reason_for

__all__ = ["Coverage", "Deployment", "Wanted", "coverage_of"]


@dataclass(frozen=True)
class Wanted:
    """Regions that something needs, in order: a target's, a lock's. `left_out`: why there is none to decide, if there is none."""

    source: str
    keys: tuple[str, ...]
    names: tuple[str, ...] = ()
    left_out: str = ""


@dataclass(frozen=True)
class Deployment:
    """Where it will run. `sku` and `torch`: "" where any will do; otherwise swaps judged under another are not used there."""

    family: str
    contract: Contract
    sku: str = ""
    torch: str = ""


@dataclass(frozen=True)
class Coverage:
    """One region of one source on one family: what it gets there."""

    source: str
    family: str
    key: str
    name: str
    status: Literal["decided", "baseline", "missing", "left out"]
    runs: str = ""
    at_least: float | None = None
    detail: str = ""

    @property
    def served(self) -> bool:
        """Whether a start under on_miss="error" passes it."""
        return self.status != "missing"


def coverage_of(
    wanted: Sequence[Wanted], deployments: Sequence[Deployment], inventory: Inventory, cache: LocalCache
) -> tuple[Coverage, ...]:
    """One line for each region of `wanted` on each of `deployments`, in that order."""
    rows: list[Coverage] = []
    for one in wanted:
        names = one.names or ("",) * len(one.keys)
        for place in deployments:
            if one.left_out:
                rows.append(Coverage(one.source, place.family, "", "", "left out", detail=one.left_out))
            rows += [_covered(one.source, key, name, place, inventory, cache) for key, name in zip(one.keys, names, strict=True)]
    return tuple(rows)


def _covered(source: str, key: str, name: str, place: Deployment, inventory: Inventory, cache: LocalCache) -> Coverage:
    """The best that the folders have for a region: a swap, a baseline's decision, or the reasons why there is neither."""
    reasons: list[str] = []
    found: list[Coverage] = []
    for held in inventory.only([key], [place.family]).entries:
        entry = held.content
        if not isinstance(entry, Entry):
            continue
        name = name or entry.region_name
        reason = _unusable(entry, place, cache)
        if reason:
            reasons.append(reason)
        elif _is_baseline(entry):
            found.append(Coverage(source, place.family, key, name, "baseline", entry.choice.label, detail=_where(entry)))
        else:
            runs, gain = entry.choice.label, entry.speedup
            found.append(Coverage(source, place.family, key, name, "decided", runs, gain, _where(entry)))
    missing = Coverage(source, place.family, key, name, "missing", detail="; ".join(dict.fromkeys(reasons)) or "no entry")
    return min(found, key=lambda one: one.status != "decided", default=missing)


def _unusable(entry: Entry, place: Deployment, cache: LocalCache) -> str:
    """Why a process there would not use `entry`; "" if it would."""
    asked, held = place.contract, entry.contract
    if held.version != TOLERANCE_VERSION:
        return f"judged under tolerance version {held.version}, this package asks for {TOLERANCE_VERSION}"
    if (held.precision, held.assume_finite) != (asked.precision, asked.assume_finite):
        return f"judged under precision {held.precision!r}" + (", assuming finite values" if held.assume_finite else "")
    if entry.evidence.get("granularity") == "island":
        return "a kernel for a part of a model, never timed alone"
    if _is_baseline(entry):
        others = []  # a baseline cannot be wrong, so it serves everywhere
    else:
        pairs = (("", place.sku, entry.target.sku), ("torch ", place.torch, entry.target.torch))
        others = [f"{label}{there}" for label, wanted, there in pairs if wanted and wanted != there]
    if others:
        return f"judged on {', '.join(others)}"
    looked_up = cache.get(entry.region_key, entry.target, entry.contract)
    if isinstance(looked_up, Miss):
        return f"a look-up refuses it: {looked_up.reason}"
    if not looked_up.vouched_by:
        return looked_up.stale or "nobody vouches for it"
    if _is_baseline(entry):
        return ""
    return looked_up.stale or reason_for((cache.root, *cache.read_only), entry.region_key, entry.choice.digest)


def _is_baseline(entry: Entry) -> bool:
    """The region's own Program, whatever the entry says of itself."""
    return entry.choice.origin == "baseline" and entry.choice.program.digest == entry.region_key


def _where(entry: Entry) -> str:
    rights = f"; with the right to TF32 in {' and '.join(entry.contract.rights)}" if entry.contract.rights else ""
    return f"judged on {entry.target.sku}, torch {entry.target.torch}{rights}"
