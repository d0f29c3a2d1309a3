"""One loop nest of several expressions, and what does not fit one."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.codegen.loop_nest import build_nest, find_reductions
from torch_cudal1.kernels.expr.nodes import choose_variants
from torch_cudal1.kernels.registry import trace

X = torch.empty(4, 6, 100)


def outputs_of(function):
    return trace(trace_program(function, (X,))).outputs


def test_loops_that_are_walked_together_are_merged() -> None:
    nest = build_nest(outputs_of(lambda x: x * 2))
    assert [atom.extent for atom in nest.atoms] == [2400]
    nest = build_nest(outputs_of(lambda x: x.sum(-1)))
    assert (nest.row_count, nest.column_count, nest.levels) == (24, 100, 1)


def test_reductions_come_after_what_they_read() -> None:
    (output,) = outputs_of(lambda x: (x - x.amax(-1, keepdim=True)).sum(-1))
    assert [node.kind for node in find_reductions((output.node,))] == ["max", "sum"]
    assert build_nest((output,)).levels == 2


def test_reductions_of_different_lengths_need_another_nest() -> None:
    (output,) = outputs_of(lambda x: x.sum(-1, keepdim=True) + x.sum(0, keepdim=True))
    (node,) = choose_variants((output.node,), online=False)
    assert len(find_reductions((node,))) == 2
    with pytest.raises(NotLowerableError):
        build_nest((output,))
