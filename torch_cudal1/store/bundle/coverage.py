"""What a deployment will and will not have decided, asked of files alone: region keys, target
families and a cache.

Each stored decision is looked up as a process on the machine that judged it would look it up, so
what that refuses (damage, trust, revocation, quarantine) is not counted as covered. It traces
nothing, needs no device of the family asked for, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch_cudal1.ir.records import TOLERANCE_VERSION, Contract, Entry, Miss
from torch_cudal1.store.cache.decision_record import call_name
from torch_cudal1.store.cache.inventory import Inventory
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.cache.quarantine import reason_for

__all__ = ["Coverage", "Deployment", "Wanted", "coverage_of"]


@dataclass(frozen=True)
class Wanted:
    """Regions that something needs, in order. `left_out`: why there is none to decide, if there is
    none.

    `is_call`: they are those of one call of a module, not merely all of a lock.
    """

    source: str
    keys: tuple[str, ...]
    names: tuple[str, ...] = ()
    left_out: str = ""
    is_call: bool = True


@dataclass(frozen=True)
class Deployment:
    """Where it will run. `sku` and `torch`: "" where any will do; otherwise swaps judged under
    another are not used there.
    """

    family: str
    contract: Contract
    sku: str = ""
    torch: str = ""


@dataclass(frozen=True)
class Coverage:
    """One region of one source on one family: what it gets there. Without a key: what is known of
    the source as a whole.
    """

    source: str
    family: str
    key: str
    name: str
    status: Literal["decided", "baseline", "missing", "left out", "measured", "not measured"]
    runs: str = ""
    at_least: float | None = None
    detail: str = ""

    @property
    def served(self) -> bool:
        """Whether a start under on_miss="error" passes it. One that finds no measurement of the
        whole call makes it, in seconds.
        """
        return self.status != "missing"


def coverage_of(
    wanted: Sequence[Wanted],
    deployments: Sequence[Deployment],
    inventory: Inventory,
    cache: LocalCache,
) -> tuple[Coverage, ...]:
    """One line for each region of `wanted` on each of `deployments`, in that order; one more for a
    whole call that needs it.
    """
    shelf: dict[tuple[str, str], list[Entry]] = {}
    for held in inventory.entries:
        if isinstance(held.content, Entry):
            shelf.setdefault((held.position.family, held.position.name), []).append(held.content)
    rows: list[Coverage] = []
    for one in wanted:
        for place in deployments:
            rows += _of_one(one, place, shelf, cache)
    return tuple(rows)


def _of_one(
    one: Wanted,
    place: Deployment,
    shelf: Mapping[tuple[str, str], Sequence[Entry]],
    cache: LocalCache,
) -> Iterator[Coverage]:
    if one.left_out:
        yield Coverage(one.source, place.family, "", "", "left out", detail=one.left_out)
    chosen: list[Entry] = []
    for key, name in zip(one.keys, one.names or ("",) * len(one.keys), strict=True):
        entries = shelf.get((place.family, key), ())
        label = name or next((entry.region_name for entry in entries), "")
        answers = [(entry, _unusable(entry, place, cache)) for entry in entries]
        usable = sorted(
            (entry for entry, reason in answers if not reason), key=_is_baseline
        )  # a swap first
        if not usable:
            reasons = dict.fromkeys(reason for _, reason in answers)
            yield Coverage(
                one.source,
                place.family,
                key,
                label,
                "missing",
                detail="; ".join(reasons) or "no entry",
            )
            continue
        entry = usable[0]
        status: Literal["baseline", "decided"] = "baseline" if _is_baseline(entry) else "decided"
        gain = None if status == "baseline" else entry.speedup
        yield Coverage(
            one.source, place.family, key, label, status, entry.choice.label, gain, _where(entry)
        )
        chosen.append(entry)
    if one.is_call and chosen and len(chosen) == len(one.keys):
        yield from _whole_call(one, place, chosen, cache)


def _whole_call(
    one: Wanted, place: Deployment, chosen: Sequence[Entry], cache: LocalCache
) -> Iterator[Coverage]:
    """What a start finds about the call as a whole; nothing where the module's own forward is all
    that could run.
    """
    if len(chosen) == 1 and _is_baseline(chosen[0]) and chosen[0].choice.schedule == "eager":
        return
    candidates = [entry.choice.digest for entry in chosen]
    known = cache.get_alias(call_name(one.keys), chosen[0].target, chosen[0].contract, candidates)
    if isinstance(known, Miss):
        detail = f"the first start times the whole call: {known.reason}"
        yield Coverage(one.source, place.family, "", "whole call", "not measured", detail=detail)
        return
    winner = str(known.get("winner"))
    runs = "the module's own forward" if winner == "eager" else winner
    yield Coverage(
        one.source,
        place.family,
        "",
        "whole call",
        "measured",
        runs,
        detail=str(known.get("note", "")),
    )


def _unusable(entry: Entry, place: Deployment, cache: LocalCache) -> str:
    """Why a process there would not use `entry`; "" if it would."""
    asked, held = place.contract, entry.contract
    if held.version != TOLERANCE_VERSION:
        return f"judged under tolerance version {held.version}, this package asks for {TOLERANCE_VERSION}"
    if (held.precision, held.assume_finite) != (asked.precision, asked.assume_finite):
        return f"judged under precision {held.precision!r}" + (
            ", assuming finite values" if held.assume_finite else ""
        )
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
    return looked_up.stale or reason_for(
        (cache.root, *cache.read_only), entry.region_key, entry.choice.digest
    )


def _is_baseline(entry: Entry) -> bool:
    """The region's own Program, whatever the entry says of itself."""
    return entry.choice.origin == "baseline" and entry.choice.program.digest == entry.region_key


def _where(entry: Entry) -> str:
    rights = (
        f"; with the right to TF32 in {' and '.join(entry.contract.rights)}"
        if entry.contract.rights
        else ""
    )
    beside = f"; tuned without Inductor: {why}" if (why := entry.without_inductor) else ""
    return f"judged on {entry.target.sku}, torch {entry.target.torch}{rights}{beside}"
