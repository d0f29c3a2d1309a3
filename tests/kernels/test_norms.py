"""Norms as expressions: moments in two passes or online, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.nodes import OnlineVariant, Reduce, choose_variants, find_nodes
from torch_cudal1.kernels.ops.norms import HANDLERS
from torch_cudal1.kernels.registry import trace

X = torch.empty(4, 8, 100)


def test_online_moments_are_a_mean_and_squared_deviations() -> None:
    traced = trace(trace_program(lambda x: F.layer_norm(x, (100,)), (X,)))
    assert traced.family == "norm"
    nodes = tuple(o.node for o in traced.outputs)
    assert find_nodes(OnlineVariant, nodes)
    online = choose_variants(nodes, online=True)
    assert {node.kind for node in find_nodes(Reduce, online)} == {"mean", "m2"}
    two_pass = choose_variants(nodes, online=False)
    assert {node.kind for node in find_nodes(Reduce, two_pass)} == {"sum"}


def test_batch_norm_out_of_training_is_refused_where_statistics_are_of_the_batch() -> None:
    handler = HANDLERS["_native_batch_norm_legit.no_stats"]
    with pytest.raises(NotLowerableError, match="not in training"):
        handler((None, None, None, False, 0.1, 1e-5), {}, ())
