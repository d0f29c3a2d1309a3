"""Baselines of a region are timed alone, and one that cannot run says why."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.judge.evaluate.regions import diagonal_product
from tests.judge.programs import V, candidate, linear_relu, op, spec
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

JOB = EvaluationConfig(Settings(), Contract(), CPU)


def test_who_races_baselines_holds_the_gpus_timing_lock(monkeypatch) -> None:
    """Two judges that raced side by side would call each other's work the baseline's."""
    region, _ = diagonal_product()
    held: list[str] = []

    @contextmanager
    def exclusive(device: torch.device, use: str) -> Iterator[str]:
        held.append(f"lock of {device}")
        yield ""
        held.append("given back")

    raced = baseline_benchmark._time_slots
    monkeypatch.setattr(baseline_benchmark, "lock_gpu", exclusive)
    monkeypatch.setattr(
        baseline_benchmark, "_time_slots", lambda *given: held.append("raced") or raced(*given)
    )
    rank_baselines(region, ("eager",), JOB)
    assert held == ["lock of cpu", "raced", "given back"]


def test_a_graph_of_what_failed_is_not_tried_again_and_both_say_the_end_of_the_reason(
    monkeypatch,
) -> None:
    """A traceback ends with what went wrong, and compiling a large model twice to hear it again
    costs a minute.
    """
    asked: list[str] = []
    really = baseline_benchmark._try_schedule
    cause = (
        "InductorError: SubprocException\n"
        + "  File x\n" * 400
        + "RuntimeError: Could not find an active GPU backend"
    )

    def tried_schedule(trial, name, *given):
        asked.append(name)
        return (
            (baseline_benchmark._summarise_traceback(cause), None)
            if name == "inductor"
            else really(trial, name, *given)
        )

    monkeypatch.setattr(baseline_benchmark, "_try_schedule", tried_schedule)
    region, _ = diagonal_product()
    ranking = rank_baselines(region, ("inductor", "inductor+graph"), JOB)
    assert asked == ["eager", "inductor"]
    told = "InductorError: SubprocException ... RuntimeError: Could not find an active GPU backend"
    assert ranking.failures == {"inductor": told, "inductor+graph": f"inductor failed: {told}"}
    assert (ranking.best.schedule, set(ranking.medians_us)) == ("eager", {"eager"})
    assert (ranking.compiling_s(INDUCTOR), set(ranking.ready_s)) == (0.0, {"eager"})


def test_inductor_races_and_a_schedule_that_cannot_run_says_why() -> None:
    region = linear_relu()
    ranking = rank_baselines(region, ("inductor", "eager+graph"), JOB)
    assert set(ranking.medians_us) == {"eager", "inductor"}, ranking.failures
    assert "CUDA" in ranking.failures["eager+graph"]
    judgement = evaluate_candidate(
        region, candidate(region.program, "compiled", "inductor"), ranking, JOB
    )
    assert judgement.verdict.passed, judgement.verdict.failure


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton builds on Linux only")
def test_where_drawn_inputs_leave_no_number_the_users_own_are_time_slots() -> None:
    """The logarithm of x - 9 is NaN for whatever the judge draws; without a number nobody's result
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
    blind = rank_baselines(region, ("inductor",), EvaluationConfig(Settings(), Contract(), device))
    assert "not eager's" in blind.failures["inductor"]
    own = rank_baselines(
        region,
        ("inductor",),
        EvaluationConfig(Settings(), Contract(), device, examples=(10 + torch.rand(64, 64),)),
    )
    assert not own.failures
    assert set(own.medians_us) == {"eager", "inductor"}
