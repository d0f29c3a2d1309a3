"""Running sums: reversed by flips, exclusive by zeros in front."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.nodes import Scan, find_nodes
from torch_cudal1.kernels.registry import trace

X = torch.empty(4, 100)


def find_scan(function) -> Scan:
    (scan,) = find_nodes(Scan, tuple(o.node for o in trace(trace_program(function, (X,))).outputs))
    return scan


def test_a_flip_there_and_back_is_a_reversed_scan() -> None:
    scan = find_scan(lambda x: x.flip(1).cumsum(1).flip(1))
    assert scan.reverse
    assert not find_scan(lambda x: x.cumsum(1)).reverse


def test_zeros_in_front_and_the_last_left_out_are_an_exclusive_scan() -> None:
    scan = find_scan(lambda x: torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1].cumsum(1)), 1))
    assert scan.exclusive
    assert scan.shape == X.shape


def test_a_flip_of_several_dimensions_is_refused() -> None:
    with pytest.raises(NotLowerableError, match="several dimensions"):
        trace(trace_program(lambda x: x.flip(0, 1).cumsum(1), (X,)))
