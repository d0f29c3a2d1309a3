"""What every rendered module has around its schedule."""

from __future__ import annotations

import torch

from tests.training.ksl_cases import CPU, run_module, task_for
from torch_cudal1.judge.pool.measured import Decoded


def test_other_calls_than_the_case_get_the_reference() -> None:
    task = task_for("softmax")
    decoded = CPU.decode(task, "tpl=row.two rows=64 mask=off acc=f16")
    assert isinstance(decoded, Decoded)
    for x in (
        torch.randn(5, 300),
        torch.randn(70, 600)[:, ::2],
        torch.randn(70, 300, dtype=torch.float64),
    ):
        assert torch.equal(run_module(decoded.source, "ModelNew", [x]), torch.softmax(x, -1))
