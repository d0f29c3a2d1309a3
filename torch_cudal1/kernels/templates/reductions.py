"""The template of reductions: sum, mean, extremes with and without index, variance, vector norm,
with the element-wise steps around them.

Bytes moved: see `ops.reductions`.
"""

from __future__ import annotations

from torch_cudal1.kernels.ops.reductions import HANDLERS
from torch_cudal1.kernels.template import FusionRules, target_names
from torch_cudal1.kernels.templates.loop_nest_template import make_template

__all__ = ["TEMPLATE"]

# A sum may follow these inside the same group, since they leave one value a row.
_ROW_RESULTS = (
    *("sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "prod.dim_int"),
    *("var.correction", "std.correction", "linalg_vector_norm.default", "norm.ScalarOpt_dim"),
)
# served inside a group that has another anchor, but none is made around them
_NO_ANCHORS = {
    "prod.default",
    *(f"{name}.{overload}" for name in ("any", "all") for overload in ("default", "dim", "dims")),
}

TEMPLATE = make_template(
    "reduction",
    HANDLERS,
    FusionRules(
        "row",
        target_names(HANDLERS.keys() - _NO_ANCHORS),
        row_results=target_names(_ROW_RESULTS),
    ),
    summary="Sums, means, extremes and their positions, variances and vector norms.",
    dtypes="fp32, fp16, bf16, int32, int64; bool for any and all",
    is_shortlisted=True,
)
