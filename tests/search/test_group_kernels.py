"""Kernels for the fusion groups of a model: each kind of group is built, checked and stored once, within
the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.search.kernel_cases import SIZES, features_of, product, took_us
from tests.search.scripted_kernels import (
    PROPOSED,
    build_by_name,
    capture_linear,
    complete_future,
    make_group_kernels,
    partition_products,
    patch_search,
)
from torch_cudal1 import judge, kernels
from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.fusion.partition import partition
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import (
    Candidate,
    CheckResult,
    Region,
    Target,
    Verdict,
)
from torch_cudal1.judge.evaluate.prescreen import PrescreenResult
from torch_cudal1.kernels import Proposal
from torch_cudal1.kernels.features import KernelFeatures as Traits
from torch_cudal1.kernels.lowering import propose
from torch_cudal1.search import group_kernels, shortlist
from torch_cudal1.store.context import TuneContext


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneContext:
    return patch_search(tmp_path, monkeypatch)


@pytest.fixture
def region() -> Region:
    return capture_linear()


def test_few_products_are_checked_in_the_whole_only_and_nothing_unchecked_is_remembered(
    place: TuneContext, region: Region
) -> None:
    replacements, _ = make_group_kernels(place).find_kernels(partition_products(region))
    assert [techniques for _, techniques in replacements.values()] == [("gemm", "wrong")]
    assert "entries_reused" not in telemetry.report().counters
    again, _ = make_group_kernels(place).find_kernels(partition_products(region))
    assert again.keys() == replacements.keys()
    assert "entries_reused" not in telemetry.report().counters


def test_many_different_products_are_checked_one_by_one_and_asked_once(
    place: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_kernels, "_MAX_UNCHECKED_PRODUCTS", 2)
    with torch.no_grad():
        layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 24), nn.Linear(24, 8)
        ).eval()
        (region,) = capture_regions(layers, (torch.randn(4, 8),))
    for _ in range(2):
        replacements, _ = make_group_kernels(place).find_kernels(partition_products(region))
        assert [techniques for _, techniques in replacements.values()] == [("gemm", "best")] * 3
    assert telemetry.report().counters["entries_reused"] == 3


def test_the_fastest_correct_kernel_of_a_norm_is_remembered_for_every_model(
    place: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole region would check it too, but few models have no norm of that width."""
    proposed = tuple(Proposal("norm", proposal.config) for proposal in PROPOSED)
    monkeypatch.setattr(kernels, "propose", lambda program, sm, rights: proposed)
    for count in (1, 2):
        layers = nn.Sequential(*(nn.LayerNorm(16) for _ in range(count))).eval()
        with torch.no_grad():
            (region,) = capture_regions(layers, (torch.randn(4, 16),))
        replacements, _ = make_group_kernels(place).find_kernels(partition(region).groups)
        # "wrong" is faster, and does not pass its checks.
        assert {techniques for _, techniques in replacements.values()} == {("gemm", "best")}
    assert telemetry.report().counters["entries_reused"] == 1


def test_a_search_out_of_time_remembers_nothing(
    place: TuneContext, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = judge.working_s()
    monkeypatch.setattr(
        judge,
        "build_candidates",
        lambda *arguments: (
            monkeypatch.setattr(judge, "working_s", lambda: begin + 9e9),
            build_by_name(*arguments),
        )[1],
    )
    replacements, reasons = make_group_kernels(place, begin + 1e9).find_kernels(
        partition_products(region)
    )
    assert replacements == {}
    assert {reason.detector for reason in reasons} == {"budget"}
    monkeypatch.setattr(judge, "working_s", lambda: begin)
    monkeypatch.setattr(judge, "build_candidates", build_by_name)
    assert make_group_kernels(place).find_kernels(partition_products(region))[0]


def test_a_search_does_not_wait_for_compilers_beyond_its_budget(
    place: TuneContext, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiles in the background may go on; it is not waited for, and not remembered as
    useless.
    """
    never: Future[tuple[Candidate, ...]] = Future()
    monkeypatch.setattr(judge, "run_in_background", lambda *arguments: never)
    now = judge.working_s()
    monkeypatch.setattr(judge, "working_s", lambda: now)
    hurried = make_group_kernels(place, now + 0.05)
    hurried.begin(partition_products(region))
    replacements, reasons = hurried.find_kernels(partition_products(region))
    assert replacements == {}
    assert {reason.detector for reason in reasons} == {"budget"}
    never.set_result(build_by_name(region, PROPOSED))
    monkeypatch.setattr(
        judge,
        "run_in_background",
        lambda threads, build, region, proposals, *how: complete_future(
            build_by_name(region, proposals)
        ),
    )
    again = make_group_kernels(place)
    again.begin(partition_products(region))
    assert again.find_kernels(partition_products(region))[0]


def test_no_kernel_is_checked_beyond_the_budget(
    place: TuneContext, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that are not benchmarked are checked one by one; the second is not begun when the first has
    spent what was left.
    """
    begin = judge.working_s()
    clock = [begin]
    checked_names: list[str] = []

    def check(region: Region, candidate: Candidate, job: judge.EvaluationConfig) -> Verdict:
        checked_names.append(candidate.techniques[1])
        clock[0] = begin + 10.0
        return Verdict((CheckResult("numerics", False, detail="wrong"),))

    monkeypatch.setattr(
        kernels,
        "propose",
        lambda program, sm, rights: (
            Proposal("elementwise", {"name": "a"}),
            Proposal("elementwise", {"name": "b"}),
        ),
    )
    monkeypatch.setattr(judge, "working_s", lambda: clock[0])
    monkeypatch.setattr(judge, "validate_candidate", check)
    replacements, reasons = make_group_kernels(place, begin + 5.0).find_kernels(
        partition_products(region)
    )
    assert (replacements, checked_names) == ({}, ["a"])
    assert [reason.detector for reason in reasons] == ["numerics", "budget"]


def test_the_dearest_fusion_groups_come_first(place: TuneContext) -> None:
    with torch.no_grad():
        layers = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64)
        ).eval()
        (region,) = capture_regions(layers, (torch.randn(512, 64),))
    ordered = group_kernels._sort_by_cost(partition_products(region))
    assert sorted(ordered, key=lambda group: group.steps) != ordered
    assert [group.region.program.inputs[-1].shape.count(2048) for group in ordered][-1] == 0


def test_times_teach_the_next_search_what_to_compile_and_to_breed(
    place: TuneContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first search takes the family's order; after benchmarks of other shapes it compiles others,
    and one generation more.
    """
    proposal_of: dict[int, tuple[Candidate, Proposal]] = {}
    compiled: list[Proposal] = []

    def build(
        region: Region, proposals: Sequence[Proposal], *how: judge.EvaluationConfig | Target
    ) -> tuple[Candidate, ...]:
        answers = build_by_name(
            region, [Proposal("gemm", {"name": str(at)}) for at in range(len(proposals))]
        )
        proposal_of.update(
            {id(item): (item, proposal) for item, proposal in zip(answers, proposals, strict=True)}
        )
        compiled.extend(proposals)
        return answers

    def prescreen_by_cost(
        region: Region,
        candidates: Sequence[Candidate],
        job: judge.EvaluationConfig,
        eager: Program,
    ) -> PrescreenResult:
        subject = features_of_region(region)
        return PrescreenResult(
            1e9,
            {at: took_us(subject, proposal_of[id(item)][1]) for at, item in enumerate(candidates)},
            {},
        )

    monkeypatch.setattr(kernels, "propose", propose)
    monkeypatch.setattr(group_kernels, "PROPOSALS_PER_GROUP", 4)
    monkeypatch.setattr(judge, "build_candidates", build)
    monkeypatch.setattr(
        "torch_cudal1.search.build_cache.find_build", lambda *arguments: Refusal("absent")
    )
    monkeypatch.setattr("torch_cudal1.search.build_cache.store_build", lambda *arguments: None)
    monkeypatch.setattr(
        judge,
        "run_in_background",
        lambda threads, build, *arguments: complete_future(build(*arguments)),
    )
    monkeypatch.setattr(shortlist, "prescreen", prescreen_by_cost)
    held_out, *other_regions = (
        Region(product(*size), ("input", "input")) for size in (SIZES[-1], *SIZES[:-1])
    )
    first_proposals = propose(held_out.program, 90)[:4]
    assert make_group_kernels(place)._list_proposals(held_out) == first_proposals
    taught = make_group_kernels(place)
    for region in other_regions:
        taught._find_kernel(region, taught.job, check=False)
    compiled.clear()
    kernel, _ = make_group_kernels(place)._find_kernel(held_out, taught.job, check=False)
    assert kernel is not None
    assert set(compiled[:4]) != set(first_proposals)
    assert first_proposals[0] in compiled
    assert len(compiled) == len(set(compiled))
    subject = features_of(*SIZES[-1])
    best = proposal_of[id(kernel)][1]
    assert took_us(subject, best) == min(took_us(subject, item) for item in compiled)
    assert took_us(subject, best) <= min(took_us(subject, item) for item in first_proposals)


def features_of_region(region: Region) -> Traits:
    (m, k), (_, n) = (spec.shape for spec in region.program.inputs)
    return features_of(m, n, k)
