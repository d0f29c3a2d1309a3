"""The flow: what a look-up, a search and a fusion group give, with a judge that answers at once."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_cudal1 import judge, kernels
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError, SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.fusion.partition import partition, splice
from torch_cudal1.ir.cost import estimate_launch_us
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import (
    Accepted,
    Candidate,
    CheckResult,
    Region,
    Rejected,
    Target,
    Timing,
    Verdict,
)
from torch_cudal1.ir.schedule import Schedule
from torch_cudal1.kernels import Proposal
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.search import baselines, lower_bound
from torch_cudal1.search.baselines import list_baseline_schedules, rank_schedules
from torch_cudal1.search.group_kernels import GroupKernels
from torch_cudal1.search.new_entry import store_checked_kernel
from torch_cudal1.search.schedules import order_schedules
from torch_cudal1.search.space import SearchSpace, build_search_space
from torch_cudal1.search.strategy import Attempt, FixedOrder, StagedSearch
from torch_cudal1.search.tune import choose, tune
from torch_cudal1.search.tuning_loop import TuningSession
from torch_cudal1.store.context import TuneContext, make_context

CPU = torch.device("cpu")
PASSED = Verdict((CheckResult("numerics", True, 1.0, 2.0),))


class Reduced(nn.Module):
    """A reduction that a rewrite pushes through the product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum(-1)


class Diagonal(nn.Module):
    """A product with a diagonal matrix, which a rewrite makes element-wise."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.diag(a) @ b


def region_of(module: nn.Module, *inputs: torch.Tensor) -> Region:
    with torch.no_grad():
        (region,) = capture_regions(module.eval(), inputs)
    return region


@pytest.fixture
def region() -> Region:
    return region_of(Reduced(), torch.randn(256, 64))


@pytest.fixture
def place(tmp_path: Path) -> TuneContext:
    telemetry.reset()
    return make_context(CPU, Settings(cache_dir=tmp_path, on_miss="tune"))


class Court:
    """A judge that says what it is told to: the lower bound of each schedule's speed-up, or a
    reason to refuse.
    """

    def __init__(self, verdicts: dict[str, float | str]) -> None:
        self.verdicts, self.judged = verdicts, 0

    def rank_baselines(self, region, schedules, job):
        return judge.BaselineRanking(
            Candidate(region.program, "eager", "baseline"), {"eager": 100.0, "inductor": 110.0}, {}
        )

    def judge(self, region, candidate, ranking, job):
        self.judged += 1
        said = self.verdicts[candidate.schedule]
        if isinstance(said, str):
            return judge.Evaluation(
                candidate, Rejected(said, "numerics"), Verdict((CheckResult("numerics", False),))
            )
        timing = Timing(PASSED, "eager", 100 / said, 100.0, said, said, said, 14)
        return judge.Evaluation(candidate, Accepted(timing), PASSED)


@pytest.fixture
def court(monkeypatch: pytest.MonkeyPatch):
    def seat(verdicts: dict[str, float | str]) -> Court:
        court = Court(verdicts)
        monkeypatch.setattr(judge, "rank_baselines", court.rank_baselines)
        monkeypatch.setattr(judge, "evaluate_candidate", court.judge)
        return court

    return seat


def test_without_an_entry_the_baseline_runs_and_the_miss_is_told(region, place):
    choice = choose(region, replace(place, settings=place.settings.but(on_miss="baseline")))
    assert (choice.candidate.origin, choice.entry, choice.swapped) == ("baseline", None, False)
    assert telemetry.report().counters["resolve.miss"] == 1


def test_a_miss_can_be_an_error(region, place):
    with pytest.raises(CacheMissError, match="cudal1 warmup"):
        choose(region, replace(place, settings=place.settings.but(on_miss="error")))


def test_the_best_accepted_candidate_wins_and_is_found_again_without_a_search(region, place, court):
    seat = court({"eager": 2.0, "inductor": 3.0})
    first = choose(region, place)
    assert (first.candidate.schedule, first.swapped) == ("inductor", True)
    judged, tuned = seat.judged, telemetry.report().counters["regions_tuned"]
    again = choose(region, place)
    assert again.candidate == first.candidate
    assert (seat.judged, telemetry.report().counters["regions_tuned"]) == (judged, tuned)


@pytest.mark.parametrize("surprises", [True, False])
def test_a_second_process_starts_before_a_surprise_and_after_the_baselines_were_timed(
    place, court, monkeypatch, surprises
):
    """Of a product with diag(a) a rewrite leaves hardly anything; of the other module it saves less
    than a third.
    """
    module, inputs = (
        (Diagonal(), (torch.randn(512), torch.randn(512, 512)))
        if surprises
        else (Reduced(), (torch.randn(4, 64),))
    )
    told: list[str] = []
    seat = court({"eager": "too slow", "inductor": "too slow"})
    monkeypatch.setattr(judge, "prestart_worker", lambda region, job: told.append("begin"))
    monkeypatch.setattr(
        judge, "rank_baselines", lambda *given: told.append("race") or seat.rank_baselines(*given)
    )
    choose(region_of(module, *inputs), place)
    assert told == ["begin", "race", *(["begin"] if surprises else [])]


def test_where_everything_is_refused_the_best_baseline_is_remembered_with_the_reasons(
    region, place, court
):
    court({"eager": "less accurate than eager", "inductor": "too slow"})
    choice = choose(region, place)
    assert (choice.candidate.origin, choice.candidate.schedule) == ("baseline", "eager")
    assert {one["reason"] for one in choice.entry.tried} == {"less accurate than eager", "too slow"}


def session_of(region: Region, place: TuneContext, *attempts: Attempt) -> TuningSession:
    strategy = FixedOrder([])
    for attempt in attempts:
        strategy.observe(attempt)
    ranking = judge.BaselineRanking(
        Candidate(region.program, "eager", "baseline"), {"eager": 2700.0}
    )
    job = judge.EvaluationConfig(place.settings, place.contract, CPU)
    return TuningSession(region, place, strategy, ranking, job, math.inf, lambda *_: None)


def test_a_long_call_is_not_judged_again_with_a_graph_around_it(region, place):
    timing = Timing(PASSED, "eager", 900.0, 2700.0, 3.0, 2.9, 3.1, 14)
    first = Candidate(region.program, "inductor", "builtin", ("gemm",))
    session = session_of(region, place, Attempt(judge.Evaluation(first, Accepted(timing), PASSED)))
    assert "900 us" in str(session.check_launch_gain(replace(first, schedule="inductor+graph")))
    assert session.check_launch_gain(replace(first, schedule="eager")) is None
    other = replace(region.program, outputs=region.program.outputs * 2)
    assert (
        session.check_launch_gain(replace(first, program=other, schedule="inductor+graph")) is None
    )
    short = replace(timing, candidate_us=90.0, baseline_us=270.0)
    session = session_of(region, place, Attempt(judge.Evaluation(first, Accepted(short), PASSED)))
    assert session.check_launch_gain(replace(first, schedule="inductor+graph")) is None


@pytest.mark.parametrize(
    ("budget_s", "judged", "told"),
    [(12.0, 1, "2.0 s of the budget were left, and a judgement has taken 10.0 s"), (18.0, 2, "")],
)
def test_no_judgement_begins_that_would_end_far_beyond_the_budget(
    budget_s, judged, told, region, place, court, monkeypatch
):
    """On a busy machine a judgement takes what the whole search was given; the second one would
    double that.
    """
    seat, clock = court({"eager": "wrong", "inductor": "wrong"}), [1000.0]
    asked = seat.judge

    def slowly(*given):
        clock[0] += 10.0
        return asked(*given)

    monkeypatch.setattr(judge, "evaluate_candidate", slowly)
    monkeypatch.setattr(judge, "working_s", lambda: clock[0])
    entry = tune(region, replace(place, settings=place.settings.but(budget_s=budget_s)))
    assert seat.judged == judged
    assert [one["reason"] for one in entry.tried if one["decision"] == "not judged"] == [
        told
    ] * bool(told)


def test_a_spent_budget_judges_nothing_and_says_so(region, place, court):
    seat = court({"eager": 2.0, "inductor": 3.0})
    entry = tune(region, replace(place, settings=place.settings.but(budget_s=0.0)))
    assert seat.judged == 0
    assert {one["decision"] for one in entry.tried} == {"not judged"}
    assert entry.choice.origin == "baseline"


@pytest.mark.parametrize(("compiled_s", "judged"), [(45.0, 2), (55.0, 1)])
def test_what_would_still_be_compiling_long_after_the_budget_is_not_begun(
    region, place, court, monkeypatch, compiled_s, judged
):
    seat = court({"eager": 2.0, "inductor": 3.0})
    ranked = replace(
        seat.rank_baselines(region, [], None), ready_s={"eager": 0.1, "inductor": compiled_s}
    )
    monkeypatch.setattr(judge, "rank_baselines", lambda *given: ranked)
    entry = tune(region, replace(place, settings=place.settings.but(budget_s=20.0)))
    assert seat.judged == judged
    late = [one["reason"] for one in entry.tried if one["decision"] == "not judged"]
    assert all(
        reason.endswith(f"compiling the baseline has taken {compiled_s} s") for reason in late
    )
    assert bool(late) == (judged == 1)


@pytest.mark.parametrize(
    ("floor_us", "judged", "told"),
    [(99.0, 0, "100 us; the device needs at least 99.0 us"), (31.0, 1, "33.3 us")],
)
def test_near_what_the_device_can_do_at_all_nothing_more_is_judged(
    region, place, court, monkeypatch, floor_us, judged, told
):
    """Eager takes 100 us: near the first floor already, near the second one with the first
    candidate.
    """
    seat = court({"eager": 2.0, "inductor": 3.0})
    monkeypatch.setattr(lower_bound, "lower_bound_us", lambda program, device: floor_us)
    entry = tune(region, place)
    assert seat.judged == judged
    assert (entry.tried[-1]["decision"], entry.tried[-1]["reason"][: len(told)]) == (
        "not judged",
        told,
    )


@pytest.mark.parametrize(("floor_us", "raced"), [(0.0, 4), (400.0, 4), (100_000.0, 2)])
def test_graphs_are_raced_only_where_launching_can_matter(
    region, place, monkeypatch, floor_us, raced
):
    """Where results are gigabytes a graph saves nothing, and holds its inputs and results a second
    time.
    """
    asked: list[str] = []

    def rank_baselines(region, schedules, job):
        asked.extend(schedules)
        return judge.BaselineRanking(
            Candidate(region.program, "eager", "baseline"), {"eager": 100.0}, {}
        )

    monkeypatch.setattr(judge, "rank_baselines", rank_baselines)
    monkeypatch.setattr(
        baselines,
        "list_baseline_schedules",
        lambda place: [
            Schedule(base, cuda_graph)
            for cuda_graph in (False, True)
            for base in ("eager", "inductor")
        ],
    )
    ranking = rank_schedules(
        region, place, judge.EvaluationConfig(place.settings, place.contract, CPU), 15.0, floor_us
    )
    assert len(asked) == raced
    assert set(ranking.failures) == ({"eager+graph", "inductor+graph"} if raced == 2 else set())
    assert all("launches" in why for why in ranking.failures.values())


def test_a_graph_spares_launches_and_no_views(region):
    before = [step.target for step in region.program.steps]
    assert before == ["aten.t.default", "aten.addmm.default", "aten.sum.dim_IntList"]
    assert estimate_launch_us(region.program) == 2 * 5.0


@pytest.mark.parametrize(
    ("medians_us", "order"),
    [
        # two launches of at most 5 us each are much of 100 us and little of 1 ms
        (
            {"eager": 140.0, "inductor": 110.0, "eager+graph": 120.0, "inductor+graph": 100.0},
            [3, 1, 2, 0],
        ),
        (
            {"eager": 1100.0, "inductor": 1010.0, "eager+graph": 1090.0, "inductor+graph": 1000.0},
            [1, 3, 0, 2],
        ),
        # far slower ones come last, whatever they are
        (
            {"eager": 200.0, "inductor": 400.0, "eager+graph": 100.0, "inductor+graph": 90.0},
            [3, 2, 0, 1],
        ),
        ({"eager": 100.0}, [0]),
    ],
)
def test_schedules_come_in_the_order_in_which_a_candidate_wins_most_likely(
    region, medians_us, order
):
    names = ["eager", "inductor", "eager+graph", "inductor+graph"]
    ranking = judge.BaselineRanking(Candidate(region.program, "eager", "baseline"), medians_us, {})
    assert order_schedules(ranking, region) == [names[at] for at in order]


def test_a_graph_that_copies_more_than_it_saves_comes_after_the_same_without_one() -> None:
    """Launching is 5 us of 80, and half a gigabyte of inputs and results takes longer."""

    def order(rows: int) -> list[str]:
        inputs = tuple(TensorSpec("float32", (rows, 1024), (1024, 1), "cuda") for _ in range(2))
        program = Program(
            inputs, (Aten("aten.add.Tensor", (Value(0), Value(1)), (), (2,), False),), (2,)
        )
        ranking = judge.BaselineRanking(
            Candidate(program, "eager", "baseline"), {"inductor": 80.0, "inductor+graph": 80.0}, {}
        )
        return list(
            order_schedules(ranking, Region(program, ("input", "parameter"), "inference", "whole"))
        )

    assert order(64) == ["inductor+graph", "inductor"]
    assert order(1 << 17) == ["inductor", "inductor+graph"]


def test_an_entry_of_another_driver_or_torch_is_judged_again_unless_it_names_a_baseline(
    region, place, court
):
    seat = court({"eager": 2.0, "inductor": "too slow"})
    choose(region, place)
    elsewhere = replace(place, target=replace(place.target, torch="9.9.9"))
    asked = seat.judged
    assert (
        choose(region, replace(elsewhere, settings=place.settings.but(on_miss="baseline"))).entry
        is None
    )
    assert choose(region, elsewhere).swapped
    assert seat.judged > asked


class Islands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        return self.norm(torch.tanh(self.second(x)))


@pytest.fixture
def on_gpu(place, monkeypatch):
    """A place that looks like a GPU, whose build yields each fusion group's own steps as the "kernel"."""
    built: list[str] = []

    def build(region, proposals, job, target):
        built.append(region.key)
        return tuple(
            Candidate(region.program, "eager", "kernels", (proposal.family,))
            for proposal in proposals
        )

    monkeypatch.setattr(
        kernels, "propose", lambda program, sm, rights: (Proposal("norm", {"tile": 1}),)
    )
    monkeypatch.setattr(judge, "build_candidates", build)
    monkeypatch.setattr(judge, "validate_candidate", lambda region, candidate, job: PASSED)
    target = Target("cuda", "sm_90", "some GPU", "580", torch.__version__, "")
    return replace(place, target=target), built


def kernels_of(place: TuneContext, job: judge.EvaluationConfig) -> GroupKernels:
    return GroupKernels(place, job, functools.partial(store_checked_kernel, place))


def space_of(region: Region, place: TuneContext, job: judge.EvaluationConfig) -> SearchSpace:
    return build_search_space(region, place, job, functools.partial(store_checked_kernel, place))


def test_equal_fusion_groups_are_built_once_and_the_next_model_finds_them(on_gpu):
    place, built = on_gpu
    region = region_of(Islands(), torch.randn(4, 8))
    job = judge.EvaluationConfig(place.settings, place.contract, CPU)
    found, refused = kernels_of(place, job).find_kernels(partition(region).groups)
    assert len(found) == len(partition(region).groups) == 2
    assert (len(built), refused) == (1, [])
    program = splice(region.program, {group: callee for group, (callee, _) in found.items()})
    inputs = [torch.rand(spec.shape) for spec in region.program.inputs]
    assert torch.equal(prepare(program, CPU)(inputs)[0], prepare(region.program, CPU)(inputs)[0])

    other = region_of(
        nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.LayerNorm(16)), torch.randn(4, 3)
    )
    again, _ = kernels_of(place, job).find_kernels(partition(other).groups)
    assert (len(again), len(built)) == (1, 1)
    assert telemetry.report().counters["entries_reused"] == 1


def test_a_kernel_that_was_never_timed_is_not_taken_for_a_whole_model(on_gpu):
    place, _ = on_gpu
    whole = region_of(nn.Sequential(nn.Tanh(), nn.LayerNorm(16)), torch.randn(4, 16))
    job = judge.EvaluationConfig(place.settings, place.contract, CPU)
    assert kernels_of(place, job).find_kernels(partition(whole).groups)[0]
    choice = choose(whole, replace(place, settings=place.settings.but(on_miss="baseline")))
    assert (choice.entry, choice.swapped) == (None, False)


@pytest.mark.parametrize(
    ("settings", "joins"), [({}, False), ({"autotune": True}, True), ({"budget_s": 900.0}, True)]
)
def test_max_autotune_joins_when_asked_or_when_the_budget_allows(settings, joins, place):
    schedules = list_baseline_schedules(replace(place, settings=place.settings.but(**settings)))
    assert ("max-autotune" in schedules) == joins


def test_a_family_of_techniques_can_be_left_out_of_a_search(region, place, court):
    seat = court({"eager": 2.0, "inductor": 3.0})
    choice = choose(region, replace(place, settings=place.settings.but(without=("rewrites",))))
    assert (seat.judged, choice.swapped) == (0, False)  # this region is won by a rewrite alone


@pytest.mark.parametrize(
    ("without", "left"),
    [
        (
            (),
            {
                "eager",
                "inductor",
                "max-autotune",
                "eager+graph",
                "inductor+graph",
                "max-autotune+graph",
            },
        ),
        (("compile",), {"eager", "eager+graph"}),
        (("graphs",), {"eager", "inductor", "max-autotune"}),
        (("compile", "graphs"), {"eager"}),
    ],
)
def test_baselines_of_a_family_left_out_are_not_raced(without, left, place):
    there = replace(
        place,
        device=torch.device("cuda"),
        settings=place.settings.but(without=without, autotune=True),
    )
    assert set(list_baseline_schedules(there)) == left


@pytest.mark.parametrize(("without", "proposed"), [((), True), (("kernels",), False)])
def test_kernels_left_out_are_not_proposed(without, proposed, on_gpu):
    whole = region_of(nn.Sequential(nn.Tanh(), nn.LayerNorm(16)), torch.randn(4, 16))
    place, built = on_gpu
    there = replace(
        place, device=torch.device("cuda"), settings=place.settings.but(without=without)
    )
    ranking = judge.BaselineRanking(Candidate(whole.program, "eager", "baseline"), {"eager": 1.0})
    space = space_of(whole, there, judge.EvaluationConfig(there.settings, there.contract, CPU))
    first = StagedSearch(space, ranking, float("inf")).propose()
    assert (first is not None, bool(built)) == (proposed, proposed)


def test_a_family_that_does_not_exist_is_refused_by_name():
    with pytest.raises(SettingError, match="'spells'; expected some of rewrites"):
        Settings(without=("spells",))
    assert Settings.from_env({"TORCH_CUDAL1_WITHOUT": "kernels, graphs"}).without == (
        "kernels",
        "graphs",
    )
