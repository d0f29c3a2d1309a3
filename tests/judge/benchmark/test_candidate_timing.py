"""A candidate's timed calls in a real child are checked, and wrong answers there are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.judge.benchmark.scripted_sampler import Scripted
from tests.judge.programs import V, candidate, linear_relu, op, subject, with_steps
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.benchmark.candidate_timing import (
    OutputAudit,
    SlotSampler,
    check_first_call,
    check_stability,
    check_sync_ratio,
    time_program,
)
from torch_cudal1.judge.benchmark.cross_process import (
    ChildBatchTimer,
    CrossProcessBenchmark,
)
from torch_cudal1.judge.benchmark.protocol import Measurement, measure
from torch_cudal1.judge.benchmark.timing import SampleBatch
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS, TimingPlan
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits

CPU = torch.device("cpu")

REGION = linear_relu()

REFERENCE = REGION.program

QUICK = replace(TIMING_PLANS["fast"], side_us=4e3, rounds=1)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as running:
        yield running


def on_trial(child: Child, program: Program) -> Trial:
    trial = Trial(subject(REGION), candidate(program), Contract(), CPU, child)
    for distribution in ("normal", "shifted"):
        trial.draw(distribution)
    trial.load("baseline", candidate(REFERENCE))
    trial.load("candidate", candidate(program))
    return trial


def without_bias() -> Program:
    transpose, _, relu = REFERENCE.steps
    return with_steps(REGION, transpose, op("aten.mm.default", V(0), V(3), out=4), relu, output=5)


def test_an_honest_candidate_passes_every_check_of_timing(child: Child) -> None:
    found = time_program(on_trial(child, REFERENCE), QUICK)
    checks = {check.name: check for check in found.checks}
    assert {"timed_output", "wall_slope", "unstable"} <= set(checks)
    assert checks["timed_output"].passed, checks["timed_output"]
    assert (checks["timed_output"].value or 0) >= 7  # one a bucket
    assert checks["unstable"].passed  # profile fast widens its interval instead
    told = json.loads(json.dumps(found.facts, allow_nan=False))
    assert set(told) >= {"l2", "decided_by", "first_call_us", "rounds", "sides"}
    assert told["sides"]["candidate"]["host_us"] > 0
    assert told["sides"]["candidate"]["device_us"] is None
    assert len(told["l2"]["hot"]["buckets"]) == 7


def test_timed_calls_that_answer_wrongly_are_refused(child: Child) -> None:
    with pytest.raises(CandidateFailure, match="timed call") as caught:
        time_program(on_trial(child, without_bias()), QUICK)
    assert caught.value.detector == "timed_output"


@pytest.mark.parametrize("shift", [0, 1])
def test_each_kept_output_is_compared_with_the_result_of_its_own_inputs(
    child: Child, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right outputs looked for one place further in the ring are wrong ones: a replayed answer
    would be found.
    """
    trial = on_trial(child, REFERENCE)
    slots = SlotSampler(OutputAudit(trial, QUICK), ("hot",))
    slots.warm_up()
    monkeypatch.setattr(OutputAudit, "shift", lambda self: shift)
    slots.take_samples(SampleBatch("hot", 2, (3, 5)))
    assert slots.audit.compared_calls == 1

    true_look = OutputAudit.check_output
    monkeypatch.setattr(
        OutputAudit,
        "check_output",
        lambda self, start, turned, held: true_look(self, start + 1, turned, held),
    )
    with pytest.raises(CandidateFailure, match="answered wrongly"):
        slots.take_samples(SampleBatch("hot", 2, (3, 5)))


def measured(duel: CrossProcessBenchmark, plan: TimingPlan) -> Measurement:
    """Once the machine is quiet enough for it, within three tries."""
    for left in (2, 1, 0):
        try:
            return measure(duel, plan)
        except CandidateFailure as error:
            if error.detector != "unstable" or not left:
                raise
    raise AssertionError


def test_one_child_against_another_on_this_clock(child: Child) -> None:
    trial = on_trial(child, REFERENCE)
    audit = OutputAudit(trial, QUICK)
    side = ChildBatchTimer(child, "candidate", audit.sets, max_calls=64)
    duel = CrossProcessBenchmark(ChildBatchTimer(child, "baseline", audit.sets, max_calls=64), side)
    found = measured(duel, replace(QUICK, pairs=2, budget_s=3.0))
    assert found.summary.pairs >= 7
    side.shift = 1
    side.time_batch(9)
    assert side.held_outputs == 9
    audit.check_output(side.start, side.shift, side.held_outputs)
    assert audit.compared_calls == 1


def test_nothing_looked_at_is_a_failure(child: Child) -> None:
    assert not OutputAudit(on_trial(child, REFERENCE), QUICK).check().passed


def test_timing_before_warming_is_an_error_of_the_caller() -> None:
    with (
        Child(make_limits(Settings(), CPU), Contract()) as fresh,
        pytest.raises(CandidateFailure, match="warm"),
    ):
        fresh.call("look")


@pytest.mark.parametrize(
    ("ratio", "passed"), [(1.0, True), (1.5, True), (1.51, False), (40.0, False)]
)
def test_work_hidden_on_another_stream_is_refused(ratio: float, passed: bool) -> None:
    (check,) = check_sync_ratio({"b": {"sync_ratio": ratio}})
    assert (check.name, check.passed) == ("sync_ratio", passed)


@pytest.mark.parametrize("sides", [{}, {"b": None}, {"b": {"sync_ratio": "much"}}])
def test_an_answer_without_the_sides_breaks_the_protocol(sides: dict[str, Any]) -> None:
    with pytest.raises(CandidateFailure) as caught:
        check_sync_ratio(sides)
    assert caught.value.detector == "protocol"


def test_standard_refuses_what_fast_only_widens() -> None:
    found = measure(
        Scripted({"cold": [1.1**n for n in range(30)], "hot": [1.5] * 30}), TIMING_PLANS["fast"]
    )
    assert [check.passed for check in check_stability(found)] == [True, True]
    refused = [
        check
        for check in check_stability(replace(found, plan=TIMING_PLANS["standard"]))
        if not check.passed
    ]
    assert [check.name for check in refused] == ["unstable"]


@pytest.mark.parametrize(
    ("first_us", "passed"),
    [
        ((900.0, 2_000.0), True),
        ((900.0, 600_000.0), False),
        ((60_000.0, 600_000.0), True),
    ],  # on a slow machine eager is slow too
)
def test_work_that_is_moved_into_the_first_call_is_refused(
    first_us: tuple[float, float], passed: bool
) -> None:
    found = replace(
        measure(Scripted({"cold": [1.5] * 30, "hot": [1.5] * 30}), QUICK), first_call_us=first_us
    )
    check = check_first_call(found)
    assert (check.name, check.passed, check.value) == ("timing_state", passed, first_us[1])
