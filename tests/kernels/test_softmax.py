"""A softmax is known as one, so that attention can compute it online."""

from __future__ import annotations

import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.kernels.expr.nodes import OnlineVariant, Softmax, find_nodes
from torch_cudal1.kernels.registry import trace

X = torch.empty(4, 100)


def nodes_of(function):
    return tuple(o.node for o in trace(trace_program(function, (X,))).outputs)


def test_only_one_along_the_last_dimension_is_marked() -> None:
    (softmax,) = find_nodes(Softmax, nodes_of(lambda x: x.softmax(-1)))
    assert softmax.scores.shape == X.shape
    assert not softmax.safe
    assert not find_nodes(Softmax, nodes_of(lambda x: x.softmax(0)))


def test_the_sum_of_exponentials_has_a_form_of_two_passes_and_an_online_one() -> None:
    (total,) = find_nodes(OnlineVariant, nodes_of(lambda x: x.softmax(-1)))
    assert total.online.kind == "expsum"
    assert total.two_pass.kind == "sum"
