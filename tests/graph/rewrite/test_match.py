"""The words rules are written in say what they promise."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    emit_strided_copy,
    is_op,
    iter_calls,
    scalar,
)

from .helpers import capture, find_call

aten = torch.ops.aten


@pytest.mark.parametrize("number", [0.5, -3.0, 7])
def test_a_constant_of_the_graph_is_a_number(number: float) -> None:
    gm = capture(
        lambda x: torch.minimum(x, torch.tensor(number, dtype=torch.float32)), torch.randn(3)
    )
    assert scalar(find_call(gm, aten.minimum.default).args[1]) == number


def test_an_input_or_a_vector_is_no_number() -> None:
    gm = capture(lambda x, s: x * s + torch.full((3,), 2.0), torch.randn(3), torch.tensor(2.0))
    assert scalar(find_call(gm, aten.mul.Tensor).args[1]) is None
    assert scalar(find_call(gm, aten.add.Tensor).args[1]) is None


def test_a_rounded_constant_is_the_rounded_number() -> None:
    gm = capture(lambda x: x * torch.full((), 0.1, dtype=torch.float32), torch.randn(3))
    assert scalar(find_call(gm, aten.mul.Tensor).args[1]) == float(torch.tensor(0.1))


def test_arguments_come_with_their_defaults() -> None:
    gm = capture(
        lambda b, x, y: torch.addmm(b, x, y, alpha=2),
        torch.randn(3),
        torch.randn(2, 4),
        torch.randn(4, 3),
    )
    bound = arguments(find_call(gm, aten.addmm.default))
    assert (bound["beta"], bound["alpha"]) == (1, 2)


def test_dead_calls_are_not_offered_to_rules() -> None:
    gm = capture(lambda x: torch.relu(x), torch.randn(3))
    relu = find_call(gm, aten.relu.default)
    with gm.graph.inserting_before(relu):
        call(gm.graph, aten.exp.default, relu.args[0])
    assert [node.target for node in iter_calls(gm)] == [aten.relu.default]


def test_gaps_cannot_be_laid_out() -> None:
    gm = capture(lambda x: torch.relu(x), torch.randn(4, 4))
    relu = find_call(gm, aten.relu.default)
    with gm.graph.inserting_after(relu):
        assert emit_strided_copy(gm.graph, relu, (4, 4), (8, 1)) is None
        assert emit_strided_copy(gm.graph, relu, (4, 4), (0, 1)) is None
        laid = emit_strided_copy(gm.graph, relu, (4, 4), (1, 4))
    assert is_op(laid, aten.permute.default)
    assert laid.meta["val"].stride() == (1, 4)
