"""A source is timed beside its baseline on one core, and a slow first call is repeated."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.judge.benchmark.scripted_sampler import Scripted
from tests.judge.evaluate.linear_sources import HONEST, REFERENCE
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.benchmark import same_core, source_timing
from torch_cudal1.judge.benchmark.cross_process import (
    TimedBatch,
)
from torch_cudal1.judge.benchmark.protocol import measure
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator

QUICK = replace(TIMING_PLANS["fast"], side_us=4e3, rounds=1)


@pytest.mark.parametrize(
    ("again_us", "passed"), [(50.0, True), (9e6, False)], ids=["compiled once", "every instance"]
)
def test_a_slow_first_call_is_asked_again_of_another_instance(
    again_us: float, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        source_timing.ChildBatchTimer,
        "time_batch",
        lambda self, calls: TimedBatch(again_us / 1e6, again_us, calls),
    )
    child = SimpleNamespace(call=lambda verb, **fields: asked.append(f"{verb} {fields['slot']}"))
    trial: Any = SimpleNamespace(
        child=child, candidate=None, load=lambda slot, candidate: asked.append(f"load {slot}")
    )
    found = replace(
        measure(Scripted({"cold": [1.5] * 30, "hot": [1.5] * 30}), QUICK), first_call_us=(1.0, 8e6)
    )
    assert source_timing.check_first_calls(trial, found, ["a"]).passed is passed
    assert asked == ["load first_call", "forget first_call"]


CPU = torch.device("cpu")


def test_both_sides_of_a_race_on_a_gpu_launch_from_one_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here with sides of one thread, whose cores a CPU's race would leave as they are."""
    seen: list[set[int]] = []
    put = same_core._pin_thread
    monkeypatch.setattr(
        same_core, "_pin_thread", lambda thread, cores: (seen.append(cores), put(thread, cores))
    )
    with SourceEvaluator(SourceEvaluationConfig(Settings(), Contract(), CPU)) as evaluator:
        timing = evaluator.evaluate(REFERENCE, HONEST).timing
        assert timing is not None
        assert timing.details["one_core"] is False
        assert not seen
        monkeypatch.setattr(
            source_timing,
            "_one_core",
            lambda a, b, _: same_core.same_core((a.child.pid, b.child.pid)),
        )
        timing = evaluator.evaluate(
            REFERENCE, HONEST.replace("clamp_min(0)", "clamp_min(0.0)")
        ).timing
    assert timing is not None
    assert timing.details["one_core"] is True
    assert {len(cores) for cores in seen} == {1, len(os.sched_getaffinity(0))}
    assert seen[-1] == os.sched_getaffinity(0)
