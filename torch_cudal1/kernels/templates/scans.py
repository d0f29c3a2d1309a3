"""The template of cumsum and cumprod, forward, reversed and exclusive, with the element-wise steps
around them.

Bytes moved: see `ops.scans`.
"""

from __future__ import annotations

from torch_cudal1.kernels.ops.scans import HANDLERS
from torch_cudal1.kernels.template import FusionRules, target_names
from torch_cudal1.kernels.templates.loop_nest_template import make_template

__all__ = ["TEMPLATE"]

# a flip is part of a reversed scan; alone it is a copy, which Inductor does
_LAYOUT = {"flip.default"}

TEMPLATE = make_template(
    "scan",
    HANDLERS,
    FusionRules("row", target_names(HANDLERS.keys() - _LAYOUT)),
    summary="Running sums and products along one dimension, also reversed or exclusive.",
    dtypes="fp32, fp16, bf16, int32, int64",
    is_shortlisted=True,
)
