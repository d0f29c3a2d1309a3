"""The backward of fused attention as tensors that kernels address."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.compare_attention_backward import CASES
from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.templates.attention_step import is_backward, read_backward


@pytest.mark.parametrize("name", sorted(CASES)[:6])
def test_a_step_has_all_its_tensors(name: str) -> None:
    program = CASES[name].program()
    assert is_backward(program)
    step = read_backward(program)
    assert step.query.shape[1] == step.key.shape[1] * step.queries_per_key
    assert step.delta.value == program.value_count
    assert set(step.results) <= {"query", "key", "value"}
    assert step.query.tile("head", "m", "d").startswith(f"p{step.query.value} + ")


def test_other_programs_are_refused() -> None:
    program = trace_program(torch.relu, (torch.empty(8),))
    assert not is_backward(program)
    with pytest.raises(NotLowerableError, match="no backward"):
        read_backward(program)
