"""Programs read as expressions, and what is refused with a reason."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.nodes import Map, find_nodes
from torch_cudal1.kernels.registry import trace

X = torch.empty(4, 8)


def test_outputs_keep_their_numbers_and_specs() -> None:
    program = trace_program(lambda x: (x + 1, (x * 2).sum(-1)), (X,))
    traced = trace(program)
    assert [output.value for output in traced.outputs] == list(program.outputs)
    assert [output.spec.shape for output in traced.outputs] == [(4, 8), (4,)]
    assert list(traced.leaves) == [0]


def test_sums_of_bytes_wrap_around() -> None:
    function = lambda x: (x + x).float()
    traced = trace(trace_program(function, (X.to(torch.uint8),)))
    templates = [node.template for node in find_nodes(Map, (traced.outputs[0].node,))]
    assert any("& 255" in template for template in templates)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x, x + 1), "shares memory with an input"),
        (lambda x: (x + 1).to(torch.uint8), "uint8"),
    ],
)
def test_outputs_that_no_kernel_writes_are_refused(function, reason: str) -> None:
    with pytest.raises(NotLowerableError, match=reason):
        trace(trace_program(function, (X,)))
