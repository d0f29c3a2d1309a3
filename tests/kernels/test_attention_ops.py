"""Fused attention operators as expressions."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.nodes import Leaf
from torch_cudal1.kernels.ops.attention_ops import HANDLERS, is_attention
from torch_cudal1.kernels.registry import trace

X = torch.empty(2, 64, 32)


def test_a_product_of_another_products_elements_is_attention() -> None:
    def nodes(function):
        return tuple(o.node for o in trace(trace_program(function, (X,))).outputs)

    assert is_attention(nodes(lambda x: (x @ x.mT).softmax(-1) @ x))
    assert not is_attention(nodes(lambda x: (x @ x.mT).softmax(-1)))


@pytest.mark.parametrize("name", sorted(HANDLERS))
def test_keys_of_another_type_are_refused(name: str) -> None:
    query = Leaf((1, 2, 16, 32), torch.float32, 0, (1024, 512, 32, 1))
    key = Leaf((1, 2, 16, 32), torch.float16, 1, (1024, 512, 32, 1))
    with pytest.raises(NotLowerableError, match="another type"):
        HANDLERS[name]((query, key, key), {}, ())
