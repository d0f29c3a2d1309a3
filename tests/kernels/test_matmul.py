"""Operands of a product as addresses in memory."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.ops.matmul import find_product, put_streamed_left
from torch_cudal1.kernels.registry import trace


def product_of(function, *inputs: torch.Tensor):
    return find_product(tuple(o.node for o in trace(trace_program(function, inputs)).outputs))[1]


def test_a_transposed_operand_keeps_its_place_in_memory() -> None:
    product = product_of(lambda a, b: a @ b.t(), torch.empty(8, 32), torch.empty(16, 32))
    assert (product.m, product.n, product.k) == (8, 16, 32)
    assert (product.left.row, product.left.depth) == (32, 1)
    assert (product.right.row, product.right.depth) == (32, 1)


def test_the_larger_operand_with_rows_along_k_is_streamed() -> None:
    product = product_of(lambda a, b: a @ b.t(), torch.empty(8, 32), torch.empty(16, 32))
    streamed, swapped = put_streamed_left(product)
    assert swapped
    assert (streamed.m, streamed.n) == (16, 8)
    turned = product_of(torch.mm, torch.empty(32, 8).t(), torch.empty(32, 16))
    with pytest.raises(NotLowerableError, match="rows along k"):
        put_streamed_left(turned)


def test_two_products_are_not_one() -> None:
    with pytest.raises(NotLowerableError, match="2 matrix products"):
        product_of(lambda a: a @ a + (a + 1) @ a, torch.empty(8, 8))
