"""What a deployment will have is told from files, and is what a look-up there would say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.store.bundles import GPU, KEY, OTHER_KEY, bundle_of, filled
from tests.store.conftest import CONTRACT, HERE, make_entry, program
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import TOLERANCE_VERSION, Candidate, Contract
from torch_cudal1.store.bundle.coverage import Coverage, Deployment, Requirement, report_coverage
from torch_cudal1.store.bundle.imported import import_bundle
from torch_cudal1.store.cache import quarantine
from torch_cudal1.store.cache.decision_record import call_name
from torch_cudal1.store.cache.inventory import take_inventory
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.context import cache_for
from torch_cudal1.store.trust.trust_policy import Rules

WANTED = (Requirement("model", (KEY, OTHER_KEY)),)
REGIONS = (Requirement("model", (KEY, OTHER_KEY), is_call=False),)
CPU, CUDA = Deployment("cpu-x86_64", CONTRACT), Deployment("cuda-sm_90", CONTRACT)


def covered(
    cache: LocalCache, *places: Deployment, wanted: tuple[Requirement, ...] = REGIONS
) -> tuple[Coverage, ...]:
    return report_coverage(wanted, places or (CPU,), take_inventory(cache), cache)


def statuses(rows: tuple[Coverage, ...]) -> list[str]:
    return [row.status for row in rows]


def test_every_region_is_told_on_every_family(tmp_path: Path) -> None:
    rows = covered(filled(tmp_path / "cache"), CPU, CUDA, Deployment("cuda-sm_80", CONTRACT))
    assert [(row.family, row.key, row.status) for row in rows] == [
        ("cpu-x86_64", KEY, "decided"),
        ("cpu-x86_64", OTHER_KEY, "decided"),
        ("cuda-sm_90", KEY, "decided"),
        ("cuda-sm_90", OTHER_KEY, "missing"),
        ("cuda-sm_80", KEY, "missing"),
        ("cuda-sm_80", OTHER_KEY, "missing"),
    ]
    assert [row.served for row in rows] == [True, True, True, False, False, False]
    assert (rows[0].name, rows[0].runs, rows[0].at_least) == (
        "block.0 (Größe)",
        "diag_matmul -> inductor",
        1.25,
    )


def test_a_swap_judged_elsewhere_is_missing_and_a_baseline_is_not(tmp_path: Path) -> None:
    cache = filled(tmp_path / "cache")
    own = Candidate(program(), "eager", "baseline")
    cache.put(make_entry(region_key=program().digest, target=GPU, choice=own))
    cache.put(
        make_entry(region_key=OTHER_KEY, target=GPU, choice=own)
    )  # says that it is a baseline, and is not the region's
    wanted = (Requirement("model", (KEY, program().digest, OTHER_KEY), is_call=False),)
    there = dataclasses.replace(CUDA, sku="NVIDIA H200", torch="2.13.0")
    assert statuses(covered(cache, there, wanted=wanted)) == ["decided", "baseline", "decided"]
    other_gpu, other_torch = (
        dataclasses.replace(CUDA, **{name: "9.9"}) for name in ("sku", "torch")
    )
    assert statuses(covered(cache, other_gpu, wanted=wanted)) == ["missing", "baseline", "missing"]
    assert covered(cache, other_gpu)[0].detail == "judged on NVIDIA H200"
    assert covered(cache, other_torch)[0].detail == "judged on torch 2.13.0"


@pytest.mark.parametrize("odd", [{}, {"baselines_us": []}, {"baselines_us": {"inductor": 1.0}}])
def test_what_was_tuned_without_inductor_serves_and_says_so(
    tmp_path: Path, odd: dict[str, object]
) -> None:
    cache, evidence = LocalCache(tmp_path / "cache"), make_entry().evidence
    cache.put(
        make_entry(
            evidence={
                **evidence,
                "baselines_us": {"eager": 2.0},
                "baseline_failures": {"inductor": "no compiler"},
            }
        )
    )
    (row,) = covered(cache, wanted=(Requirement("model", (KEY,), is_call=False),))
    assert row.served
    assert row.detail.endswith("; tuned without Inductor: no compiler")
    cache.put(make_entry(evidence={**evidence, "baseline_failures": ["inductor"], **odd}))
    (row,) = covered(cache, wanted=(Requirement("model", (KEY,), is_call=False),))
    assert "Inductor" not in row.detail


def test_a_kernel_of_a_part_does_not_serve_a_whole(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache")
    cache.put(make_entry(evidence={**make_entry().evidence, "granularity": "island"}))
    assert covered(cache)[0].detail == "a kernel for a part of a model, never timed alone"


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (Contract("strict"), "judged under precision 'strict'"),
        (Contract(assume_finite=True), "judged under precision 'match', assuming finite values"),
        (
            Contract(version=1),
            f"judged under tolerance version 1, this package asks for {TOLERANCE_VERSION}",
        ),
    ],
)
def test_another_contract_does_not_count(tmp_path: Path, held: Contract, why: str) -> None:
    cache = LocalCache(tmp_path / "cache")
    cache.put(make_entry(contract=held))
    (row, _) = covered(cache)
    assert (row.status, row.detail) == ("missing", why)


def test_rights_are_told(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache")
    cache.put(make_entry(contract=Contract(rights=("conv", "matmul"))))
    (row, _) = covered(cache)
    assert row.status == "decided"
    assert row.detail.endswith("with the right to TF32 in conv and matmul")


def test_the_whole_call_is_told_where_it_was_measured_for_these_choices(tmp_path: Path) -> None:
    cache = filled(tmp_path / "cache")
    assert covered(cache, wanted=WANTED)[-1].status == "not measured"
    candidate = make_entry().choice.digest
    for candidates, status in (([candidate], "not measured"), ([candidate, candidate], "measured")):
        value = {"winner": "eager", "note": "undone", "candidates": candidates}
        cache.put_decision_record(call_name([KEY, OTHER_KEY]), value, HERE, CONTRACT)
        row = covered(cache, wanted=WANTED)[-1]
        assert (row.status, row.served, row.key) == (status, True, "")
    assert (row.runs, row.detail) == ("the module's own forward", "undone")
    assert (
        len(covered(cache, wanted=(Requirement("a lock", (KEY, OTHER_KEY), is_call=False),))) == 2
    )


def test_a_module_that_stays_as_it_is_needs_no_measurement(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache")
    cache.put(
        make_entry(region_key=program().digest, choice=Candidate(program(), "eager", "baseline"))
    )
    assert statuses(covered(cache, wanted=(Requirement("model", (program().digest,)),))) == [
        "baseline"
    ]


def test_what_nobody_vouches_for_is_missing(tmp_path: Path) -> None:
    folder, made = tmp_path / "cache", filled(tmp_path / "made")
    made.put(
        make_entry(region_key=program().digest, choice=Candidate(program(), "eager", "baseline"))
    )
    import_bundle(bundle_of(made, tmp_path / "x.bundle"), folder)
    wanted = (Requirement("model", (KEY, program().digest)),)
    for trust in ("judge", "signed"):
        rows = covered(cache_for(Settings(cache_dir=folder, trust=trust)), wanted=wanted)
        assert statuses(rows) == ["missing", "missing"]
        assert "nobody signed it" in rows[0].detail


def test_what_was_revoked_or_quarantined_is_missing(tmp_path: Path) -> None:
    cache = filled(tmp_path / "cache")
    revoked = tmp_path / "revoked.toml"
    digest = next(
        held.digest
        for held in take_inventory(cache).entries
        if held.cache_path.family == "cpu-x86_64"
    )
    revoked.write_text(f'[[revoked]]\nentry = "{digest}"\nreason = "wrong for NaN"\n')
    revoked.chmod(0o600)
    rows = covered(LocalCache(cache.root, rules=Rules(revoked=revoked)))
    assert statuses(rows) == ["missing", "decided"]
    assert "wrong for NaN" in rows[0].detail
    quarantine.quarantine_candidate(
        cache.root,
        quarantine.QuarantineRecord(KEY, make_entry().choice.digest, "differed in production"),
    )
    rows = covered(cache)
    assert statuses(rows) == ["missing", "decided"]
    assert "differed in production" in rows[0].detail


def test_a_target_without_regions_is_told_and_is_no_miss(tmp_path: Path) -> None:
    wanted = (Requirement("sparse", (), left_out="the module's own forward runs: sparse inputs"),)
    (row,) = covered(filled(tmp_path / "cache"), wanted=wanted)
    assert (row.status, row.served, row.detail) == (
        "left out",
        True,
        "the module's own forward runs: sparse inputs",
    )
