"""The template of layer, RMS, group, instance and batch norm, with the element-wise steps around
them.

Bytes moved: see `ops.norms`.
"""

from __future__ import annotations

from torch_cudal1.kernels.ops.norms import HANDLERS
from torch_cudal1.kernels.template import FusionRules, target_names
from torch_cudal1.kernels.templates.loop_nest_template import make_template

__all__ = ["TEMPLATE"]

# batch norm of running statistics is element-wise: nothing is worth a kernel around it
_ELEMENTWISE = {"_native_batch_norm_legit_no_training.default"}

TEMPLATE = make_template(
    "norm",
    HANDLERS,
    FusionRules("row", target_names(HANDLERS.keys() - _ELEMENTWISE)),
    summary="Layer, RMS, group, instance and batch norm, forward.",
    is_shortlisted=True,
)
