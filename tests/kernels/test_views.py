"""Views as index renamings, and what has none."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.affine import AffineExpr, Atom
from torch_cudal1.kernels.expr.nodes import Leaf, View
from torch_cudal1.kernels.expr.views import permute
from torch_cudal1.kernels.registry import trace

ROW, COLUMN = (AffineExpr(0, ((Atom(n, size), 1),)) for n, size in enumerate((4, 8)))


def test_a_permutation_takes_an_index_back() -> None:
    node = permute(Leaf((4, 8), torch.float32, 0, (8, 1)), (1, 0))
    assert isinstance(node, View)
    assert node.shape == (8, 4)
    assert node.remap((COLUMN, ROW)) == (ROW, COLUMN)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.stack([x] * 9).relu(), "a stack of 9"),
        (lambda x: torch.cat((x, x[:, :3]), 1).relu(), "pieces"),
        (lambda x: torch.arange(0.0, 4.0, device=x.device) + x[:, 0], "not whole"),
    ],
)
def test_what_would_copy_much_is_refused(function, reason: str) -> None:
    with pytest.raises(NotLowerableError, match=reason):
        trace(trace_program(function, (torch.empty(4, 8),)))
