"""A candidate's timed calls in a real child are checked, and wrong answers there are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.judge.benchmark.scripted_sampler import ScriptedSampler
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


def make_trial(child: Child, program: Program) -> Trial:
    trial = Trial(subject(REGION), candidate(program), Contract(), CPU, child)
    for distribution in ("normal", "shifted"):
        trial.draw(distribution)
    trial.load("baseline", candidate(REFERENCE))
    trial.load("candidate", candidate(program))
    return trial


def drop_bias() -> Program:
    transpose, _, relu = REFERENCE.steps
    return with_steps(REGION, transpose, op("aten.mm.default", V(0), V(3), out=4), relu, output=5)


def test_an_honest_candidate_passes_every_check_of_timing(child: Child) -> None:
    result = time_program(make_trial(child, REFERENCE), QUICK)
    checks = {check.name: check for check in result.checks}
    assert {"timed_output", "wall_slope", "unstable"} <= set(checks)
    assert checks["timed_output"].passed, checks["timed_output"]
    assert (checks["timed_output"].value or 0) >= 7  # one a bucket
    assert checks["unstable"].passed  # profile fast widens its interval instead
    facts = json.loads(json.dumps(result.facts, allow_nan=False))
    assert set(facts) >= {"l2", "decided_by", "first_call_us", "rounds", "sides"}
    assert facts["sides"]["candidate"]["host_us"] > 0
    assert facts["sides"]["candidate"]["device_us"] is None
    assert len(facts["l2"]["hot"]["buckets"]) == 7


def test_timed_calls_with_wrong_results_are_refused(child: Child) -> None:
    with pytest.raises(CandidateFailure, match="timed call") as error_info:
        time_program(make_trial(child, drop_bias()), QUICK)
    assert error_info.value.detector == "timed_output"


@pytest.mark.parametrize("shift", [0, 1])
def test_each_kept_output_is_compared_with_the_result_of_its_own_inputs(
    child: Child, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right outputs looked for one place further in the ring are wrong ones: a replayed answer
    would be found.
    """
    trial = make_trial(child, REFERENCE)
    slots = SlotSampler(OutputAudit(trial, QUICK), ("hot",))
    slots.warm_up()
    monkeypatch.setattr(OutputAudit, "shift", lambda self: shift)
    slots.take_samples(SampleBatch("hot", 2, (3, 5)))
    assert slots.audit.compared_calls == 1

    check_output = OutputAudit.check_output
    monkeypatch.setattr(
        OutputAudit,
        "check_output",
        lambda self, start, shift_of_ring, count: check_output(
            self, start + 1, shift_of_ring, count
        ),
    )
    with pytest.raises(CandidateFailure, match="answered wrongly"):
        slots.take_samples(SampleBatch("hot", 2, (3, 5)))


def measure_when_quiet(benchmark: CrossProcessBenchmark, plan: TimingPlan) -> Measurement:
    """Once the machine is quiet enough for it, within three tries."""
    for tries_left in (2, 1, 0):
        try:
            return measure(benchmark, plan)
        except CandidateFailure as error:
            if error.detector != "unstable" or not tries_left:
                raise
    raise AssertionError


def test_two_children_are_compared_on_the_clock_of_this_process(child: Child) -> None:
    trial = make_trial(child, REFERENCE)
    audit = OutputAudit(trial, QUICK)
    timer = ChildBatchTimer(child, "candidate", audit.sets, max_calls=64)
    benchmark = CrossProcessBenchmark(
        ChildBatchTimer(child, "baseline", audit.sets, max_calls=64), timer
    )
    measurement = measure_when_quiet(benchmark, replace(QUICK, pairs=2, budget_s=3.0))
    assert measurement.summary.pairs >= 7
    timer.shift = 1
    timer.time_batch(9)
    assert timer.held_outputs == 9
    audit.check_output(timer.start, timer.shift, timer.held_outputs)
    assert audit.compared_calls == 1


def test_a_benchmark_without_a_checked_output_fails(child: Child) -> None:
    assert not OutputAudit(make_trial(child, REFERENCE), QUICK).check().passed


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
    with pytest.raises(CandidateFailure) as error_info:
        check_sync_ratio(sides)
    assert error_info.value.detector == "protocol"


def test_standard_refuses_what_fast_only_widens() -> None:
    measurement = measure(
        ScriptedSampler({"cold": [1.1**n for n in range(30)], "hot": [1.5] * 30}),
        TIMING_PLANS["fast"],
    )
    assert [check.passed for check in check_stability(measurement)] == [True, True]
    failed = [
        check
        for check in check_stability(replace(measurement, plan=TIMING_PLANS["standard"]))
        if not check.passed
    ]
    assert [check.name for check in failed] == ["unstable"]


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
    measurement = replace(
        measure(ScriptedSampler({"cold": [1.5] * 30, "hot": [1.5] * 30}), QUICK),
        first_call_us=first_us,
    )
    check = check_first_call(measurement)
    assert (check.name, check.passed, check.value) == ("timing_state", passed, first_us[1])
