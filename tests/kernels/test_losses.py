"""Losses as expressions: reduced or not, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.nodes import Reduce, find_nodes
from torch_cudal1.kernels.registry import trace

X, Y = torch.empty(8, 10), torch.empty(8, 10)


@pytest.mark.parametrize(("reduction", "sums"), [("none", 0), ("sum", 1), ("mean", 1)])
def test_a_loss_has_a_sum_where_it_is_reduced(reduction: str, sums: int) -> None:
    traced = trace(trace_program(lambda x, y: F.mse_loss(x, y, reduction=reduction), (X, Y)))
    assert traced.family == "loss"
    assert len(find_nodes(Reduce, tuple(o.node for o in traced.outputs))) == sums


def test_a_likelihood_with_weights_is_refused() -> None:
    target, weight = torch.zeros(8, dtype=torch.int64), torch.ones(10)
    with pytest.raises(NotLowerableError, match="weights"):
        trace(trace_program(lambda x, t, w: F.nll_loss(x, t, w), (X, target, weight)))
