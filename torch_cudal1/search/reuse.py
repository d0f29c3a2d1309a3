"""Decides whether a cached entry may be used on this machine as it is.

A publisher or the user's own cache must vouch for the entry (`store.trust.trust_policy`), it must
have been judged on a target equal to this one, and it must not have failed on this machine. The
last is checked at the first use of an entry that another machine judged: a signature says who
answers for an entry, not that this device computes what the other one did. Under `on_miss="tune"`
the judge validates the choice once (profile "fast"; no timing, for the targets are equal), and the
user's own cache keeps the answer under the entry's digest and this machine's identity. Under
another `on_miss` nothing is run: an entry that was never checked here is used on its publisher's
word.

A choice that was never measured beside Inductor, because that did not compile, is searched for
again under `on_miss="tune"`.

No entry is stored and no candidate made here. The choice of an entry without a voucher goes to the
search as a candidate of untrusted origin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch_cudal1 import judge
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.target import compiler_digest, judge_identity
from torch_cudal1.ir.records import DIFFERS_FROM_EAGER, Candidate, Entry, Region
from torch_cudal1.store.cache import quarantine
from torch_cudal1.store.cache.resolve import Hit, Resolved
from torch_cudal1.store.context import TuneContext
from torch_cudal1.store.trust.trust_policy import OWN

__all__ = [
    "UNTRUSTED_ORIGIN",
    "check_quarantine",
    "check_reuse",
    "get_judge_identity",
    "is_baseline",
    "is_untimed",
    "list_cached_candidates",
    "note_missing_inductor",
    "record_refusals",
]

# of a candidate without a voucher: an entry that it wins was judged here, not made here
UNTRUSTED_ORIGIN = "elsewhere"
# searches in which Inductor may fail under the same compilers
_MAX_TRIES_WITHOUT_INDUCTOR = 2


def check_reuse(region: Region, hit: Hit, place: TuneContext) -> Refusal | None:
    """Why a hit may not be used as it is. A stale one may if it names a baseline, which cannot be
    wrong.
    """
    # First: without a voucher nothing that the entry says may be believed.
    if not hit.vouched_by:
        return Refusal(
            f"refused: {hit.stale}; `cudal1 warmup` judges it first, "
            "or a publisher on your list signs it"
        )
    # The baseline is the user's own Program, so it cannot be wrong, only slower.
    if hit.stale and not is_baseline(region, hit.entry.choice):
        return Refusal(f"{hit.stale}; not re-validated yet")
    # A kernel that was only checked says nothing about the speed of a whole region or a block.
    if region.granularity != "island" and is_untimed(hit.entry):
        return Refusal("no cached decision")
    if place.settings.on_miss == "tune" and hit.entry.is_quick:
        return Refusal("decided by the quick tier, which searches for nothing")
    if (failure := _find_failure_to_retry(hit.entry, place)) is not None:
        return Refusal(f"tuned without Inductor, which is measured now: {failure}")
    # Last, because it may run the candidate.
    first_use = _validate_first_use(region, hit, place)
    return None if first_use.passed else Refusal(f"{hit.where} is refused: {first_use.reason}")


def check_quarantine(place: TuneContext, region: Region, candidate: Candidate) -> Refusal | None:
    """Why production has put this candidate in quarantine. A baseline never is."""
    if is_baseline(region, candidate):
        return None
    # Shared caches too: a kernel that failed on one machine of a fleet is kept from all.
    roots = (place.cache.root, *place.cache.read_only)
    return quarantine.find_quarantine_reason(roots, region.key, candidate.digest)


def note_missing_inductor(entry: Entry, before: Entry | None) -> Entry:
    """A new entry, with a note of how often it was tuned without Inductor by the compilers that are
    here now.
    """
    if not entry.without_inductor:
        return entry
    tries = 1 + (_count_tries(before) if before is not None else 0)
    # With the compilers: an update gives Inductor new tries.
    note = {"compilers": compiler_digest(entry.target.device), "tries": tries}
    return replace(entry, evidence={**entry.evidence, "without_inductor": note})


def list_cached_candidates(region: Region, hit: Hit | None) -> list[Candidate]:
    """The candidate with which a search begins where an entry may not be used as it is. Without a
    voucher its origin is UNTRUSTED_ORIGIN, whatever the entry claims.
    """
    # the region's own Program is among the baselines anyhow
    if hit is None or hit.entry.choice.program.digest == region.key:
        return []
    choice = hit.entry.choice
    # The origin decides how strictly its process is confined, so an entry must not choose it.
    if not hit.vouched_by:
        return [replace(choice, origin=UNTRUSTED_ORIGIN)]
    # The quick tier's Program with other attention operators: to a search no baseline.
    return [replace(choice, origin="builtin") if choice.origin == "baseline" else choice]


def record_refusals(region: Region, resolved: Resolved) -> None:
    """Record which entries were refused, for the report: the reason of a choice shows what the
    search found, not what it replaced.
    """
    if resolved.trouble:
        telemetry.record(
            "resolve", "refused", region.key, name=region.name, reason=resolved.trouble
        )
    if resolved.hit is not None and not resolved.hit.vouched_by:
        telemetry.record(
            "resolve", "unvouched", region.key, name=region.name, reason=resolved.hit.stale
        )


def is_baseline(region: Region, candidate: Candidate) -> bool:
    """Whether a candidate is the region's own Program, which cannot be wrong; what an entry says of
    itself is not enough.
    """
    # The digest, because a forged entry could call any Program a baseline and skip every check.
    return candidate.origin == "baseline" and candidate.program.digest == region.key


def is_untimed(entry: Entry) -> bool:
    """Whether it is a fusion group's entry: its kernel was checked, and its speed depends on the
    model around it.
    """
    return entry.evidence.get("granularity") == "island"


def get_judge_identity(entry: Entry) -> str:
    """The identity of the machine that judged an entry; "" where the entry does not say."""
    attestation = entry.evidence.get("attestation")
    return str(attestation.get("judge", "")) if isinstance(attestation, Mapping) else ""


def _find_failure_to_retry(entry: Entry, place: TuneContext) -> Refusal | None:
    """Why the search for this entry had no Inductor result, if a new search may have one; else
    None.

    A passing failure is gone at the second search. What cannot run here fails twice, and is not
    tried again before the compilers change.
    """
    reason = entry.without_inductor
    if (
        place.settings.on_miss != "tune"
        or "compile" in place.settings.without
        # A result that differs from eager's differs again: no retry changes that.
        or reason in ("", DIFFERS_FROM_EAGER)
    ):
        return None
    # Bounded, or every start would search again where Inductor cannot run.
    may_retry = _count_tries(entry) < _MAX_TRIES_WITHOUT_INDUCTOR
    return Refusal(reason) if compiler_digest(place.device.type) and may_retry else None


def _count_tries(entry: Entry) -> int:
    """How many searches of this choice had no Inductor result under the compilers of this
    machine.
    """
    note = entry.evidence.get("without_inductor")
    here = compiler_digest(entry.target.device)
    if not isinstance(note, Mapping) or note.get("compilers") != here:
        return 0
    tries = note.get("tries")
    # Entries are data from outside, so types are checked.
    return tries if isinstance(tries, int) else 0


@dataclass(frozen=True)
class _FirstUse:
    """Whether an entry passed its validation on this machine, and why."""

    passed: bool
    reason: str


def _validate_first_use(region: Region, hit: Hit, place: TuneContext) -> _FirstUse:
    if is_baseline(region, hit.entry.choice) or _is_judged_here(hit):
        return _FirstUse(True, "judged here")
    first_use = _read_first_use(hit, place)
    if first_use is not None or place.settings.on_miss != "tune":
        return first_use or _FirstUse(True, "not checked on this machine yet")
    # Several processes of one start find the same entry: one of them validates it.
    with place.cache.lock(region.key, place.target, place.contract):
        # Read again under the lock: another process may have answered meanwhile.
        return _read_first_use(hit, place) or _check_first_use(region, hit, place)


def _is_judged_here(hit: Hit) -> bool:
    """An entry of the own cache that names no machine was made here before entries named one."""
    by = get_judge_identity(hit.entry)
    return by == judge_identity() or (not by and hit.vouched_by == OWN)


def _check_first_use(region: Region, hit: Hit, place: TuneContext) -> _FirstUse:
    job = judge.EvaluationConfig(place.settings, place.contract, place.device)
    try:
        verdict = judge.validate_candidate(region, hit.entry.choice, job)
    except SandboxError as error:
        # a machine that cannot judge uses the entry like one whose settings allow no search
        return _FirstUse(True, f"not checked on this machine: {error}")
    failure = verdict.failure
    first_use = _FirstUse(
        verdict.passed,
        f"wrong on this machine: {failure.name}: {failure.detail}" if failure else "checked here",
    )
    telemetry.record(
        "judge",
        "first_use",
        region.key[:12],
        where=hit.where,
        passed=first_use.passed,
        reason=first_use.reason,
    )
    record = {
        # The whole entry's digest: another one for the same region is checked anew.
        "entry": hit.digest,
        "judge": judge_identity(),
        "passed": first_use.passed,
        "reason": first_use.reason,
    }
    name = _make_first_use_name(hit, place)
    place.cache.put_decision_record(name, record, place.target, place.contract)
    return first_use


def _read_first_use(hit: Hit, place: TuneContext) -> _FirstUse | None:
    """The stored answer of an earlier first use, None if there was none. Only the user's own cache
    is read: records elsewhere are of other machines.
    """
    record: dict[str, Any] | Refusal = place.cache.own.get_decision_record(
        _make_first_use_name(hit, place), place.target, place.contract
    )
    if (
        isinstance(record, Refusal)
        # The name is a digest of digests. What the record says it is about has to agree.
        or record.get("entry") != hit.digest
        or not isinstance(record.get("passed"), bool)
    ):
        return None
    return _FirstUse(record["passed"], str(record.get("reason")))


def _make_first_use_name(hit: Hit, place: TuneContext) -> str:
    return hashlib.sha256(
        # The machine is part of the name: its answer holds for it alone.
        f"first use|{hit.digest}|{judge_identity()}|{place.target!r}".encode()
    ).hexdigest()
