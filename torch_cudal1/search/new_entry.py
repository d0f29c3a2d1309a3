"""Makes the entry of a search: its choice, the evidence for it, and what was tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from torch_cudal1 import judge
from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import make_attestation
from torch_cudal1.ir.records import Candidate, Entry, Region, Rejected
from torch_cudal1.ir.schedule import EAGER
from torch_cudal1.store.context import TuneContext

__all__ = ["make_baseline", "make_entry", "store_checked_kernel"]


def make_baseline(region: Region) -> Candidate:
    """The candidate that runs where nothing else may: the region's own Program, in eager."""
    return Candidate(region.program, EAGER, "baseline")


def make_entry(
    region: Region,
    place: TuneContext,
    choice: Candidate,
    *,
    evaluation: judge.Evaluation | None = None,
    ranking: judge.BaselineRanking | None = None,
    tried: Sequence[Mapping[str, Any]] = (),
) -> Entry:
    """An entry for `choice`. `evaluation`: of the choice, None for a baseline or a kernel that was
    only checked. `ranking`: of the baselines, None where they were not benchmarked.
    """
    # An entry without an evaluation claims no speed-up and no check.
    proof: Mapping[str, Any] = {"timing": None, "checks": []}
    if evaluation is not None and ranking is not None:
        proof = judge.make_evidence(evaluation, ranking)
    evidence = {
        **proof,
        "kind": region.kind,
        "granularity": region.granularity,
        "baselines_us": dict(ranking.medians_us) if ranking else {},
        "baseline_failures": dict(ranking.failures) if ranking else {},
        # Which machine judged: another one validates the entry at its first use.
        "attestation": make_attestation(),
    }
    return Entry(
        region_key=region.key,
        region_name=region.name,
        target=place.target,
        contract=place.contract,
        choice=choice,
        evidence=evidence,
        tried=tuple(tried),
        # UTC, since caches are shared between time zones.
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        package=__version__,
    )


def store_checked_kernel(
    place: TuneContext, region: Region, kernel: Candidate | None, rejected: Sequence[Rejected]
) -> None:
    """Store a fusion group's kernel, which was checked and never timed, or that there is none."""
    # Kept for `explain`: why a fusion group has no kernel.
    tried = [
        {"label": each.detector, "decision": "rejected", "reason": each.reason} for each in rejected
    ]
    # A baseline remembers that nothing was found, so that the next search does not compile again.
    place.cache.put(make_entry(region, place, kernel or make_baseline(region), tried=tried))
