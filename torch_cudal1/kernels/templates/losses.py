"""The template of losses: squared, absolute, smooth, Huber, binary and plain cross entropy,
negative log likelihood.

Bytes moved: see `ops.losses`.
"""

from __future__ import annotations

from torch_cudal1.kernels.ops.losses import HANDLERS
from torch_cudal1.kernels.template import FusionRules, target_names
from torch_cudal1.kernels.templates.loop_nest_template import make_template

__all__ = ["TEMPLATE"]

TEMPLATE = make_template(
    "loss",
    HANDLERS,
    FusionRules(
        "row",
        target_names(HANDLERS),
        # of a row it reads the entry at the target's place
        partial_reads=target_names(["nll_loss_forward.default"]),
    ),
    summary="Losses as element-wise steps and sums, reduced or not.",
)
