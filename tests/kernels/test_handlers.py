"""Operands and templates that handlers are made of."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.nodes import Constant, Leaf
from torch_cudal1.kernels.ops.handlers import as_node, make_floating, make_simple, maximum

SPEC = TensorSpec("float32", (4,), (1,), "cuda")
LEAF = Leaf((4,), torch.float32, 0, (1,))


def test_numbers_become_constants_and_other_things_are_refused() -> None:
    assert isinstance(as_node(2.5, torch.float32), Constant)
    assert as_node(LEAF, torch.float32) is LEAF
    with pytest.raises(NotLowerableError, match="neither a tensor nor a number"):
        as_node("two", torch.float32)


def test_a_template_takes_as_many_operands_as_it_says() -> None:
    (node,) = make_simple("({0} * {1})", 2)((LEAF, 2.0), {}, (SPEC,))
    assert node is not None
    assert node.shape == (4,)
    with pytest.raises(NotLowerableError, match="unexpected arguments"):
        make_simple("({0} * {1})", 2)((LEAF,), {}, (SPEC,))


def test_a_floating_template_refuses_whole_numbers() -> None:
    integers = TensorSpec("int64", (4,), (1,), "cuda")
    with pytest.raises(NotLowerableError, match="int64"):
        make_floating("libdevice.exp({0})", 1)((LEAF,), {}, (integers,))


def test_a_maximum_hands_nan_on_in_float_types() -> None:
    assert "propagate_nan" in maximum(LEAF, LEAF, torch.float32).template
    assert "propagate_nan" not in maximum(LEAF, LEAF, torch.int64).template
