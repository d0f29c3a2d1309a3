"""Reductions: dimensions, arg-reductions as one packed maximum, and refusals."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.nodes import Reduce, find_nodes
from torch_cudal1.kernels.registry import trace

X = torch.empty(4, 8, 100)


def find_reduce(function, x: torch.Tensor = X) -> Reduce:
    (node,) = find_nodes(
        Reduce, tuple(o.node for o in trace(trace_program(function, (x,))).outputs)
    )
    return node


def test_negative_and_absent_dimensions_are_counted_as_eager_does() -> None:
    assert find_reduce(lambda x: x.sum(-1)).dims == (2,)
    assert find_reduce(lambda x: x.sum((0, -1))).dims == (0, 2)
    assert find_reduce(lambda x: x.sum()).dims == (0, 1, 2)


def test_an_arg_reduction_is_a_maximum_of_packed_keys() -> None:
    node = find_reduce(lambda x: x.argmin(-1))
    assert (node.kind, node.dtype) == ("max", torch.int64)


def test_what_has_no_reduction_is_refused() -> None:
    with pytest.raises(NotLowerableError, match="order 3"):
        trace(trace_program(lambda x: torch.linalg.vector_norm(x, 3), (X,)))
    with pytest.raises(NotLowerableError, match="arg-reduction"):
        trace(trace_program(lambda x: x.argmax(-1), (X.long(),)))
