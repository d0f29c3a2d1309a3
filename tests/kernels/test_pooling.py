"""Windows that the kernels express, and those that stay with PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.nodes import Padded, find_nodes
from torch_cudal1.kernels.ops.pooling import MAX_TAPS
from torch_cudal1.kernels.registry import trace

X = torch.empty(2, 3, 20, 20)


def test_each_place_of_the_window_is_one_padded_read() -> None:
    traced = trace(trace_program(lambda x: F.avg_pool2d(x, 3, padding=1), (X,)))
    assert traced.family == "pooling"
    assert len(find_nodes(Padded, tuple(o.node for o in traced.outputs))) == 9


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: F.avg_pool2d(x, 3, ceil_mode=True, stride=2), "leaves the padded input"),
        (lambda x: F.avg_pool2d(x, 9), "a window of"),
        (lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False), "does not count"),
    ],
)
def test_other_windows_are_refused(function, reason: str) -> None:
    assert MAX_TAPS < 81
    with pytest.raises(NotLowerableError, match=reason):
        trace(trace_program(function, (X,)))
