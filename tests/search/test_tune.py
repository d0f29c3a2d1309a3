"""The flow: what a look-up, a search and a fusion group give, with a judge that answers at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.entries import add_one_to_output
from tests.search.scripted_judge import CPU, Reduced, TwoGroups, build_group_kernels, capture_region
from torch_cudal1 import judge
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError
from torch_cudal1.graph.fusion.partition import partition, splice
from torch_cudal1.ir.cost import estimate_launch_us
from torch_cudal1.ir.records import Candidate
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.search import convolution_choice
from torch_cudal1.search.operator_timing import OperatorChoice
from torch_cudal1.search.tune import _limit_candidates_s, choose


class Diagonal(nn.Module):
    """A product with a diagonal matrix, which a rewrite makes element-wise."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.diag(a) @ b


def test_without_an_entry_the_baseline_runs_and_the_miss_is_told(region, place):
    choice = choose(region, replace(place, settings=place.settings.but(on_miss="baseline")))
    assert (choice.candidate.origin, choice.entry, choice.swapped) == ("baseline", None, False)
    assert telemetry.report().counters["resolve.miss"] == 1


def test_a_miss_can_be_an_error(region, place):
    with pytest.raises(CacheMissError, match="cudal1 warmup"):
        choose(region, replace(place, settings=place.settings.but(on_miss="error")))


def test_the_best_accepted_candidate_wins_and_is_found_again_without_a_search(
    region, place, script_judge
):
    scripted = script_judge({"eager": 2.0, "inductor": 3.0})
    first = choose(region, place)
    assert (first.candidate.schedule, first.swapped) == ("inductor", True)
    evaluated, tuned = scripted.evaluations, telemetry.report().counters["regions_tuned"]
    again = choose(region, place)
    assert again.candidate == first.candidate
    assert (scripted.evaluations, telemetry.report().counters["regions_tuned"]) == (
        evaluated,
        tuned,
    )


@pytest.mark.parametrize("surprises", [True, False])
def test_a_second_process_starts_before_a_surprise_and_after_the_baselines_were_timed(
    place, script_judge, monkeypatch, surprises
):
    """Of a product with diag(a) a rewrite leaves hardly anything; of the other module it saves less
    than a third.
    """
    module, inputs = (
        (Diagonal(), (torch.randn(512), torch.randn(512, 512)))
        if surprises
        else (Reduced(), (torch.randn(4, 64),))
    )
    events: list[str] = []
    scripted = script_judge({"eager": "too slow", "inductor": "too slow"})
    monkeypatch.setattr(judge, "prestart_worker", lambda region, job: events.append("begin"))
    monkeypatch.setattr(
        judge,
        "rank_baselines",
        lambda *arguments: events.append("benchmark") or scripted.rank_baselines(*arguments),
    )
    choose(capture_region(module, *inputs), place)
    assert events == ["begin", "benchmark", *(["begin"] if surprises else [])]


@pytest.mark.parametrize(
    ("budget_s", "baselines_s", "expected_s"),
    [(5.0, 20.0, 5.0), (30.0, 100.0, 30.0), (60.0, 20.0, 40.0), (60.0, 45.0, 30.0)],
)
def test_a_long_budget_holds_the_baselines_and_a_short_one_is_for_candidates(
    budget_s: float, baselines_s: float, expected_s: float
) -> None:
    assert _limit_candidates_s(budget_s, baselines_s) == expected_s


def test_where_everything_is_refused_the_best_baseline_is_remembered_with_the_reasons(
    region, place, script_judge
):
    script_judge({"eager": "less accurate than eager", "inductor": "too slow"})
    choice = choose(region, place)
    assert (choice.candidate.origin, choice.candidate.schedule) == ("baseline", "eager")
    assert {attempt["reason"] for attempt in choice.entry.tried} == {
        "less accurate than eager",
        "too slow",
    }


@pytest.mark.parametrize(("schedule", "has_operators"), [("eager", False), ("inductor", True)])
def test_a_baseline_that_stays_has_the_faster_operators_where_launches_are_spared(
    region, place, script_judge, monkeypatch, schedule, has_operators
):
    script_judge({"eager": "wrong", "inductor": "wrong"})
    best = Candidate(region.program, schedule, "baseline")
    monkeypatch.setattr(
        judge,
        "rank_baselines",
        lambda *_: judge.BaselineRanking(best, {"eager": 100.0, "inductor": 100.0}, {}),
    )
    operators = OperatorChoice(add_one_to_output(region.program), ("convolution as product",))
    monkeypatch.setattr(convolution_choice, "choose_convolutions", lambda *_: operators)
    choice = choose(region, place)
    assert (choice.candidate.origin, choice.candidate.schedule) == ("baseline", schedule)
    expected = operators if has_operators else OperatorChoice(region.program)
    assert choice.candidate.program == expected.program
    assert choice.candidate.techniques == expected.techniques
    # The entry that was stored says the same.
    again = choose(region, place)
    assert again.entry is not None
    assert again.candidate == choice.candidate


def test_a_graph_spares_launches_and_no_views(region):
    before = [step.target for step in region.program.steps]
    assert before == ["aten.t.default", "aten.addmm.default", "aten.sum.dim_IntList"]
    assert estimate_launch_us(region.program) == 2 * 5.0


def test_an_entry_of_another_driver_or_torch_is_judged_again_unless_it_names_a_baseline(
    region, place, script_judge
):
    scripted = script_judge({"eager": 2.0, "inductor": "too slow"})
    choose(region, place)
    elsewhere = replace(place, target=replace(place.target, torch="9.9.9"))
    evaluations_before = scripted.evaluations
    assert (
        choose(region, replace(elsewhere, settings=place.settings.but(on_miss="baseline"))).entry
        is None
    )
    assert choose(region, elsewhere).swapped
    assert scripted.evaluations > evaluations_before


def test_equal_fusion_groups_are_built_once_and_the_next_model_finds_them(on_gpu):
    place, built = on_gpu
    region = capture_region(TwoGroups(), torch.randn(4, 8))
    job = judge.EvaluationConfig(place.settings, place.contract, CPU)
    replacements, refused = build_group_kernels(place, job).find_kernels(partition(region).groups)
    assert len(replacements) == len(partition(region).groups) == 2
    assert (len(built), refused) == (1, [])
    program = splice(region.program, {group: callee for group, (callee, _) in replacements.items()})
    inputs = [torch.rand(spec.shape) for spec in region.program.inputs]
    assert torch.equal(prepare(program, CPU)(inputs)[0], prepare(region.program, CPU)(inputs)[0])

    other = capture_region(
        nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.LayerNorm(16)), torch.randn(4, 3)
    )
    again, _ = build_group_kernels(place, job).find_kernels(partition(other).groups)
    assert (len(again), len(built)) == (1, 1)
    assert telemetry.report().counters["entries_reused"] == 1


def test_a_kernel_that_was_never_timed_is_not_taken_for_a_whole_model(on_gpu):
    place, _ = on_gpu
    region = capture_region(nn.Sequential(nn.Tanh(), nn.LayerNorm(16)), torch.randn(4, 16))
    job = judge.EvaluationConfig(place.settings, place.contract, CPU)
    assert build_group_kernels(place, job).find_kernels(partition(region).groups)[0]
    choice = choose(region, replace(place, settings=place.settings.but(on_miss="baseline")))
    assert (choice.entry, choice.swapped) == (None, False)


def test_a_family_of_techniques_can_be_left_out_of_a_search(region, place, script_judge):
    scripted = script_judge({"eager": 2.0, "inductor": 3.0})
    choice = choose(region, replace(place, settings=place.settings.but(without=("rewrites",))))
    assert (scripted.evaluations, choice.swapped) == (
        0,
        False,
    )  # this region is won by a rewrite alone
