"""Among a product's kernels the fastest right one is taken; what was not asked for lack of time is
not remembered as useless.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.search.kernel_cases import SIZES, features_of, product, took_us
from torch_cudal1 import judge, kernels
from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.fusion.partition import FusionGroup, is_product, partition
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.ir.records import (
    Accepted,
    Candidate,
    CheckResult,
    Contract,
    Region,
    Rejected,
    Target,
    Timing,
    Verdict,
)
from torch_cudal1.ir.schedule import Schedule
from torch_cudal1.judge.evaluate.prescreen import PrescreenResult
from torch_cudal1.kernels import Proposal
from torch_cudal1.kernels.features import KernelFeatures as Traits
from torch_cudal1.kernels.lowering import propose
from torch_cudal1.search import group_kernels, shortlist
from torch_cudal1.search.group_kernels import GroupKernels
from torch_cudal1.search.new_entry import store_checked_kernel
from torch_cudal1.search.schedules import propose_other_base
from torch_cudal1.search.shortlist import rights_of, select_fastest_correct
from torch_cudal1.search.space import build_search_space, list_fusion_groups
from torch_cudal1.search.strategy import Attempt, SearchStrategy, StagedSearch
from torch_cudal1.store.context import TuneContext, make_context

PROPOSED = tuple(
    Proposal("gemm", {"name": name}) for name in ("first", "best", "wrong", "broken", "slow")
)
PASSED = Verdict((CheckResult("numerics", True, 1.0, 2.0),))
TIMES_US: dict[str, float | str] = {
    "first": 80.0,
    "best": 40.0,
    "wrong": 30.0,
    "broken": "does not load",
    "slow": 110.0,
}


def raced(
    region: Region, candidates: Sequence[Candidate], job: judge.EvaluationConfig
) -> PrescreenResult:
    times = {at: TIMES_US[candidate.techniques[1]] for at, candidate in enumerate(candidates)}
    measured = {at: one for at, one in times.items() if isinstance(one, float)}
    return PrescreenResult(
        100.0, measured, {at: one for at, one in times.items() if isinstance(one, str)}
    )


def checked(region: Region, candidate: Candidate, job: judge.EvaluationConfig) -> Verdict:
    assert job.examples is None, "the whole model's inputs are not the fusion group's"
    wrong = candidate.techniques[1] == "wrong"
    return (
        Verdict((CheckResult("numerics", False, detail="an error of 9x eager's"),))
        if wrong
        else PASSED
    )


def built(
    region: Region, proposals: Sequence[Proposal], *how: judge.EvaluationConfig | Target
) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(region.program, "eager", "kernels", ("gemm", str(p.config["name"])))
        for p in proposals
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneContext:
    telemetry.reset()
    monkeypatch.setattr(kernels, "propose", lambda program, sm, rights: PROPOSED)
    monkeypatch.setattr(group_kernels, "PROPOSALS_PER_GROUP", len(PROPOSED))
    monkeypatch.setattr(judge, "build_candidates", built)
    monkeypatch.setattr(judge, "prestart_worker", lambda region, job: None)
    monkeypatch.setattr(shortlist, "prescreen", raced)
    monkeypatch.setattr(judge, "validate_candidate", checked)
    here = make_context(torch.device("cpu"), Settings(cache_dir=tmp_path, on_miss="tune"))
    return replace(here, target=Target("cuda", "sm_90", "some GPU", "580", torch.__version__, ""))


@pytest.fixture
def whole() -> Region:
    with torch.no_grad():
        (region,) = capture_regions(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval(), (torch.randn(4, 8),)
        )
    return region


def job_at(place: TuneContext) -> judge.EvaluationConfig:
    return judge.EvaluationConfig(
        place.settings, place.contract, torch.device("cpu"), (torch.randn(4, 8),)
    )


def kernels_of(place: TuneContext, deadline: float = float("inf")) -> GroupKernels:
    return GroupKernels(
        place, job_at(place), functools.partial(store_checked_kernel, place), deadline
    )


def around_products(whole: Region) -> tuple[FusionGroup, ...]:
    return partition(whole, products=True).groups


def test_the_fastest_right_kernel_is_taken_and_the_others_are_told(
    place: TuneContext, whole: Region
) -> None:
    best, reasons, saved_us = select_fastest_correct(
        whole, built(whole, PROPOSED), place, job_at(place), deadline=float("inf")
    )
    assert best is not None
    assert saved_us > 0
    assert best.techniques == ("gemm", "best")
    assert [reason.reason for reason in reasons] == [
        "does not load",
        "takes 110 us, eager 100 us",
        "an error of 9x eager's",
    ]


def test_few_products_are_checked_in_the_whole_only_and_nothing_unchecked_is_remembered(
    place: TuneContext, whole: Region
) -> None:
    found, _ = kernels_of(place).find_kernels(around_products(whole))
    assert [techniques for _, techniques in found.values()] == [("gemm", "wrong")]
    assert "entries_reused" not in telemetry.report().counters
    again, _ = kernels_of(place).find_kernels(around_products(whole))
    assert again.keys() == found.keys()
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
        found, _ = kernels_of(place).find_kernels(around_products(region))
        assert [techniques for _, techniques in found.values()] == [("gemm", "best")] * 3
    assert telemetry.report().counters["entries_reused"] == 3


def test_a_search_out_of_time_remembers_nothing(
    place: TuneContext, whole: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = judge.working_s()
    monkeypatch.setattr(
        judge,
        "build_candidates",
        lambda *given: (
            monkeypatch.setattr(judge, "working_s", lambda: begin + 9e9),
            built(*given),
        )[1],
    )
    found, reasons = kernels_of(place, begin + 1e9).find_kernels(around_products(whole))
    assert found == {}
    assert {reason.detector for reason in reasons} == {"budget"}
    monkeypatch.setattr(judge, "working_s", lambda: begin)
    monkeypatch.setattr(judge, "build_candidates", built)
    assert kernels_of(place).find_kernels(around_products(whole))[0]


def test_a_search_does_not_wait_for_compilers_beyond_its_budget(
    place: TuneContext, whole: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiles in the background may go on; it is not waited for, and not remembered as
    useless.
    """
    never: Future[tuple[Candidate, ...]] = Future()
    monkeypatch.setattr(judge, "in_background", lambda *given: never)
    now = judge.working_s()
    monkeypatch.setattr(judge, "working_s", lambda: now)
    hurried = kernels_of(place, now + 0.05)
    hurried.begin(around_products(whole))
    found, reasons = hurried.find_kernels(around_products(whole))
    assert found == {}
    assert {reason.detector for reason in reasons} == {"budget"}
    never.set_result(built(whole, PROPOSED))
    monkeypatch.setattr(
        judge,
        "in_background",
        lambda threads, build, region, proposals, *how: _done(built(region, proposals)),
    )
    again = kernels_of(place)
    again.begin(around_products(whole))
    assert again.find_kernels(around_products(whole))[0]


def _done(answer: tuple[Candidate, ...]) -> Future[tuple[Candidate, ...]]:
    future: Future[tuple[Candidate, ...]] = Future()
    future.set_result(answer)
    return future


def test_no_kernel_is_checked_beyond_the_budget(
    place: TuneContext, whole: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that are not raced are checked one by one; the second is not begun when the first has
    spent what was left.
    """
    begin = judge.working_s()
    clock = [begin]
    asked: list[str] = []

    def check(region: Region, candidate: Candidate, job: judge.EvaluationConfig) -> Verdict:
        asked.append(candidate.techniques[1])
        clock[0] = begin + 10.0
        return Verdict((CheckResult("numerics", False, detail="wrong"),))

    monkeypatch.setattr(
        kernels,
        "propose",
        lambda program, sm, rights: (
            Proposal("norm", {"name": "a"}),
            Proposal("norm", {"name": "b"}),
        ),
    )
    monkeypatch.setattr(judge, "working_s", lambda: clock[0])
    monkeypatch.setattr(judge, "validate_candidate", check)
    found, reasons = kernels_of(place, begin + 5.0).find_kernels(around_products(whole))
    assert (found, asked) == ({}, ["a"])
    assert [reason.detector for reason in reasons] == ["numerics", "budget"]


def propose_all(strategy: SearchStrategy) -> Iterator[Candidate | Rejected]:
    """Every proposal of a strategy, in order."""
    while (proposal := strategy.propose()) is not None:
        yield proposal


def attempt_of(candidate: Candidate, best_us: float | None, speedup: float) -> Attempt:
    """An attempt that was accepted at `best_us`, or timed and rejected."""
    passed = Verdict((CheckResult("numerics", True, 1.0, 2.0),))
    timing = Timing(passed, "eager", best_us or 100.0, 100.0, speedup, speedup, speedup, 14)
    decision = (
        Rejected("not faster", "timing", timing=timing) if best_us is None else Accepted(timing)
    )
    return Attempt(judge.Evaluation(candidate, decision, passed))


def test_where_products_are_most_of_the_work_they_are_judged_first(place: TuneContext) -> None:
    with torch.no_grad():
        (region,) = capture_regions(
            nn.Sequential(nn.Linear(2048, 2048), nn.GELU()).eval(), (torch.randn(4096, 2048),)
        )
    there = replace(place, device=torch.device("cuda"))
    ranking = judge.BaselineRanking(
        Candidate(region.program, "eager", "baseline"), {"eager": 100.0}
    )
    space = build_search_space(
        region, there, job_at(place), functools.partial(store_checked_kernel, there)
    )
    found = list(propose_all(StagedSearch(space, ranking, float("inf"))))
    first = next(one for one in found if isinstance(one, Candidate))
    assert first.techniques == ("gemm", "wrong")  # unchecked: the judge of the whole will say so


@pytest.mark.parametrize(
    ("best_us", "gain", "more"),
    [
        (None, 0.9, [{"norm"}]),
        (30.0, 1.3, [{"gemm", "norm"}]),
        (None, 1.03, [{"gemm", "norm"}, {"norm"}]),
    ],
)
def test_what_follows_the_products_depends_on_whether_they_won(
    place: TuneContext,
    monkeypatch: pytest.MonkeyPatch,
    best_us: float | None,
    gain: float,
    more: list[set[str]],
) -> None:
    """They lost: the rest is tried without them. They won: with them. They gained too little by
    themselves: both.
    """
    with torch.no_grad():
        layers = nn.Sequential(nn.Linear(2048, 2048), nn.LayerNorm(2048)).eval()
        (region,) = capture_regions(layers, (torch.randn(4096, 2048),))
    family = {True: Proposal("gemm", {"name": "best"}), False: Proposal("norm", {"name": "norm"})}
    monkeypatch.setattr(
        kernels,
        "propose",
        lambda program, sm, rights: (family[any(is_product(step) for step in program.steps)],),
    )
    monkeypatch.setattr(
        judge,
        "build_candidates",
        lambda region, proposals, *how: tuple(
            Candidate(region.program, "eager", "kernels", (p.family, "any")) for p in proposals
        ),
    )
    monkeypatch.setattr(
        shortlist,
        "prescreen",
        lambda region, candidates, job: PrescreenResult(100.0, {0: 40.0}, {}),
    )
    there = replace(place, device=torch.device("cuda"))
    space = build_search_space(
        region, there, job_at(place), functools.partial(store_checked_kernel, there)
    )
    ranking = judge.BaselineRanking(
        Candidate(region.program, "eager", "baseline"), {"eager": 100.0}
    )
    techniques = []
    strategy = StagedSearch(space, ranking, float("inf"))
    for one in propose_all(strategy):
        assert isinstance(one, Candidate)
        techniques.append(set(one.techniques) & {"gemm", "norm"})
        strategy.observe(attempt_of(one, best_us, gain))
    assert techniques == [{"gemm"}, *more]


@pytest.mark.parametrize(
    ("takes_us", "tried"), [(40.0, [{"gemm"}, {"norm"}]), (99.0, [{"gemm", "norm"}, {"norm"}])]
)
def test_kernels_for_products_come_first_where_they_save_much_though_other_steps_dominate(
    place: TuneContext, monkeypatch: pytest.MonkeyPatch, takes_us: float, tried: list[set[str]]
) -> None:
    """Inductor fuses the rest better than kernels beside it; and nothing of the rest is tried with
    products that lost.
    """
    with torch.no_grad():
        layers = nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 2)).eval()
        (region,) = capture_regions(layers, (torch.randn(512, 1024),))
    monkeypatch.setattr(
        kernels,
        "propose",
        lambda program, sm, rights: (
            Proposal("gemm" if any(map(is_product, program.steps)) else "norm", {"name": "any"}),
        ),
    )
    monkeypatch.setattr(
        judge,
        "build_candidates",
        lambda region, proposals, *how: tuple(
            Candidate(region.program, "eager", "kernels", (p.family, "any")) for p in proposals
        ),
    )
    monkeypatch.setattr(
        shortlist,
        "prescreen",
        lambda region, candidates, job: PrescreenResult(100.0, {0: takes_us}, {}),
    )
    there = replace(place, device=torch.device("cuda"))
    space = build_search_space(
        region, there, job_at(place), functools.partial(store_checked_kernel, there)
    )
    assert (space.dominant_groups, len(space.minor_groups)) == ((), 1)
    ranking = judge.BaselineRanking(
        Candidate(region.program, "eager", "baseline"), {"eager": 100.0}
    )
    candidates = (
        one
        for one in propose_all(StagedSearch(space, ranking, float("inf")))
        if isinstance(one, Candidate)
    )
    assert [set(one.techniques) & {"gemm", "norm"} for one in candidates] == tried


@pytest.mark.parametrize("best_us", [None, 30.0])
def test_every_fusion_group_that_a_search_asks_kernels_for_is_known_ahead(
    place: TuneContext, monkeypatch: pytest.MonkeyPatch, best_us: float | None
) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(2048, 2048), nn.LayerNorm(2048)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.triu(self.norm(torch.tanh(self.first(x))) @ x)

    with torch.no_grad():
        (region,) = capture_regions(Mixed().eval(), (torch.randn(2048, 2048),))
    asked: set[str] = set()

    def propose(program: Program, sm: int, rights: Sequence[str]) -> tuple[Proposal, ...]:
        asked.add(program.digest)
        return PROPOSED[:1]

    monkeypatch.setattr(kernels, "propose", propose)
    there = replace(place, device=torch.device("cuda"))
    space = build_search_space(
        region, there, job_at(place), functools.partial(store_checked_kernel, there)
    )
    ranking = judge.BaselineRanking(
        Candidate(region.program, "eager", "baseline"), {"eager": 100.0}
    )
    strategy = StagedSearch(space, ranking, float("inf"))
    if best_us is not None:
        strategy.observe(attempt_of(ranking.best, best_us, 1.3))
    assert list(propose_all(strategy))
    assert asked <= {group.region.program.digest for group in list_fusion_groups(region)}


def _kernel_and(operators: int) -> Program:
    """A kernel of its own, then so many element-wise operators."""
    one = TensorSpec("float32", (8,), (1,), "cuda")
    kernel = Program(
        (one,),
        (
            Alloc(1, one),
            Launch(
                "k", "k", (1, 1, 1), 32, 0, (LaunchArg("ptr", Value(0)), LaunchArg("ptr", Value(1)))
            ),
        ),
        (1,),
    )
    steps = [
        Aten("aten.relu.default", (Value(1 + index),), (), (2 + index,))
        for index in range(operators)
    ]
    return Program((one,), (Call(kernel, (0,), (1,)), *steps), (1 + operators,))


@pytest.mark.parametrize(
    ("operators", "schedule", "order", "other"),
    [
        (1, "inductor", ["inductor", "inductor+graph", "eager", "eager+graph"], "eager"),
        (
            1,
            "inductor+graph",
            ["inductor+graph", "inductor", "eager+graph", "eager"],
            "eager+graph",
        ),
        (1, "inductor", ["inductor", "eager"], None),  # it was tried
        (0, "eager", ["inductor", "inductor+graph", "eager"], None),  # there is nothing to compile
        (9, "inductor", ["inductor", "inductor+graph", "eager"], None),  # there is much
    ],
)
def test_the_best_is_tried_the_other_way_at_last_where_its_kernels_leave_little(
    operators: int, schedule: Schedule, order: list[str], other: str | None
) -> None:
    best = Candidate(_kernel_and(operators), schedule, "builtin", ("attention",))
    found = list(propose_other_base(best, [Schedule.parse(name) for name in order]))
    assert [(one.schedule, one.program, one.techniques) for one in found] == (
        [(other, best.program, ("attention",))] if other else []
    )


def test_a_best_without_kernels_is_not_tried_again(place: TuneContext) -> None:
    with torch.no_grad():
        (region,) = capture_regions(nn.ReLU(), (torch.randn(8),))
    assert not list(
        propose_other_base(
            Candidate(region.program, "inductor", "builtin"),
            ["inductor", "inductor+graph", "eager"],
        )
    )
    assert not list(propose_other_base(None, ["inductor", "inductor+graph", "eager"]))


def test_the_dearest_fusion_groups_come_first(place: TuneContext) -> None:
    with torch.no_grad():
        layers = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64)
        ).eval()
        (region,) = capture_regions(layers, (torch.randn(512, 64),))
    found = group_kernels._most_expensive_first(around_products(region))
    assert sorted(found, key=lambda group: group.steps) != found
    assert [group.region.program.inputs[-1].shape.count(2048) for group in found][-1] == 0


class Upper(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.triu(a @ b)


def test_a_product_that_a_rewrite_cuts_in_panels_is_offered_to_kernels_in_one_piece(
    place: TuneContext,
) -> None:
    with torch.no_grad():
        (region,) = capture_regions(Upper(), (torch.randn(1024, 1024), torch.randn(1024, 1024)))
    space = build_search_space(
        region, replace(place, device=torch.device("cuda")), job_at(place), lambda *given: None
    )
    assert space.variant is not None
    assert space.variant.techniques == ("triangular_matmul",)
    assert len(space.dominant_groups) == 1
    assert len(partition(replace(region, program=space.variant.program), products=True).groups) > 1


def test_strict_precision_grants_no_tf32_even_where_the_user_does(place: TuneContext) -> None:
    granted = replace(place, contract=Contract(rights=("matmul",)))
    assert rights_of(granted) == ("matmul",)
    assert rights_of(replace(place, contract=Contract("strict", rights=("matmul",)))) == ()


def test_what_differs_from_eager_as_another_precision_does_comes_last(
    place: TuneContext, whole: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = PrescreenResult(100.0, {0: 40.0, 1: 60.0}, {}, {0: 3e-4, 1: 1e-6})
    monkeypatch.setattr(shortlist, "prescreen", lambda region, candidates, job: found)
    answers = built(whole, PROPOSED[:2])
    best, *_ = select_fastest_correct(
        whole, answers, place, job_at(place), deadline=float("inf"), check=False
    )
    assert best is not None
    assert best.techniques == ("gemm", "best")


def test_what_beats_eager_and_not_one_pass_behind_the_product_has_no_place_in_a_model(
    place: TuneContext, whole: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = PrescreenResult(100.0, {0: 80.0, 1: 75.0}, {}, one_pass_us=70.0)
    monkeypatch.setattr(shortlist, "prescreen", lambda region, candidates, job: found)
    best, reasons, _ = select_fastest_correct(
        whole,
        built(whole, PROPOSED[:2]),
        place,
        job_at(place),
        deadline=float("inf"),
        check=False,
    )
    assert best is not None
    assert best.techniques == ("gemm", "best")
    assert [one.reason for one in reasons] == [
        "takes 80.0 us, eager 100 us, its product and one pass 70.0 us"
    ]


def test_heats_teach_the_next_search_what_to_compile_and_to_breed(
    place: TuneContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first search takes the family's order; after heats of other shapes it compiles others,
    and one generation more.
    """
    made: dict[int, tuple[Candidate, Proposal]] = {}
    compiled: list[Proposal] = []

    def build(
        region: Region, proposals: Sequence[Proposal], *how: judge.EvaluationConfig | Target
    ) -> tuple[Candidate, ...]:
        answers = built(
            region, [Proposal("gemm", {"name": str(at)}) for at in range(len(proposals))]
        )
        made.update(
            {id(one): (one, proposal) for one, proposal in zip(answers, proposals, strict=True)}
        )
        compiled.extend(proposals)
        return answers

    def heat(
        region: Region, candidates: Sequence[Candidate], job: judge.EvaluationConfig
    ) -> PrescreenResult:
        subject = features_of_region(region)
        return PrescreenResult(
            1e9, {at: took_us(subject, made[id(one)][1]) for at, one in enumerate(candidates)}, {}
        )

    monkeypatch.setattr(kernels, "propose", propose)
    monkeypatch.setattr(group_kernels, "PROPOSALS_PER_GROUP", 4)
    monkeypatch.setattr(judge, "build_candidates", build)
    monkeypatch.setattr(
        "torch_cudal1.search.build_cache.find_build", lambda *given: Refusal("absent")
    )
    monkeypatch.setattr("torch_cudal1.search.build_cache.store_build", lambda *given: None)
    monkeypatch.setattr(judge, "in_background", lambda threads, build, *given: _done(build(*given)))
    monkeypatch.setattr(shortlist, "prescreen", heat)
    held_out, *others = (
        Region(product(*size), ("input", "input")) for size in (SIZES[-1], *SIZES[:-1])
    )
    own = propose(held_out.program, 90)[:4]
    assert kernels_of(place)._list_proposals(held_out) == own
    taught = kernels_of(place)
    for region in others:
        taught._find_kernel(region, taught.job, check=False)
    compiled.clear()
    kernel, _ = kernels_of(place)._find_kernel(held_out, taught.job, check=False)
    assert kernel is not None
    assert set(compiled[:4]) != set(own)
    assert own[0] in compiled
    assert len(compiled) == len(set(compiled))
    subject = features_of(*SIZES[-1])
    best = made[id(kernel)][1]
    assert took_us(subject, best) == min(took_us(subject, one) for one in compiled)
    assert took_us(subject, best) <= min(took_us(subject, one) for one in own)


def features_of_region(region: Region) -> Traits:
    (m, k), (_, n) = (spec.shape for spec in region.program.inputs)
    return features_of(m, n, k)
