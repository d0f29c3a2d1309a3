"""Which operators an island may be made around, and which go with them: row operations, sums of
their results, layout of scans.

Tables and one look at a Program's steps; how islands grow is `partition`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_cudal1.ir.check import used_values
from torch_cudal1.ir.ops import bessel
from torch_cudal1.ir.program import Aten, Step, step_outs
from torch_cudal1.kernels.ops import pointwise

__all__ = ["EXPRESSED", "POOLS", "ROW_OPS", "YIELD_ROWS", "around_scans", "may_follow"]

# element-wise, and a kernel has an expression for it
EXPRESSED = (
    frozenset(name if name.startswith("prims.") else f"aten.{name}" for name in pointwise.HANDLERS)
    | bessel.TARGETS
)
# yield one value a row: a sum of those over everything may be part of the same island
YIELD_ROWS = frozenset(
    f"aten.{name}"
    for name in (
        *(
            "sum.dim_IntList",
            "mean.dim",
            "amax.default",
            "amin.default",
            "prod.dim_int",
            "var.correction",
            "std.correction",
        ),
        *("linalg_vector_norm.default", "norm.ScalarOpt_dim", "logsumexp.default"),
    )
)
_SUMS = frozenset({"aten.sum.default", "aten.mean.default"})
_LIKELIHOOD = "aten.nll_loss_forward.default"
_SCANS = frozenset({"aten.cumsum.default", "aten.cumprod.default"})
# read their input from memory, each element several times
POOLS = frozenset(
    f"aten.{name}.default"
    for name in (
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
    )
)
ROW_OPS = (
    frozenset(
        f"aten.{name}"
        for name in (
            *("_softmax.default", "_safe_softmax.default", "_log_softmax.default"),
            *("native_layer_norm.default", "native_group_norm.default"),
            *("_softmax_backward_data.default", "_log_softmax_backward_data.default"),
            *(
                "_fused_rms_norm.default",
                "_native_batch_norm_legit.no_stats",
                "_native_batch_norm_legit_functional.default",
            ),
            *(
                "max.default",
                "min.default",
                "max.dim",
                "min.dim",
                "argmax.default",
                "argmin.default",
                "var_mean.correction",
            ),
            *(
                "mse_loss.default",
                "smooth_l1_loss.default",
                "huber_loss.default",
                "binary_cross_entropy.default",
                "norm.Scalar",
            ),
        )
    )
    | YIELD_ROWS
    | _SUMS
    | _SCANS
    | POOLS
    | {_LIKELIHOOD}
)
# before a scan, and after it: a flip there and back, zeros in front
_BEFORE = frozenset(
    f"aten.{name}"
    for name in (
        "flip.default",
        "slice.Tensor",
        "select.int",
        "unsqueeze.default",
        "zeros_like.default",
        "zeros.default",
        "full.default",
    )
)
_AFTER = frozenset({"aten.flip.default", "aten.cat.default"})


def may_follow(step: Step, row_op: str) -> bool:
    """Whether the row operation `step` may be in an island that has `row_op` already."""
    if not isinstance(step, Aten):
        return False
    return (step.target in _SUMS and row_op in YIELD_ROWS) or (
        step.target == _LIKELIHOOD and row_op == "aten._log_softmax.default"
    )


def around_scans(steps: Sequence[Step]) -> frozenset[int]:
    """Positions of layout steps that a scan's kernel takes in: those that lead to it, flips and
    concatenations of its result.
    """
    maker = {out: position for position, step in enumerate(steps) for out in step_outs(step)}
    near: set[int] = set()
    waiting = [position for position, step in enumerate(steps) if _is(step, _SCANS)]
    scanned = {out for position in waiting for out in step_outs(steps[position])}
    for position, step in enumerate(steps):
        if _is(step, _AFTER) and scanned & set(used_values(step)):
            near.add(position)
            waiting.append(position)
    while waiting:
        for before in _makers(steps[waiting.pop()], maker):
            if before not in near and _is(steps[before], _BEFORE):
                near.add(before)
                waiting.append(before)
    return frozenset(near)


def _makers(step: Step, maker: Mapping[int, int]) -> list[int]:
    return [maker[index] for index in used_values(step) if index in maker]


def _is(step: Step, targets: frozenset[str]) -> bool:
    return isinstance(step, Aten) and step.target in targets
