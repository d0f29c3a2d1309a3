"""A heat times what runs and is about right, beside eager, and says why the rest has no time."""

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
from torch_cudal1.judge.sandbox.child import CandidateFailure

REGION = linear_relu()
PRODUCT = (op("aten.t.default", V(1), out=3), op("aten.addmm.default", V(2), V(0), V(3), out=4))
SAME = with_steps(REGION, *PRODUCT, op("aten.clamp_min.default", V(4), 0, out=5), output=5)
WRONG = with_steps(REGION, *PRODUCT, op("aten.abs.default", V(4), out=5), output=5)
BROKEN = with_steps(
    REGION, op("aten.mm.default", V(0), V(1), out=3), op("aten.relu.default", V(3), out=4), output=4
)
SLOW: tuple[Aten, ...] = tuple(op("aten.cumsum.default", V(i), 0, out=i + 1) for i in range(4, 60))


def test_the_right_ones_are_timed_and_the_others_told() -> None:
    slow = with_steps(REGION, *PRODUCT, *SLOW, op("aten.mul.Tensor", V(60), 0, out=61), op("aten.add.Tensor", V(61), V(4), out=62),
                      op("aten.relu.default", V(62), out=63), output=63)  # fmt: skip
    job = judge.EvaluationConfig(Settings(), Contract(), torch.device("cpu"))
    found = prescreen(REGION, [candidate(one) for one in (SAME, WRONG, slow, BROKEN)], job)
    assert set(found.medians_us) == {0, 2}
    assert found.eager_us > 0
    assert all(median > 0 for median in found.medians_us.values())
    assert found.failures[1] == "its result is not eager's"
    assert "RuntimeError" in found.failures[3]
    assert found.one_pass_us is not None
    assert 0 < found.to_beat_us <= found.eager_us


def test_where_inductor_is_left_out_it_need_not_be_beaten() -> None:
    job = judge.EvaluationConfig(Settings(without=("compile",)), Contract(), torch.device("cpu"))
    found = prescreen(REGION, [candidate(SAME)], job)
    assert (found.one_pass_us, found.to_beat_us) == (None, found.eager_us)


def test_the_users_own_inputs_are_what_is_timed() -> None:
    """Eager's sums overflow on these, so that nothing could be told right but on them."""
    examples = (torch.full((BATCH, WIDE), 1e30), torch.full((OUT, WIDE), 1e30), torch.zeros(OUT))
    job = judge.EvaluationConfig(Settings(), Contract(), torch.device("cpu"), examples)
    found = prescreen(REGION, [candidate(SAME), candidate(WRONG)], job)
    assert not found.medians_us
    assert set(found.failures.values()) == {"its result is not eager's"}


def test_one_that_costs_the_process_its_gpu_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, processes = heating._run_slot, set[int]()

    def outputs(trial: Any, slot: str, *rest: Any) -> Any:
        processes.add(id(trial.child))
        if slot == "1":
            trial.child.usable = False  # as the child's answer has it
            raise CandidateFailure("run", "AcceleratorError: an illegal memory access", "run")
        return plain(trial, slot, *rest)

    monkeypatch.setattr(heating, "_run_slot", outputs)
    job = judge.EvaluationConfig(Settings(without=("compile",)), Contract(), torch.device("cpu"))
    found = prescreen(REGION, [candidate(SAME), candidate(SAME), candidate(SAME)], job)
    assert set(found.medians_us) == {0, 2}
    assert found.failures == {1: "AcceleratorError: an illegal memory access"}
    assert len(processes) == 2
