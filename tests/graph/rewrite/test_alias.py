"""Which nodes share storage: what reaches an output, and what may stand for it."""

from __future__ import annotations

import torch

from torch_cudal1.graph.rewrite.alias import (
    find_base,
    has_same_geometry,
    may_stand_for,
    reaches_output,
)
from torch_cudal1.graph.rewrite.match import iter_calls

from .helpers import capture, find_call

aten = torch.ops.aten


def test_a_piece_of_a_node_lets_it_escape() -> None:
    gm = capture(lambda x: torch.relu(x)[1:], torch.randn(4))
    assert reaches_output(find_call(gm, aten.relu.default))
    gm = capture(lambda x: torch.relu(x)[1:] + 1, torch.randn(4))
    assert not reaches_output(find_call(gm, aten.relu.default))


def test_an_input_may_not_stand_for_an_output() -> None:
    gm = capture(lambda x: x.clone(), torch.randn(4))
    clone = find_call(gm, aten.clone.default)
    assert not may_stand_for(clone.all_input_nodes[0], clone)
    gm = capture(lambda x: torch.relu(x).clone(), torch.randn(4))
    clone = find_call(gm, aten.clone.default)
    assert may_stand_for(clone.all_input_nodes[0], clone)


def test_views_of_views_lead_to_the_tensor_that_owns_the_storage() -> None:
    gm = capture(lambda x: torch.relu(x).view(4, 3).t()[1:] + 1, torch.randn(3, 4))
    assert find_base(find_call(gm, aten.slice.Tensor)) is find_call(gm, aten.relu.default)


def test_views_of_one_storage_are_equal_only_at_the_same_offset() -> None:
    gm = capture(lambda x: (x[:2] + 1, x[2:] + 1, x[0:2] * 2), torch.randn(4, 3))
    first, second, again = iter_calls(gm, aten.slice.Tensor)
    assert has_same_geometry(first, again)
    assert not has_same_geometry(first, second)
