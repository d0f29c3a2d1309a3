"""One slot measures programs: scores, failures, surprises, memory and repeated benchmarks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.judge.pool.scripted_slot import (
    ScriptedClock,
    make_score,
    measure_source,
    trust_own_programs,
)
from tests.training.scripted import ScriptedBenchmark
from tests.training.sources import TASK, program, source
from torch_cudal1.core.errors import TargetError
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.benchmark.candidate_timing import BenchmarkResult
from torch_cudal1.judge.benchmark.cross_process import ChildBatchTimer
from torch_cudal1.judge.benchmark.protocol import Measurement
from torch_cudal1.judge.benchmark.quick import PreparedBenchmark, prepare_benchmark
from torch_cudal1.judge.benchmark.statistics import summarise
from torch_cudal1.judge.benchmark.timing_plan import TimingPlan
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.pool.judge_evaluator import MeasurementMemory
from torch_cudal1.judge.pool.slot import Slot
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child


def test_a_right_program_has_the_rounded_score_and_its_buckets(slot: Slot) -> None:
    result = measure_source(slot, source(), 1.239)
    assert (result.outcome, result.score, result.task, result.program) == ("ok", 1.23, "relu", "p")
    assert result.buckets == pytest.approx((1.239,) * 7)


@pytest.mark.parametrize(
    ("text", "outcome", "detail"),
    [
        ("def f(:", "compile", "does not parse"),
        ("x = 1", "compile", "defines no 'ModelNew'"),
        (source(top="import nonexistent_module"), "compile", "nonexistent_module"),
        (source("x.no_such_thing()"), "run", "no_such_thing"),
        (source("torch.relu(x) * 2"), "wrong", "rms error"),
        (source(before="import os; os.abort()"), "run", "SIGABRT"),
        (source("(K.append(torch.relu(x) * 2 + 1), K[0])[1]", top="K = []"), "wrong", ""),
    ],
    ids=["syntax", "no entry", "import", "error", "wrong", "abort", "first call wins"],
)
def test_what_a_program_does_wrong_is_a_value_and_costs_only_itself(
    slot: Slot, text: str, outcome: str, detail: str
) -> None:
    result = measure_source(slot, text)
    assert result.outcome == outcome or (outcome == "wrong" and result.outcome == "hack")
    assert detail in result.detail
    assert result.score is None


def test_after_all_those_failures_the_next_program_is_measured(slot: Slot) -> None:
    assert measure_source(slot, source(), 1.5).score == 1.5


def test_a_surprise_is_measured_again_in_a_fresh_process_and_the_lower_counts(slot: Slot) -> None:
    result = measure_source(slot, source(), 4.0, 3.8)
    assert result.score == 3.8
    clock = slot._clock
    assert isinstance(clock, ScriptedClock)
    assert len(set(clock.pids)) == 2


def test_twice_the_best_so_far_is_a_surprise_too(slot: Slot) -> None:
    assert measure_source(slot, source(), 2.1, 2.0, best=1.0).score == 2.0
    assert measure_source(slot, source(), 2.1, best=1.5).score == 2.1


def test_a_surprise_that_does_not_repeat_has_no_score(slot: Slot) -> None:
    result = measure_source(slot, source(), 9.0, 2.0, 4.0)
    assert (result.outcome, result.score) == ("unstable", None)
    assert "jump" in result.detail
    assert "the same device" in result.detail


def test_the_real_clock_times_a_real_program(slot: Slot) -> None:
    slot._clock = prepare_benchmark
    iteration = slot.measure(TASK, program("p", source()))
    assert iteration.measured.outcome in ("ok", "unstable"), (
        iteration.measured
    )  # a busy machine may leave a measurement without a score
    assert iteration.seconds["timing"] > 0


def test_an_own_program_is_timed_in_its_process_against_the_reference_there(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust_own_programs(slot, monkeypatch)
    slot._clock = prepare_benchmark
    # `pairs` reads one clock for both sides, so that 20 times the work is seen on any machine
    slow = source(before="for _ in range(60): torch.relu(x).mul_(2).add_(1)")
    iteration = slot.measure(TASK, program("slow", slow))
    assert iteration.measured.outcome in ("ok", "unstable"), iteration.measured
    assert iteration.measured.score is None or iteration.measured.score < 0.3
    assert "baseline" not in iteration.seconds, "no baseline runs in the reference process"


def test_a_bucket_that_reports_more_time_than_it_took_is_refused(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust_own_programs(slot, monkeypatch)
    slot._clock = prepare_benchmark
    call = Child.call

    def call_with_false_times(child: Child, verb: str, **request: Any) -> dict[str, Any]:
        answer = call(child, verb, **request)
        return (
            answer | {"pairs": [[1e9, 1e9] for _ in answer["pairs"]]} if verb == "pairs" else answer
        )

    monkeypatch.setattr(Child, "call", call_with_false_times)
    result = slot.measure(TASK, program("p", source()))
    assert result.measured.outcome in ("hack", "unstable"), result.measured
    assert "wall_slope" in result.measured.detail or "told of a request" in result.measured.detail


def test_a_program_that_was_right_here_is_only_timed_when_it_comes_again(slot: Slot) -> None:
    memory = MeasurementMemory()
    memory.learn([make_score(2.0)])  # by another run, perhaps by another version of the judge
    assert [validated for *_, validated in memory.select_due(TASK, [program("q", source())])] == [
        False
    ]
    memory.take(replace(make_score(2.0), program="q"))
    assert [validated for *_, validated in memory.select_due(TASK, [program("q", source())])] == [
        True
    ]
    slot._clock = ScriptedClock(1.5, 1.5)
    first, second = (
        slot.measure(TASK, program("q", source()), validated=validated)
        for validated in (False, True)
    )
    assert first.measured.score == second.measured.score == 1.5
    assert {"numerics", "call_history"} <= set(first.seconds)
    assert "numerics" in second.seconds
    assert "call_history" not in second.seconds
    assert (
        slot.measure(TASK, program("r", source("x * 3")), validated=True).measured.outcome
        == "wrong"
    )


def test_a_slot_out_of_memory_frees_all_that_it_holds_and_tries_once_more(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, failures_left = slot._evaluate, [1]

    def fail_for_lack_of_memory(*arguments: Any) -> Any:
        if failures_left[0] > 0:
            failures_left[0] -= 1
            raise torch.OutOfMemoryError("none left")
        return evaluate(*arguments)

    monkeypatch.setattr(slot, "_evaluate", fail_for_lack_of_memory)
    assert measure_source(slot, source(), 1.5).score == 1.5
    failures_left[0] = 2
    with pytest.raises(TargetError, match=r"relu.*too little memory.*fewer lanes"):
        measure_source(slot, source())
    assert measure_source(slot, source(), 1.5).score == 1.5


def test_a_program_whose_process_finds_no_memory_is_tried_once_more_and_then_has_no_verdict(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory = CheckResult(
        "resource",
        False,
        detail="run: out of memory: CUDA out of memory. Tried to allocate 64.00 MiB",
    )
    answers: list[Any] = []
    monkeypatch.setattr(slot, "_evaluate", lambda *arguments: answers.pop(0))
    monkeypatch.setattr(slot, "config", replace(slot.config, device=torch.device("cuda")))
    for answers, outcome in (
        ([no_memory, (1.5, (1.5,) * 7)], "ok"),
        ([no_memory, no_memory], "unstable"),
    ):
        assert slot.measure(TASK, program("p", source())).measured.outcome == outcome
        assert not answers


def test_memory_in_use_on_the_whole_gpu_is_not_held_against_a_program_beside_others(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone_flags: list[bool] = []

    def note_alone(trial: Trial) -> list[CheckResult]:
        alone_flags.append(trial.is_alone_on_device)
        return [CheckResult("resource", True)]

    monkeypatch.setattr(
        "torch_cudal1.judge.pool.slot.select_checks",
        lambda profile: (NUMERICS, replace(NUMERICS, run=note_alone)),
    )
    assert measure_source(slot, source(), 1.5).outcome == "ok"
    assert alone_flags == [False]


def test_a_benchmark_whose_buckets_are_too_far_apart_runs_again_on_the_same_preparation(
    slot: Slot,
) -> None:
    class UnsteadyClock(ScriptedClock):
        benchmarks = steady_after = 0

        def __call__(
            self, trial: Trial, baseline: ChildBatchTimer, plan: TimingPlan
        ) -> PreparedBenchmark:
            steady_benchmark = super().__call__(trial, baseline, plan)

            def run() -> BenchmarkResult:
                self.benchmarks += 1
                if self.benchmarks > self.steady_after:
                    return steady_benchmark.measure()
                pairs = [(100.0 + 20.0 * bucket, 100.0) for bucket in range(7) for _ in range(6)]
                return BenchmarkResult(
                    Measurement(plan, {"hot": summarise(pairs)}, (1.0, 1.0), 1, 0.1), (), {}
                )

            return ScriptedBenchmark(run)

    for steady_after, outcome, benchmarks in ((1, "ok", 2), (3, "unstable", 3)):
        slot._clock = clock = UnsteadyClock(1.5)
        clock.steady_after = steady_after
        assert slot.measure(TASK, program("p", source())).measured.outcome == outcome
        assert clock.benchmarks == benchmarks
        assert len(clock.pids) == 1


@pytest.mark.parametrize("failed", ["", "wall_slope", "timed_output"])
def test_own_timed_outputs_are_checked_beside_others_and_a_clock_that_seems_false_once_more_alone(
    slot: Slot, monkeypatch: pytest.MonkeyPatch, failed: str
) -> None:
    class ClockWithCheck(ScriptedClock):
        def __call__(
            self, trial: Trial, baseline: ChildBatchTimer, plan: TimingPlan
        ) -> PreparedBenchmark:
            check = CheckResult(failed or "wall_slope", not failed, detail="what was found")
            return ScriptedBenchmark(
                super().__call__(trial, baseline, plan).measure,
                lambda timed: replace(timed, checks=(*timed.checks, check)),
            )

    lock_modes: list[str] = []
    for mode in ("hold_shared", "hold_exclusively"):
        enter = getattr(slot._gpu_lock, mode)
        monkeypatch.setattr(
            slot._gpu_lock,
            mode,
            lambda mode=mode, enter=enter: (lock_modes.append(mode), enter())[1],
        )
    slot._clock = ClockWithCheck(1.5)
    result = slot.measure(TASK, program("p", source())).measured
    assert result.outcome == ("hack" if failed == "timed_output" else "ok"), result
    modes_after_timing = lock_modes[lock_modes.index("hold_exclusively") :]
    assert (
        modes_after_timing == ["hold_exclusively", "hold_shared", "hold_exclusively"]
        if failed == "wall_slope"
        else modes_after_timing == ["hold_exclusively", "hold_shared"]
    ), modes_after_timing


def test_two_clocks_that_differ_in_one_process_only_are_no_cheat_and_no_score(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    differ = CheckResult(
        "wall_slope", False, detail="50 us a call by the judge's clock, 25 us by the process's own"
    )
    answers: list[Any] = []
    monkeypatch.setattr(slot, "_evaluate", lambda *arguments: answers.pop(0))
    monkeypatch.setattr(slot, "config", replace(slot.config, device=torch.device("cuda")))
    cases = (
        ([differ, differ], "hack"),
        ([differ, (1.5, (1.5,) * 7)], "unstable"),
        ([differ, CheckResult("numerics", False)], "wrong"),
    )
    for outcomes, outcome in cases:
        answers[:] = outcomes
        assert slot.measure(TASK, program("p", source())).measured.outcome == outcome
        assert not answers
