"""An entry holds its choice, the evidence for it and what was tried; without an evaluation it claims
neither a check nor a speed-up.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.search.scripted_judge import PASSED
from torch_cudal1 import judge
from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import make_attestation
from torch_cudal1.ir.records import Accepted, Candidate, Region, Rejected, Timing
from torch_cudal1.search.new_entry import make_baseline, make_entry, store_checked_kernel
from torch_cudal1.store.cache.resolve import resolve
from torch_cudal1.store.context import TuneContext


def test_an_entry_without_an_evaluation_claims_no_check_and_no_speed_up(
    region: Region, place: TuneContext
) -> None:
    entry = make_entry(region, place, make_baseline(region))
    assert (entry.choice.origin, entry.choice.schedule) == ("baseline", "eager")
    assert entry.choice.program == region.program
    assert (entry.evidence["timing"], entry.evidence["checks"]) == (None, [])
    assert entry.evidence["baselines_us"] == {}
    assert (entry.region_key, entry.target) == (region.key, place.target)
    assert (entry.contract, entry.package) == (place.contract, __version__)


def test_the_evidence_names_the_machine_and_a_moment_in_utc(
    region: Region, place: TuneContext
) -> None:
    entry = make_entry(region, place, make_baseline(region))
    assert entry.evidence["attestation"] == make_attestation()
    created = datetime.fromisoformat(entry.created)
    assert created.utcoffset() == UTC.utcoffset(None)
    assert abs((datetime.now(UTC) - created).total_seconds()) < 60


def test_an_evaluated_choice_brings_its_timing_its_checks_and_the_baselines(
    region: Region, place: TuneContext
) -> None:
    candidate = Candidate(region.program, "inductor", "builtin", ("gemm",))
    timing = Timing(PASSED, "eager", 50.0, 100.0, 2.0, 1.9, 2.1, 14)
    evaluation = judge.Evaluation(candidate, Accepted(timing), PASSED)
    ranking = judge.BaselineRanking(
        make_baseline(region), {"eager": 100.0}, {"inductor": "no compiler"}
    )
    attempts = [{"label": "gemm", "decision": "accepted"}]
    entry = make_entry(
        region, place, candidate, evaluation=evaluation, ranking=ranking, tried=attempts
    )
    assert entry.choice == candidate
    assert entry.evidence["timing"]["speedup"] == 2.0
    assert [check["name"] for check in entry.evidence["checks"]] == ["numerics"]
    assert entry.evidence["baselines_us"] == {"eager": 100.0}
    assert entry.evidence["baseline_failures"] == {"inductor": "no compiler"}
    assert list(entry.tried) == attempts


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_checked_kernel_or_that_there_is_none_is_stored_with_the_reasons(
    has_kernel: bool, region: Region, place: TuneContext
) -> None:
    group = replace(region, granularity="island")
    kernel = Candidate(region.program, "eager", "kernels", ("gemm",)) if has_kernel else None
    store_checked_kernel(place, group, kernel, [Rejected("an error of 9x", "numerics")])
    hit = resolve(group, place.sources, place.target, place.contract).hit
    assert hit is not None
    assert hit.entry.choice.origin == ("kernels" if has_kernel else "baseline")
    assert hit.entry.evidence["granularity"] == "island"
    assert [dict(attempt) for attempt in hit.entry.tried] == [
        {"label": "numerics", "decision": "rejected", "reason": "an error of 9x"}
    ]
