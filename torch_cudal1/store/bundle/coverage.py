"""Which regions of a deployment have a stored decision, from files alone: region keys, target
families and a cache.

Each stored decision is looked up as a process on the machine that judged it would look it up, so a
decision that the look-up refuses (damage, trust, revocation, quarantine) does not count as covered.
It traces nothing, needs no device of the deployment's family, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import TOLERANCE_VERSION, Contract, Entry
from torch_cudal1.store.cache.decision_record import call_name
from torch_cudal1.store.cache.inventory import Inventory
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.cache.quarantine import find_quarantine_reason

__all__ = ["Coverage", "Deployment", "Requirement", "report_coverage"]


@dataclass(frozen=True)
class Requirement:
    """The regions of one source, in order. `left_out`: why the source has no region to decide, ""
    where it has.

    `is_call`: the regions are those of one call of a module, not merely all of a lock. `blocks`: by
    region, the keys of the repeated blocks by which a search would decide it, each with how often
    it occurs.
    """

    source: str
    keys: tuple[str, ...]
    names: tuple[str, ...] = ()
    left_out: str = ""
    is_call: bool = True
    blocks: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)


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


def report_coverage(
    requirements: Sequence[Requirement],
    deployments: Sequence[Deployment],
    inventory: Inventory,
    cache: LocalCache,
) -> tuple[Coverage, ...]:
    """One line for each region of `requirements` on each of `deployments`, in that order; one more
    for a whole call that needs it.
    """
    entries_by_key: dict[tuple[str, str], list[Entry]] = {}
    for file in inventory.entries:
        if isinstance(file.content, Entry):
            entries_by_key.setdefault((file.cache_path.family, file.cache_path.name), []).append(
                file.content
            )
    rows: list[Coverage] = []
    for requirement in requirements:
        for deployment in deployments:
            rows += _cover_regions(requirement, deployment, entries_by_key, cache)
    return tuple(rows)


def _cover_regions(
    requirement: Requirement,
    deployment: Deployment,
    entries_by_key: Mapping[tuple[str, str], Sequence[Entry]],
    cache: LocalCache,
) -> Iterator[Coverage]:
    if requirement.left_out:
        yield Coverage(
            requirement.source, deployment.family, "", "", "left out", detail=requirement.left_out
        )
    chosen: list[Entry] = []

    def find_usable(key: str) -> tuple[Entry | None, str]:
        """The entry that a start there uses, or why there is none."""
        entries = entries_by_key.get((deployment.family, key), ())
        answers = [(entry, _check_usable(entry, deployment, cache)) for entry in entries]
        # A kernel before a baseline: `False` sorts first.
        usable = sorted((entry for entry, refusal in answers if refusal is None), key=_is_baseline)
        reasons = dict.fromkeys(str(refusal) for _, refusal in answers)
        return (usable[0], "") if usable else (None, "; ".join(reasons) or "no entry")

    for key, name in zip(
        requirement.keys, requirement.names or ("",) * len(requirement.keys), strict=True
    ):
        entries = entries_by_key.get((deployment.family, key), ())
        label = name or next((entry.region_name for entry in entries), "")
        entry, reason = find_usable(key)
        if entry is None:
            blocks = [
                (find_usable(block)[0], count) for block, count in requirement.blocks.get(key, ())
            ]
            detail = "; ".join([reason, *_describe_blocks(blocks)])
            yield Coverage(
                requirement.source, deployment.family, key, label, "missing", detail=detail
            )
            continue
        status: Literal["baseline", "decided"] = "baseline" if _is_baseline(entry) else "decided"
        gain = None if status == "baseline" else entry.speedup
        yield Coverage(
            requirement.source,
            deployment.family,
            key,
            label,
            status,
            entry.choice.label,
            gain,
            _describe_origin(entry),
        )
        chosen.append(entry)
    # All regions of a lock are not one call, and a call with a missing region has no measurement.
    if requirement.is_call and chosen and len(chosen) == len(requirement.keys):
        yield from _cover_whole_call(requirement, deployment, chosen, cache)


def _describe_blocks(blocks: Sequence[tuple[Entry | None, int]]) -> Iterator[str]:
    """What is known of the blocks of a region without an entry: a search composes them, and
    searches only for the others.
    """
    for entry, count in blocks:
        what = "not decided" if entry is None else f"decided: {entry.choice.label}"
        yield f"a block that occurs {count} times is {what}"


def _cover_whole_call(
    requirement: Requirement, deployment: Deployment, chosen: Sequence[Entry], cache: LocalCache
) -> Iterator[Coverage]:
    """What a start finds about the call as a whole; nothing where the module's own forward is all
    that could run.
    """
    # A start measures no whole call where only the module's own forward could win.
    if len(chosen) == 1 and _is_baseline(chosen[0]) and chosen[0].choice.schedule == "eager":
        return
    candidates = [entry.choice.digest for entry in chosen]
    record = cache.get_decision_record(
        call_name(requirement.keys), chosen[0].target, chosen[0].contract, candidates
    )
    if isinstance(record, Refusal):
        detail = f"the first start times the whole call: {record.reason}"
        yield Coverage(
            requirement.source, deployment.family, "", "whole call", "not measured", detail=detail
        )
        return
    winner = str(record.get("winner"))
    runs = "the module's own forward" if winner == "eager" else winner
    yield Coverage(
        requirement.source,
        deployment.family,
        "",
        "whole call",
        "measured",
        runs,
        detail=str(record.get("note", "")),
    )


def _check_usable(entry: Entry, deployment: Deployment, cache: LocalCache) -> Refusal | None:
    """Why a process there would not use `entry`."""
    contract, judged = deployment.contract, entry.contract
    # A contract with another version has another digest, so a process there looks in another
    # folder.
    if judged.version != TOLERANCE_VERSION:
        versions = f"{judged.version}, this package asks for {TOLERANCE_VERSION}"
        return Refusal(f"judged under tolerance version {versions}")
    if (judged.precision, judged.assume_finite) != (contract.precision, contract.assume_finite):
        finite = ", assuming finite values" if judged.assume_finite else ""
        return Refusal(f"judged under precision {judged.precision!r}{finite}")
    # Its speed-up is not that of a call: such a kernel runs only inside a region's Program.
    if entry.evidence.get("granularity") == "island":
        return Refusal("a kernel for a part of a model, never timed alone")
    if _is_baseline(entry):
        # A baseline cannot be wrong, so it serves everywhere.
        differences = []
    else:
        pairs = (
            ("", deployment.sku, entry.target.sku),
            ("torch ", deployment.torch, entry.target.torch),
        )
        differences = [
            f"{label}{actual}"
            for label, required, actual in pairs
            if required and required != actual
        ]
    if differences:
        return Refusal(f"judged on {', '.join(differences)}")
    # With the entry's own target: the machine it was judged on is not this one, so nothing is stale
    # for that reason.
    answer = cache.get(entry.region_key, entry.target, entry.contract)
    if isinstance(answer, Refusal):
        return Refusal(f"a look-up refuses it: {answer.reason}")
    # A start under on_miss="error" runs no candidate, so it cannot judge such an entry first.
    if not answer.vouched_by:
        return Refusal(answer.stale or "nobody vouches for it")
    if _is_baseline(entry):
        return None
    if answer.stale:
        return Refusal(answer.stale)
    return find_quarantine_reason(
        (cache.root, *cache.read_only), entry.region_key, entry.choice.digest
    )


def _is_baseline(entry: Entry) -> bool:
    """The region's own Program, whatever the entry says of itself."""
    # A baseline is exempt from the checks above, so the claim "baseline" is compared with the
    # Program.
    return entry.choice.origin == "baseline" and entry.choice.program.digest == entry.region_key


def _describe_origin(entry: Entry) -> str:
    rights = (
        f"; with the right to TF32 in {' and '.join(entry.contract.rights)}"
        if entry.contract.rights
        else ""
    )
    reason_text = f"; tuned without Inductor: {why}" if (why := entry.without_inductor) else ""
    return f"judged on {entry.target.sku}, torch {entry.target.torch}{rights}{reason_text}"
