"""A prescreen times what runs and is about right, beside eager, and says why the rest has no time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.judge.programs import BATCH, OUT, WIDE, V, candidate, linear_relu, op, with_steps
from torch_cudal1 import judge
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Aten
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.evaluate import prescreen as heating
from torch_cudal1.judge.evaluate.prescreen import prescreen
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child

REGION = linear_relu()
PRODUCT = (op("aten.t.default", V(1), out=3), op("aten.addmm.default", V(2), V(0), V(3), out=4))
SAME = with_steps(REGION, *PRODUCT, op("aten.clamp_min.default", V(4), 0, out=5), output=5)
WRONG = with_steps(REGION, *PRODUCT, op("aten.abs.default", V(4), out=5), output=5)
BROKEN = with_steps(
    REGION, op("aten.mm.default", V(0), V(1), out=3), op("aten.relu.default", V(3), out=4), output=4
)
SLOW: tuple[Aten, ...] = tuple(op("aten.cumsum.default", V(i), 0, out=i + 1) for i in range(4, 60))


def test_right_candidates_are_timed_and_the_others_have_a_reason() -> None:
    slow = with_steps(REGION, *PRODUCT, *SLOW, op("aten.mul.Tensor", V(60), 0, out=61), op("aten.add.Tensor", V(61), V(4), out=62),
                      op("aten.relu.default", V(62), out=63), output=63)  # fmt: skip
    config = judge.EvaluationConfig(Settings(), Contract(), torch.device("cpu"))
    result = prescreen(
        REGION, [candidate(program) for program in (SAME, WRONG, slow, BROKEN)], config
    )
    assert set(result.medians_us) == {0, 2}
    assert result.eager_us > 0
    assert all(median > 0 for median in result.medians_us.values())
    assert result.failures[1] == "its result is not eager's"
    assert "RuntimeError" in result.failures[3]
    assert result.one_pass_us is not None
    assert 0 < result.to_beat_us <= result.eager_us


def test_medians_are_those_of_the_samples_of_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds are scripted, so that other work on the machine changes none of them."""
    samples = {"eager": [9.0, 8.0, 70.0], "one pass": [5.0], "0": [4.0, 4.5, 30.0], "2": [19.0]}
    call = Child.call

    def call_with_scripted_times(child: Child, verb: str, **message: Any) -> Any:
        if verb != "bench":
            return call(child, verb, **message)
        assert sorted(message["slots"]) == sorted(samples)
        return {"samples": samples}

    monkeypatch.setattr(Child, "call", call_with_scripted_times)
    config = judge.EvaluationConfig(Settings(), Contract(), torch.device("cpu"))
    result = prescreen(REGION, [candidate(SAME), candidate(WRONG), candidate(SAME)], config)
    assert result.medians_us == {0: 4.5, 2: 19.0}
    assert (result.eager_us, result.one_pass_us) == (9.0, 5.0)
    assert result.to_beat_us == pytest.approx(1.1 * 5.0)


def test_where_inductor_is_left_out_it_need_not_be_beaten() -> None:
    config = judge.EvaluationConfig(Settings(without=("compile",)), Contract(), torch.device("cpu"))
    result = prescreen(REGION, [candidate(SAME)], config)
    assert (result.one_pass_us, result.to_beat_us) == (None, result.eager_us)


def test_the_users_own_inputs_are_timed() -> None:
    """Eager's sums overflow on these, so that nothing could be told right but on them."""
    examples = (torch.full((BATCH, WIDE), 1e30), torch.full((OUT, WIDE), 1e30), torch.zeros(OUT))
    config = judge.EvaluationConfig(Settings(), Contract(), torch.device("cpu"), examples)
    result = prescreen(REGION, [candidate(SAME), candidate(WRONG)], config)
    assert not result.medians_us
    assert set(result.failures.values()) == {"its result is not eager's"}


def test_a_candidate_that_costs_its_process_the_gpu_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_slot, processes = heating._run_slot, set[int]()

    def run_and_lose_gpu(trial: Any, slot: str, *rest: Any) -> Any:
        processes.add(id(trial.child))
        if slot == "1":
            trial.child.usable = False  # as the child's answer has it
            raise CandidateFailure("run", "AcceleratorError: an illegal memory access", "run")
        return run_slot(trial, slot, *rest)

    monkeypatch.setattr(heating, "_run_slot", run_and_lose_gpu)
    config = judge.EvaluationConfig(Settings(without=("compile",)), Contract(), torch.device("cpu"))
    result = prescreen(REGION, [candidate(SAME), candidate(SAME), candidate(SAME)], config)
    assert set(result.medians_us) == {0, 2}
    assert result.failures == {1: "AcceleratorError: an illegal memory access"}
    assert len(processes) == 2
