"""Views as cuts: every view made of pieces, indices and an order is found again, and nothing else
is taken for one.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_cudal1.graph.rewrite.layout import emit, find_cut, permute, takes_strides
from torch_cudal1.graph.rewrite.match import fake_mode, iter_calls, val

from .helpers import capture, ops, run

aten = torch.ops.aten


@st.composite
def cuts(draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous tensor and a view of it that has some of its pieces, in any order."""
    pieces = draw(
        st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3)
    )
    sizes = [math.prod(piece) for piece in pieces]
    tensor = torch.arange(math.prod(sizes)).view(sizes)
    view = tensor.view([size for piece in pieces for size in piece])
    for dim in reversed(range(view.dim())):
        if draw(st.booleans()):
            view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
    return tensor, view.permute(draw(st.permutations(range(view.dim()))))


@settings(max_examples=100, deadline=None)
@given(cuts())
def test_a_view_of_pieces_is_found_again(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensor, view = case
    cut = find_cut(tensor.shape, view, int(view.storage_offset()))
    assert cut is not None
    assert torch.equal(cut.apply_to(tensor), view)
    elsewhere = (
        tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
    )  # the same elements in another order of memory
    assert torch.equal(cut.apply_to(elsewhere), view)


@settings(max_examples=20, deadline=None)
@given(cuts())
def test_a_cut_is_that_many_calls_at_most(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensor, view = case
    cut = find_cut(tensor.shape, view, int(view.storage_offset()))
    assert cut is not None
    gm = capture(lambda x: x + 1, tensor)
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    with gm.graph.inserting_before(output):
        output.args = ((emit(gm.graph, next(iter_calls(gm, aten.add.Tensor)), cut),),)
    assert torch.equal(run(gm, tensor)[0], view + 1)
    assert sum(ops(gm).values()) - 1 <= cut.steps


WHOLE = torch.arange(24).view(4, 6)
NO_CUTS = {
    "a part of a dim": WHOLE[:, 1:5],
    "a row and a half": WHOLE.view(-1)[3:12],
    "rows of another length": WHOLE.as_strided((2, 4), (7, 1)),
    "a diagonal": WHOLE.diagonal(),
    "windows": WHOLE.view(-1).unfold(0, 6, 3),
    "a broadcast": WHOLE[:1].expand(3, 6),
    "nothing": WHOLE[:0],
}


@pytest.mark.parametrize("name", NO_CUTS)
def test_other_views_are_no_cuts(name: str) -> None:
    view = NO_CUTS[name]
    assert find_cut(WHOLE.shape, view, int(view.storage_offset())) is None


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_permutations_of_permutations_are_one(order: tuple[int, ...]) -> None:
    gm = capture(lambda x: x.permute(2, 0, 1).transpose(0, -1).exp(), torch.randn(2, 3, 4))
    source = next(iter_calls(gm, aten.exp.default)).args[0]
    assert isinstance(source, torch.fx.Node)
    with gm.graph.inserting_after(source):
        new = permute(gm.graph, source, order)
    assert val(new).stride() == val(source).permute(order).stride()
    assert new.op == "placeholder" or new.all_input_nodes[0].op == "placeholder"


AFTER = [
    (lambda y: y.permute(1, 0, 2).contiguous(), True),
    (lambda y: y.relu().permute(1, 0, 2).contiguous(), True),
    (lambda y: y.view(3, 5, 2, 2).permute(3, 0, 1, 2).contiguous(), True),
    (lambda y: y.view(-1).exp(), False),
    (lambda y: y.relu().view(15, 4).exp(), False),
    (lambda y: y.as_strided((3, 4), (4, 1)).exp(), False),
    (lambda y: y.flip(0), False),
]


@pytest.mark.parametrize(("after", "works"), AFTER)
def test_other_strides_work_where_views_exist_and_calls_keep_theirs(
    after: Any, works: bool
) -> None:
    gm = capture(lambda x: after(x.exp()), torch.randn(3, 5, 4))
    node, mode = next(iter_calls(gm, aten.exp.default)), fake_mode(gm.graph)
    assert mode is not None
    with mode:
        assert takes_strides(gm.graph, {node: torch.empty(5, 3, 4).transpose(0, 1)}) == works
