"""The template of chains of element-wise steps, and of any expression that no other template serves.

Bytes moved: one read of each operand, one write of each result.
"""

from __future__ import annotations

from torch_cudal1.kernels.ops import bessel_formulas, pointwise
from torch_cudal1.kernels.template import FusionRules
from torch_cudal1.kernels.templates.loop_nest_template import make_template

__all__ = ["TEMPLATE"]

TEMPLATE = make_template(
    "elementwise",
    {**pointwise.HANDLERS, **bessel_formulas.HANDLERS},
    FusionRules("elementwise"),
    summary="Chains of two or more element-wise steps, views and broadcasts included.",
    dtypes="fp32, fp16, bf16, int32, int64, bool; reads uint8, int8 and fp8",
    # The last template of the registry: what no other one takes is element-wise steps.
    matches_expressions=lambda families, nodes: True,
)
