"""A source is timed beside its baseline on one core, and a slow first call is repeated."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.judge.benchmark.scripted_sampler import ScriptedSampler
from tests.judge.evaluate.linear_sources import HONEST, REFERENCE
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.benchmark import cross_process, same_core, source_timing
from torch_cudal1.judge.benchmark.cross_process import (
    TimedBatch,
)
from torch_cudal1.judge.benchmark.protocol import measure
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator

QUICK = replace(TIMING_PLANS["fast"], side_us=4e3, rounds=1)


@pytest.mark.parametrize(
    ("second_us", "passed"), [(50.0, True), (9e6, False)], ids=["compiled once", "every instance"]
)
def test_a_slow_first_call_is_measured_again_on_another_instance(
    second_us: float, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    monkeypatch.setattr(
        source_timing.ChildBatchTimer,
        "time_batch",
        lambda self, calls: TimedBatch(second_us / 1e6, second_us, calls),
    )
    child = SimpleNamespace(call=lambda verb, **fields: requests.append(f"{verb} {fields['slot']}"))
    trial: Any = SimpleNamespace(
        child=child, candidate=None, load=lambda slot, candidate: requests.append(f"load {slot}")
    )
    measurement = replace(
        measure(ScriptedSampler({"cold": [1.5] * 30, "hot": [1.5] * 30}), QUICK),
        first_call_us=(1.0, 8e6),
    )
    assert source_timing.check_first_calls(trial, measurement, ["a"]).passed is passed
    assert requests == ["load first_call", "forget first_call"]


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("measured", "seconds", "batches"),
    [(1_000, 60.0, 0), (300, 60.0, 2), (0, 60.0, 7), (0, 0.0, 0)],
)
def test_some_hundreds_of_calls_are_judged_however_short_the_measurement_was(
    measured: int, seconds: float, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Timer:
        max_calls, shift, start, held_outputs = 5_000, 0, 3, 0

        def time_batch(self, calls: int) -> None:
            self.held_outputs = calls

    class Audit:
        equal_calls = measured

        def shift(self) -> int:
            return 1

        def judge_batch(self, start: int, shift: int, held_outputs: int) -> None:
            assert (start, shift) == (3, 1)
            sizes.append(held_outputs)
            self.equal_calls += held_outputs

    monkeypatch.setattr(source_timing, "_JUDGED_S", seconds)
    timer: Any = Timer()
    audit: Any = Audit()
    source_timing._judge_more_calls(timer, audit)
    assert sizes == [64] * batches


def test_both_sides_of_a_benchmark_on_a_gpu_launch_from_one_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here with sides of one thread, whose cores a benchmark on a CPU would leave as they are."""
    # On a busy machine these checks may refuse any measurement, and this is about cores.
    monkeypatch.setattr(
        cross_process, "check_wall_slope", lambda slopes: CheckResult("wall_slope", True)
    )
    monkeypatch.setattr(source_timing, "check_stability", lambda measurement: [])
    pinned_cores: list[set[int]] = []
    pin_thread = same_core._pin_thread
    monkeypatch.setattr(
        same_core,
        "_pin_thread",
        lambda thread, cores: (pinned_cores.append(cores), pin_thread(thread, cores)),
    )
    with SourceEvaluator(SourceEvaluationConfig(Settings(), Contract(), CPU)) as evaluator:
        evaluation = evaluator.evaluate(REFERENCE, HONEST)
        assert evaluation.timing is not None, evaluation.verdict.failure
        assert evaluation.timing.details["one_core"] is False
        assert not pinned_cores
        monkeypatch.setattr(
            source_timing,
            "_share_gpu_host_core",
            lambda a, b, _: same_core.share_core((a.child.pid, b.child.pid)),
        )
        evaluation = evaluator.evaluate(REFERENCE, HONEST.replace("clamp_min(0)", "clamp_min(0.0)"))
    assert evaluation.timing is not None, evaluation.verdict.failure
    assert evaluation.timing.details["one_core"] is True
    assert {len(cores) for cores in pinned_cores} == {1, len(os.sched_getaffinity(0))}
    assert pinned_cores[-1] == os.sched_getaffinity(0)
