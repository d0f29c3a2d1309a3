"""Measurement settings and a clock with scripted speed-ups, for tests of slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.scripted import ScriptedBenchmark
from tests.training.sources import TASK, program
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.benchmark.candidate_timing import BenchmarkResult, check_stability
from torch_cudal1.judge.benchmark.cross_process import ChildBatchTimer
from torch_cudal1.judge.benchmark.protocol import Measurement
from torch_cudal1.judge.benchmark.quick import PreparedBenchmark
from torch_cudal1.judge.benchmark.statistics import summarise
from torch_cudal1.judge.benchmark.timing_plan import TimingPlan
from torch_cudal1.judge.pool.measured import Measured
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.pool.slot import Slot
from torch_cudal1.judge.reference.trial import Trial

CPU = torch.device("cpu")


def make_settings(folder: Path) -> MeasurementSettings:
    return MeasurementSettings(Settings(), Contract(), CPU, folder, rule="cudal1")


class ScriptedClock:
    """Reports the scripted speed-ups, one after the other, in place of a benchmark."""

    def __init__(self, *speedups: float) -> None:
        self.speedups = list(speedups)
        self.pids: list[int] = []

    def __call__(
        self, trial: Trial, baseline: ChildBatchTimer, plan: TimingPlan
    ) -> PreparedBenchmark:
        speedup = self.speedups.pop(0)
        self.pids.append(trial.child.pid)
        if baseline.sets:  # in the candidate's own process it gets the inputs of the benchmark
            assert baseline.time_batch(2).claimed_us > 0
        measurement = Measurement(
            plan, {"hot": summarise([(100.0 * speedup, 100.0)] * 42)}, (1.0, 1.0), 1, 0.1
        )
        return ScriptedBenchmark(
            lambda: BenchmarkResult(measurement, tuple(check_stability(measurement)), {})
        )


def trust_own_programs(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    own_settings = replace(slot.config, trust="own")
    monkeypatch.setattr(slot, "config", own_settings)
    monkeypatch.setattr(slot._processes, "_config", own_settings)


def measure_source(slot: Slot, text: str, *speedups: float, best: float | None = None) -> Measured:
    slot._clock = ScriptedClock(*speedups)
    return slot.measure(TASK, program("p", text), best).measured


def make_score(score: float) -> Measured:
    return Measured("relu", "p", "ok", score)
