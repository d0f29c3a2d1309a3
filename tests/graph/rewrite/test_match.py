"""The words rules are written in say what they promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_cudal1.graph.rewrite.alias import escapes, may_stand_for
from torch_cudal1.graph.rewrite.match import arguments, call, calls, is_op, scalar, with_strides

from .helpers import capture

aten = torch.ops.aten


def _only(gm: torch.fx.GraphModule, overload: Any) -> torch.fx.Node:
    (node,) = calls(gm, overload)
    return node


@pytest.mark.parametrize("number", [0.5, -3.0, 7])
def test_a_constant_of_the_graph_is_a_number(number: float) -> None:
    gm = capture(
        lambda x: torch.minimum(x, torch.tensor(number, dtype=torch.float32)), torch.randn(3)
    )
    assert scalar(_only(gm, aten.minimum.default).args[1]) == number


def test_an_input_or_a_vector_is_no_number() -> None:
    gm = capture(lambda x, s: x * s + torch.full((3,), 2.0), torch.randn(3), torch.tensor(2.0))
    assert scalar(_only(gm, aten.mul.Tensor).args[1]) is None
    assert scalar(_only(gm, aten.add.Tensor).args[1]) is None


def test_a_rounded_constant_is_the_rounded_number() -> None:
    gm = capture(lambda x: x * torch.full((), 0.1, dtype=torch.float32), torch.randn(3))
    assert scalar(_only(gm, aten.mul.Tensor).args[1]) == float(torch.tensor(0.1))


def test_arguments_come_with_their_defaults() -> None:
    gm = capture(
        lambda b, x, y: torch.addmm(b, x, y, alpha=2),
        torch.randn(3),
        torch.randn(2, 4),
        torch.randn(4, 3),
    )
    bound = arguments(_only(gm, aten.addmm.default))
    assert (bound["beta"], bound["alpha"]) == (1, 2)


def test_dead_calls_are_not_offered_to_rules() -> None:
    gm = capture(lambda x: torch.relu(x), torch.randn(3))
    relu = _only(gm, aten.relu.default)
    with gm.graph.inserting_before(relu):
        call(gm.graph, aten.exp.default, relu.args[0])
    assert [node.target for node in calls(gm)] == [aten.relu.default]


def test_gaps_cannot_be_laid_out() -> None:
    gm = capture(lambda x: torch.relu(x), torch.randn(4, 4))
    relu = _only(gm, aten.relu.default)
    with gm.graph.inserting_after(relu):
        assert with_strides(gm.graph, relu, (4, 4), (8, 1)) is None
        assert with_strides(gm.graph, relu, (4, 4), (0, 1)) is None
        laid = with_strides(gm.graph, relu, (4, 4), (1, 4))
    assert is_op(laid, aten.permute.default)
    assert laid.meta["val"].stride() == (1, 4)


def test_a_piece_of_a_node_lets_it_escape() -> None:
    gm = capture(lambda x: torch.relu(x)[1:], torch.randn(4))
    assert escapes(_only(gm, aten.relu.default))
    gm = capture(lambda x: torch.relu(x)[1:] + 1, torch.randn(4))
    assert not escapes(_only(gm, aten.relu.default))


def test_an_input_may_not_stand_for_an_output() -> None:
    gm = capture(lambda x: x.clone(), torch.randn(4))
    clone = _only(gm, aten.clone.default)
    assert not may_stand_for(clone.all_input_nodes[0], clone)
    gm = capture(lambda x: torch.relu(x).clone(), torch.randn(4))
    clone = _only(gm, aten.clone.default)
    assert may_stand_for(clone.all_input_nodes[0], clone)
