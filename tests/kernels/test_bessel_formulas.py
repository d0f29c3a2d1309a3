"""Bessel functions are part of a text that calls them."""

from __future__ import annotations

from torch_cudal1.ir.ops.bessel import TARGETS
from torch_cudal1.kernels.codegen.prelude import add_prelude
from torch_cudal1.kernels.ops.bessel_formulas import HANDLERS


def test_each_operator_has_a_handler_and_a_function() -> None:
    assert HANDLERS.keys() == TARGETS
    for target in TARGETS:
        name = target.split(".")[1]
        assert f"def {name}(order, x)" in add_prelude(f"p0):\n    {name}(p0, p0)\n")
