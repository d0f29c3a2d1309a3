"""The template of softmax, log_softmax, logsumexp and the softmax backwards, with the element-wise
steps around them.

Bytes moved: see `ops.softmax`.
"""

from __future__ import annotations

from torch_cudal1.kernels.ops.softmax import HANDLERS
from torch_cudal1.kernels.template import FusionRules, target_names
from torch_cudal1.kernels.templates.loop_nest_template import make_template

__all__ = ["TEMPLATE"]

TEMPLATE = make_template(
    "softmax",
    HANDLERS,
    # logsumexp leaves one value a row, which a sum may follow.
    FusionRules("row", target_names(HANDLERS), row_results=target_names(["logsumexp.default"])),
    summary="Softmax, log-softmax, log-sum-exp and the softmax backwards along one dimension.",
    is_shortlisted=True,
)
