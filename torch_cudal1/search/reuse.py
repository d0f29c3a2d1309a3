"""Whether an entry that was found may be used here as it is, and what becomes of one that may not.

Somebody must vouch for it (`store.trust.trust_policy`), it must have been judged on a target equal
to this one, and it must not have failed on this machine. The last is found out at the first use of
an entry that another machine judged: a signature says who answers for an entry, not that this
device computes what that one did. Where searching is allowed, the judge validates the choice once
(profile "fast"; no timing, for the targets are equal) and the answer is kept in the user's own
cache, under the entry's digest and this machine's identity. Where it is not allowed nothing is run:
what was never checked here is used on its publisher's word.

A choice that was never measured beside Inductor, because that did not compile, is searched for
again where searching is allowed.

It stores no entry and proposes nothing of its own; what nobody vouches for goes to the search as a
stranger's candidate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch_cudal1 import judge
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.device.target import compilers, judge_identity
from torch_cudal1.ir.records import NOT_EAGERS, Candidate, Entry, Miss, Region
from torch_cudal1.store.cache.resolve import Hit, Resolved
from torch_cudal1.store.context import Place
from torch_cudal1.store.trust.trust_policy import OWN

__all__ = [
    "STRANGER",
    "is_baseline",
    "is_untimed",
    "judged_by",
    "known_candidates",
    "noted",
    "refusal",
    "tell_refusals",
]

# the origin of a candidate that nobody vouches for: an entry it wins was judged here, not made here
STRANGER = "elsewhere"
_TRIES = 2  # searches in which Inductor may fail under the same compilers


def refusal(region: Region, hit: Hit, place: Place) -> str:
    """Why a hit may not be used as it is, "" if it may. A stale one may if it names a baseline,
    which cannot be wrong.
    """
    if not hit.vouched_by:
        return f"refused: {hit.stale}; `cudal1 warmup` judges it first, or a publisher on your list signs it"
    if hit.stale and not is_baseline(region, hit.entry.choice):
        return f"{hit.stale}; not re-validated yet"
    if region.granularity == "whole" and is_untimed(hit.entry):
        return "no cached decision"
    if told := _to_measure_again(hit.entry, place):
        return f"tuned without Inductor, which is measured now: {told}"
    found = _first_use(region, hit, place)
    return "" if found.passed else f"{hit.where} is refused: {found.reason}"


def noted(entry: Entry, before: Entry | None) -> Entry:
    """A new entry, with a note of how often it was tuned without Inductor by the compilers that are
    here now.
    """
    if not entry.without_inductor:
        return entry
    tries = 1 + (_tries(before) if before is not None else 0)
    note = {"compilers": compilers(entry.target.device), "tries": tries}
    return replace(entry, evidence={**entry.evidence, "without_inductor": note})


def known_candidates(region: Region, hit: Hit | None) -> list[Candidate]:
    """What an entry that may not be used as it is gives a search to begin with; a stranger's is
    marked, whatever it claims.
    """
    if (
        hit is None or hit.entry.choice.program.digest == region.key
    ):  # the region itself, which is in the race anyhow
        return []
    return [hit.entry.choice if hit.vouched_by else replace(hit.entry.choice, origin=STRANGER)]


def tell_refusals(region: Region, resolved: Resolved) -> None:
    """What was found and may not be used, for the report: the reason of a choice does not show what
    a search then found.
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
    return candidate.origin == "baseline" and candidate.program.digest == region.key


def is_untimed(entry: Entry) -> bool:
    """An island's entry: its kernel is right, and how fast is a question of the model around it."""
    return entry.evidence.get("granularity") == "island"


def judged_by(entry: Entry) -> str:
    """The identity of the machine that judged an entry; "" where the entry does not say."""
    told = entry.evidence.get("attestation")
    return str(told.get("judge", "")) if isinstance(told, Mapping) else ""


def _to_measure_again(entry: Entry, place: Place) -> str:
    """Why Inductor had no part in the choice, "" if it had or if to search again would change
    nothing.

    What failed for a moment runs at the second search. What does not run here fails in both, and
    waits for other compilers.
    """
    reason = entry.without_inductor
    if (
        place.settings.on_miss != "tune"
        or "compile" in place.settings.without
        or reason in ("", NOT_EAGERS)
    ):
        return ""
    return reason if compilers(place.device.type) and _tries(entry) < _TRIES else ""


def _tries(entry: Entry) -> int:
    """How often the compilers that are here now were asked for Inductor's part in this choice, and
    had none.
    """
    note = entry.evidence.get("without_inductor")
    if not isinstance(note, Mapping) or note.get("compilers") != compilers(entry.target.device):
        return 0
    tries = note.get("tries")
    return tries if isinstance(tries, int) else 0


@dataclass(frozen=True)
class _FirstUse:
    """What is known about an entry on this machine."""

    passed: bool
    reason: str


def _first_use(region: Region, hit: Hit, place: Place) -> _FirstUse:
    if is_baseline(region, hit.entry.choice) or _judged_here(hit):
        return _FirstUse(True, "judged here")
    known = _remembered(hit, place)
    if known is not None or place.settings.on_miss != "tune":
        return known or _FirstUse(True, "not checked on this machine yet")
    with place.cache.lock(region.key, place.target, place.contract):
        return _remembered(hit, place) or _checked(region, hit, place)


def _judged_here(hit: Hit) -> bool:
    """An entry of the own cache that names no machine was made here before entries named one."""
    by = judged_by(hit.entry)
    return by == judge_identity() or (not by and hit.vouched_by == OWN)


def _checked(region: Region, hit: Hit, place: Place) -> _FirstUse:
    try:
        verdict = judge.check(
            region, hit.entry.choice, judge.Job(place.settings, place.contract, place.device)
        )
    except (
        SandboxError
    ) as error:  # a machine that cannot judge uses it as one that may not search does
        return _FirstUse(True, f"not checked on this machine: {error}")
    wrong = verdict.failure
    found = _FirstUse(
        verdict.passed,
        f"wrong on this machine: {wrong.name}: {wrong.detail}" if wrong else "checked here",
    )
    telemetry.record(
        "judge",
        "first_use",
        region.key[:12],
        where=hit.where,
        passed=found.passed,
        reason=found.reason,
    )
    record = {
        "entry": hit.digest,
        "judge": judge_identity(),
        "passed": found.passed,
        "reason": found.reason,
    }
    place.cache.put_alias(_name(hit, place), record, place.target, place.contract)
    return found


def _remembered(hit: Hit, place: Place) -> _FirstUse | None:
    """The answer of an earlier first use, None if there was none. Only the own cache is asked:
    others used it elsewhere.
    """
    known: dict[str, Any] | Miss = place.cache.own.get_alias(
        _name(hit, place), place.target, place.contract
    )
    if (
        isinstance(known, Miss)
        or known.get("entry") != hit.digest
        or not isinstance(known.get("passed"), bool)
    ):
        return None
    return _FirstUse(known["passed"], str(known.get("reason")))


def _name(hit: Hit, place: Place) -> str:
    return hashlib.sha256(
        f"first use|{hit.digest}|{judge_identity()}|{place.target!r}".encode()
    ).hexdigest()
