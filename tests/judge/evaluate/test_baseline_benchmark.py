"""Baselines of a region are timed alone, and one that cannot run says why."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.judge.evaluate.regions import diagonal_product
from tests.judge.programs import V, candidate, linear_relu, op, spec
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Contract, Region
from torch_cudal1.ir.schedule import INDUCTOR
from torch_cudal1.judge import (
    EvaluationConfig,
    evaluate_candidate,
    rank_baselines,
)
from torch_cudal1.judge.evaluate import baseline_benchmark

CPU = torch.device("cpu")

CONFIG = EvaluationConfig(Settings(), Contract(), CPU)


def test_baselines_are_timed_under_the_lock_of_the_gpu(monkeypatch) -> None:
    """Two judges side by side would time each other's work as the baseline's."""
    region, _ = diagonal_product()
    events: list[str] = []

    @contextmanager
    def note_lock(device: torch.device, use: str) -> Iterator[str]:
        events.append(f"lock of {device}")
        yield ""
        events.append("released")

    time_slots = baseline_benchmark._time_slots
    monkeypatch.setattr(baseline_benchmark, "lock_gpu", note_lock)
    monkeypatch.setattr(
        baseline_benchmark,
        "_time_slots",
        lambda *arguments: events.append("timed") or time_slots(*arguments),
    )
    rank_baselines(region, ("eager",), CONFIG)
    assert events == ["lock of cpu", "timed", "released"]


def test_a_graph_of_a_schedule_that_failed_is_not_tried_and_both_give_the_end_of_the_reason(
    monkeypatch,
) -> None:
    """A traceback ends with what went wrong, and compiling a large model twice to hear it again
    costs a minute.
    """
    tried_schedules: list[str] = []
    try_schedule = baseline_benchmark._try_schedule
    cause = (
        "InductorError: SubprocException\n"
        + "  File x\n" * 400
        + "RuntimeError: Could not find an active GPU backend"
    )

    def fail_inductor(trial, name, *arguments):
        tried_schedules.append(name)
        return (
            Refusal(baseline_benchmark._summarise_traceback(cause))
            if name == "inductor"
            else try_schedule(trial, name, *arguments)
        )

    monkeypatch.setattr(baseline_benchmark, "_try_schedule", fail_inductor)
    region, _ = diagonal_product()
    ranking = rank_baselines(region, ("inductor", "inductor+graph"), CONFIG)
    assert tried_schedules == ["eager", "inductor"]
    reason = (
        "InductorError: SubprocException ... RuntimeError: Could not find an active GPU backend"
    )
    assert ranking.failures == {"inductor": reason, "inductor+graph": f"inductor failed: {reason}"}
    assert (ranking.best.schedule, set(ranking.medians_us)) == ("eager", {"eager"})
    assert (ranking.estimate_compile_s(INDUCTOR), set(ranking.ready_s)) == (0.0, {"eager"})


def test_inductor_is_timed_and_a_schedule_that_cannot_run_says_why() -> None:
    region = linear_relu()
    ranking = rank_baselines(region, ("inductor", "eager+graph"), CONFIG)
    assert set(ranking.medians_us) == {"eager", "inductor"}, ranking.failures
    assert "CUDA" in ranking.failures["eager+graph"]
    evaluation = evaluate_candidate(
        region, candidate(region.program, "compiled", "inductor"), ranking, CONFIG
    )
    assert evaluation.verdict.passed, evaluation.verdict.failure


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton builds on Linux only")
def test_where_drawn_inputs_leave_no_number_the_users_own_are_timed() -> None:
    """The logarithm of x - 9 is NaN for whatever the judge draws; without a number no result
    is eager's.
    """
    program = Program(
        (spec(64, 64),),
        (
            op("aten.sub.Tensor", V(0), 9.0, out=1),
            op("aten.log.default", V(1), out=2),
            op("aten.tanh.default", V(2), out=3),
        ),
        (3,),
    )
    region, device = Region(program, ("input",)), torch.device("cpu")
    without_examples = rank_baselines(
        region, ("inductor",), EvaluationConfig(Settings(), Contract(), device)
    )
    assert "not eager's" in without_examples.failures["inductor"]
    with_examples = rank_baselines(
        region,
        ("inductor",),
        EvaluationConfig(Settings(), Contract(), device, examples=(10 + torch.rand(64, 64),)),
    )
    assert not with_examples.failures
    assert set(with_examples.medians_us) == {"eager", "inductor"}
