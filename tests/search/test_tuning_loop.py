"""Candidates are evaluated until they, the budget or what is left to gain runs out; each that is not
says why.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.search.scripted_judge import CPU
from tests.search.scripted_kernels import PASSED
from torch_cudal1 import judge
from torch_cudal1.ir.records import (
    Accepted,
    Candidate,
    Region,
    Timing,
)
from torch_cudal1.search import lower_bound
from torch_cudal1.search.strategy import Attempt, FixedOrder
from torch_cudal1.search.tune import tune
from torch_cudal1.search.tuning_loop import TuningSession
from torch_cudal1.store.context import TuneContext


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


def test_a_graph_that_copies_next_to_nothing_is_not_left_out_again(region, place):
    timing = Timing(PASSED, "eager", 90.0, 270.0, 3.0, 2.9, 3.1, 14)
    first = Candidate(region.program, "inductor+graph", "builtin", ("gemm",))
    session = session_of(region, place, Attempt(judge.Evaluation(first, Accepted(timing), PASSED)))
    refusal = session.check_launch_gain(replace(first, schedule="inductor"))
    assert "to copy for it" in str(refusal)
    assert session.check_launch_gain(replace(first, schedule="eager+graph")) is None
    # Of a call that takes no longer than its copies all may be gained.
    short = replace(timing, candidate_us=1e-6, baseline_us=3e-6)
    session = session_of(region, place, Attempt(judge.Evaluation(first, Accepted(short), PASSED)))
    assert session.check_launch_gain(replace(first, schedule="inductor")) is None


@pytest.mark.parametrize(
    ("budget_s", "evaluated", "reason"),
    [(12.0, 1, "2.0 s of the budget were left, and a judgement has taken 10.0 s"), (18.0, 2, "")],
)
def test_no_judgement_begins_that_would_end_far_beyond_the_budget(
    budget_s, evaluated, reason, region, place, script_judge, monkeypatch
):
    """On a busy machine a judgement takes what the whole search was given; the second one would
    double that.
    """
    scripted, clock = script_judge({"eager": "wrong", "inductor": "wrong"}), [1000.0]
    evaluate = scripted.evaluate_candidate

    def slowly(*arguments):
        clock[0] += 10.0
        return evaluate(*arguments)

    monkeypatch.setattr(judge, "evaluate_candidate", slowly)
    monkeypatch.setattr(judge, "working_s", lambda: clock[0])
    entry = tune(region, replace(place, settings=place.settings.but(budget_s=budget_s)))
    assert scripted.evaluations == evaluated
    assert [
        attempt["reason"] for attempt in entry.tried if attempt["decision"] == "not judged"
    ] == [reason] * bool(reason)


def test_a_spent_budget_judges_nothing_and_says_so(region, place, script_judge):
    scripted = script_judge({"eager": 2.0, "inductor": 3.0})
    entry = tune(region, replace(place, settings=place.settings.but(budget_s=0.0)))
    assert scripted.evaluations == 0
    assert {attempt["decision"] for attempt in entry.tried} == {"not judged"}
    assert entry.choice.origin == "baseline"


@pytest.mark.parametrize(("compiled_s", "evaluated"), [(30.0, 2), (40.0, 1)])
def test_what_would_still_be_compiling_long_after_the_budget_is_not_begun(
    region, place, script_judge, monkeypatch, compiled_s, evaluated
):
    scripted = script_judge({"eager": 2.0, "inductor": 3.0})
    ranked = replace(
        scripted.rank_baselines(region, [], None), ready_s={"eager": 0.1, "inductor": compiled_s}
    )
    monkeypatch.setattr(judge, "rank_baselines", lambda *arguments: ranked)
    entry = tune(region, replace(place, settings=place.settings.but(budget_s=20.0)))
    assert scripted.evaluations == evaluated
    late = [attempt["reason"] for attempt in entry.tried if attempt["decision"] == "not judged"]
    assert all(
        reason.endswith(f"compiling the baseline has taken {compiled_s} s") for reason in late
    )
    assert bool(late) == (evaluated == 1)


@pytest.mark.parametrize(
    ("floor_us", "evaluated", "reason"),
    [(99.0, 0, "100 us; the device needs at least 99.0 us"), (31.0, 1, "33.3 us")],
)
def test_near_what_the_device_can_do_at_all_nothing_more_is_judged(
    region, place, script_judge, monkeypatch, floor_us, evaluated, reason
):
    """Eager takes 100 us: near the first floor already, near the second one with the first
    candidate.
    """
    scripted = script_judge({"eager": 2.0, "inductor": 3.0})
    monkeypatch.setattr(lower_bound, "lower_bound_us", lambda program, device: floor_us)
    entry = tune(region, place)
    assert scripted.evaluations == evaluated
    assert (entry.tried[-1]["decision"], entry.tried[-1]["reason"][: len(reason)]) == (
        "not judged",
        reason,
    )
