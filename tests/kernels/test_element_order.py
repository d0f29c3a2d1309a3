"""Results in another order than the product they are made of."""

from __future__ import annotations

import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.kernels.expr.element_order import follow_product_order
from torch_cudal1.kernels.expr.nodes import Dot, find_nodes
from torch_cudal1.kernels.registry import trace

A, B = torch.empty(2 * 5, 16), torch.empty(16, 4 * 8)


def order(function):
    (output,) = trace(trace_program(function, (A, B))).outputs
    (dot,) = find_nodes(Dot, (output.node,))
    return output, follow_product_order(output, dot)


def test_heads_moved_to_the_front_are_walked_in_the_order_of_the_product() -> None:
    output, moved = order(lambda a, b: (a @ b).view(2, 5, 4, 8).transpose(1, 2).relu().contiguous())
    assert output.spec.shape == (2, 4, 5, 8)
    assert moved.spec.numel == output.spec.numel
    assert moved.spec.shape == (2, 5, 4, 8)
    assert moved.spec.strides == (160, 8, 40, 1)


def test_a_result_in_order_stays_as_it_is() -> None:
    output, same = order(lambda a, b: (a @ b).relu())
    assert same is output
