"""The template of maximum and average pooling, with the element-wise steps after it.

Bytes moved: see `ops.pooling`.
"""

from __future__ import annotations

from torch_cudal1.kernels.ops.pooling import HANDLERS
from torch_cudal1.kernels.template import FusionRules, target_names
from torch_cudal1.kernels.templates.loop_nest_template import make_template

__all__ = ["TEMPLATE"]

TEMPLATE = make_template(
    "pooling",
    HANDLERS,
    # a stride may leave elements out that no window reads
    FusionRules("window", target_names(HANDLERS), partial_reads=target_names(HANDLERS)),
    summary="Maximum and average pooling over one to three dimensions.",
    is_shortlisted=True,
)
