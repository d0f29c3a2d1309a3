"""Source candidates on a GPU: all baselines are timed, a faster candidate is accepted, and one that
breaks the device costs only itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.judge.evaluate.linear_sources import (
    HONEST,
    REFERENCE,
    prepend_statements,
    replace_result,
)
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Accepted, Contract, Rejected
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
SORTED = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.sort(x, dim=-1).values[:, -1].clone()

def get_inputs(): return [torch.randn(512, 8192)]
def get_init_inputs(): return []
"""
TRITON = """
import torch
import triton
import triton.language as tl

@triton.jit
def row_max(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * width + columns, mask=columns < width, other=float("-inf"))
    has_nan = tl.max((values != values).to(tl.int32), 0)
    tl.store(out + row, tl.where(has_nan > 0, float("nan"), tl.max(values, 0)))

class ModelNew(torch.nn.Module):
    def forward(self, x):
        if x.dim() != 2 or x.dtype != torch.float32 or x.shape[1] == 0 or not x.is_cuda or x.shape[1] > 32768:
            return torch.sort(x, dim=-1).values[:, -1].clone()
        x = x.contiguous()
        out = torch.empty(x.shape[0], device=x.device, dtype=x.dtype)
        if x.shape[0]:
            row_max[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
        return out
"""
# what ends a context: an index out of range asserts on the device, a wild pointer is a fault
BROKEN = {
    "device assertion": "x[torch.full((4,), 10**6, device=x.device)].sum().item()",
    "too much memory": "torch.empty(1 << 42, dtype=torch.uint8, device=x.device)",
}


@pytest.fixture(scope="module")
def evaluator() -> Iterator[SourceEvaluator]:
    config = SourceEvaluationConfig(
        Settings(candidate_timeout_s=120.0), Contract(), torch.device("cuda"), gradients=False
    )
    with SourceEvaluator(config) as running_evaluator:
        yield running_evaluator


@pytest.mark.parametrize("name", BROKEN)
def test_a_candidate_that_breaks_the_device_costs_only_itself(
    evaluator: SourceEvaluator, name: str
) -> None:
    broken = evaluator.evaluate(REFERENCE, prepend_statements(BROKEN[name]), timed=False)
    assert isinstance(broken.decision, Rejected)
    assert broken.decision.detector in ("run", "resource"), broken.decision
    after = evaluator.evaluate(REFERENCE, HONEST, timed=False)
    assert after.verdict.failure is None, after.verdict.failure
    wrong = evaluator.evaluate(REFERENCE, replace_result('x, {"rows": x.shape[0]}'), timed=False)
    assert wrong.verdict.failure is not None


def test_a_triton_kernel_is_compiled_evaluated_and_accepted(evaluator: SourceEvaluator) -> None:
    evaluation = evaluator.evaluate(SORTED, TRITON)
    assert isinstance(evaluation.decision, Accepted), evaluation.decision
    assert evaluation.baselines is not None
    assert {"eager", "inductor"} <= set(evaluation.baselines.medians_us)
    assert {"sync_ratio"} <= {check.name for check in evaluation.verdict.checks}


GATHER = """
import torch
class {name}(torch.nn.Module):
    def forward(self, x, rows):
        return x[rows] * 2
def get_inputs(): return [torch.randn(40, 32), torch.randint(0, 40, (56,))]
def get_init_inputs(): return []
"""


def test_other_shapes_whose_indices_lie_beyond_them_cost_the_reference_nothing() -> None:
    # An index out of range ends a CUDA context: the process of the reference was lost, and nothing
    # after that was asked.
    config = SourceEvaluationConfig(
        device=torch.device("cuda"), settings=Settings(), contract=Contract(), profile="fast"
    )
    with SourceEvaluator(config) as evaluator:
        evaluation = evaluator.evaluate(
            GATHER.format(name="Model"), GATHER.format(name="ModelNew"), timed=False
        )
    assert [check for check in evaluation.verdict.checks if not check.passed] == []
    assert "call_history" in {check.name for check in evaluation.verdict.checks}
