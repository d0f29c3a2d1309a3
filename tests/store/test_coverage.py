"""What a deployment will have is told from files, and is what a look-up there would say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.store.bundles import GPU, KEY, OTHER_KEY, bundle_of, fill_cache
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


def find_coverage(
    cache: LocalCache, *places: Deployment, requirements: tuple[Requirement, ...] = REGIONS
) -> tuple[Coverage, ...]:
    return report_coverage(requirements, places or (CPU,), take_inventory(cache), cache)


def statuses(rows: tuple[Coverage, ...]) -> list[str]:
    return [row.status for row in rows]


def test_every_region_is_told_on_every_family(tmp_path: Path) -> None:
    rows = find_coverage(
        fill_cache(tmp_path / "cache"), CPU, CUDA, Deployment("cuda-sm_80", CONTRACT)
    )
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


def test_what_is_known_of_the_blocks_of_a_missing_region_is_told(tmp_path: Path) -> None:
    blocks = {"0" * 64: [(KEY, 31), ("1" * 64, 2)]}
    requirement = Requirement("model", ("0" * 64,), is_call=False, blocks=blocks)
    cache = fill_cache(tmp_path / "cache")
    (row,) = find_coverage(cache, requirements=(requirement,))
    # A start under on_miss="error" composes nothing.
    assert (row.status, row.served) == ("missing", False)
    assert row.detail == (
        "no entry; a block that occurs 31 times is decided: diag_matmul -> inductor; "
        "a block that occurs 2 times is not decided"
    )


def test_a_swap_judged_elsewhere_is_missing_and_a_baseline_is_not(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "cache")
    baseline = Candidate(program(), "eager", "baseline")
    cache.put(make_entry(region_key=program().digest, target=GPU, choice=baseline))
    cache.put(
        make_entry(region_key=OTHER_KEY, target=GPU, choice=baseline)
    )  # says that it is a baseline, and is not the region's
    requirements = (Requirement("model", (KEY, program().digest, OTHER_KEY), is_call=False),)
    there = dataclasses.replace(CUDA, sku="NVIDIA H200", torch="2.13.0")
    assert statuses(find_coverage(cache, there, requirements=requirements)) == [
        "decided",
        "baseline",
        "decided",
    ]
    other_gpu, other_torch = (
        dataclasses.replace(CUDA, **{name: "9.9"}) for name in ("sku", "torch")
    )
    assert statuses(find_coverage(cache, other_gpu, requirements=requirements)) == [
        "missing",
        "baseline",
        "missing",
    ]
    assert find_coverage(cache, other_gpu)[0].detail == "judged on NVIDIA H200"
    assert find_coverage(cache, other_torch)[0].detail == "judged on torch 2.13.0"


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
    (row,) = find_coverage(cache, requirements=(Requirement("model", (KEY,), is_call=False),))
    assert row.served
    assert row.detail.endswith("; tuned without Inductor: no compiler")
    cache.put(make_entry(evidence={**evidence, "baseline_failures": ["inductor"], **odd}))
    (row,) = find_coverage(cache, requirements=(Requirement("model", (KEY,), is_call=False),))
    assert "Inductor" not in row.detail


def test_a_kernel_of_a_part_does_not_serve_a_whole(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache")
    cache.put(make_entry(evidence={**make_entry().evidence, "granularity": "island"}))
    assert find_coverage(cache)[0].detail == "a kernel for a part of a model, never timed alone"


@pytest.mark.parametrize(
    ("contract_stored", "why"),
    [
        (Contract("strict"), "judged under precision 'strict'"),
        (Contract(assume_finite=True), "judged under precision 'match', assuming finite values"),
        (
            Contract(version=1),
            f"judged under tolerance version 1, this package asks for {TOLERANCE_VERSION}",
        ),
    ],
)
def test_another_contract_does_not_count(
    tmp_path: Path, contract_stored: Contract, why: str
) -> None:
    cache = LocalCache(tmp_path / "cache")
    cache.put(make_entry(contract=contract_stored))
    (row, _) = find_coverage(cache)
    assert (row.status, row.detail) == ("missing", why)


def test_rights_are_told(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache")
    cache.put(make_entry(contract=Contract(rights=("conv", "matmul"))))
    (row, _) = find_coverage(cache)
    assert row.status == "decided"
    assert row.detail.endswith("with the right to TF32 in conv and matmul")


def test_the_whole_call_is_told_where_it_was_measured_for_these_choices(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "cache")
    assert find_coverage(cache, requirements=WANTED)[-1].status == "not measured"
    candidate = make_entry().choice.digest
    for candidates, status in (([candidate], "not measured"), ([candidate, candidate], "measured")):
        value = {"winner": "eager", "note": "undone", "candidates": candidates}
        cache.put_decision_record(call_name([KEY, OTHER_KEY]), value, HERE, CONTRACT)
        row = find_coverage(cache, requirements=WANTED)[-1]
        assert (row.status, row.served, row.key) == (status, True, "")
    assert (row.runs, row.detail) == ("the module's own forward", "undone")
    assert (
        len(
            find_coverage(
                cache, requirements=(Requirement("a lock", (KEY, OTHER_KEY), is_call=False),)
            )
        )
        == 2
    )


def test_a_module_that_stays_as_it_is_needs_no_measurement(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache")
    cache.put(
        make_entry(region_key=program().digest, choice=Candidate(program(), "eager", "baseline"))
    )
    assert statuses(
        find_coverage(cache, requirements=(Requirement("model", (program().digest,)),))
    ) == ["baseline"]


def test_what_nobody_vouches_for_is_missing(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "cache", fill_cache(tmp_path / "made")
    elsewhere.put(
        make_entry(region_key=program().digest, choice=Candidate(program(), "eager", "baseline"))
    )
    import_bundle(bundle_of(elsewhere, tmp_path / "x.bundle"), folder)
    requirements = (Requirement("model", (KEY, program().digest)),)
    for trust in ("judge", "signed"):
        rows = find_coverage(
            cache_for(Settings(cache_dir=folder, trust=trust)), requirements=requirements
        )
        assert statuses(rows) == ["missing", "missing"]
        assert "nobody signed it" in rows[0].detail


def test_what_was_revoked_or_quarantined_is_missing(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "cache")
    revoked = tmp_path / "revoked.toml"
    digest = next(
        stored.digest
        for stored in take_inventory(cache).entries
        if stored.cache_path.family == "cpu-x86_64"
    )
    revoked.write_text(f'[[revoked]]\nentry = "{digest}"\nreason = "wrong for NaN"\n')
    revoked.chmod(0o600)
    rows = find_coverage(LocalCache(cache.root, rules=Rules(revoked=revoked)))
    assert statuses(rows) == ["missing", "decided"]
    assert "wrong for NaN" in rows[0].detail
    quarantine.quarantine_candidate(
        cache.root,
        quarantine.QuarantineRecord(KEY, make_entry().choice.digest, "differed in production"),
    )
    rows = find_coverage(cache)
    assert statuses(rows) == ["missing", "decided"]
    assert "differed in production" in rows[0].detail


def test_a_target_without_regions_is_told_and_is_no_miss(tmp_path: Path) -> None:
    requirements = (
        Requirement("sparse", (), left_out="the module's own forward runs: sparse inputs"),
    )
    (row,) = find_coverage(fill_cache(tmp_path / "cache"), requirements=requirements)
    assert (row.status, row.served, row.detail) == (
        "left out",
        True,
        "the module's own forward runs: sparse inputs",
    )
