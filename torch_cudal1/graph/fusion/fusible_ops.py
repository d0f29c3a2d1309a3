"""Tables of the operators that a fusion group may contain: row operations, sums of their results,
layout of scans.

`partition` decides how fusion groups grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_cudal1.ir.program import Aten, Step
from torch_cudal1.kernels import registry

__all__ = ["EXPRESSED", "POOLS", "ROW_OPS", "YIELD_ROWS", "around_scans", "may_follow"]

# element-wise, and a kernel has an expression for it
EXPRESSED = registry.list_elementwise()
# yield one value a row: a sum of those over everything may be part of the same fusion group
YIELD_ROWS = registry.list_row_results()
# read their input from memory, each element several times
POOLS = registry.list_anchors("window")
ROW_OPS = registry.list_anchors("row", "window")
_SUMS = frozenset({"aten.sum.default", "aten.mean.default"})
# Cross entropy is a log-softmax and this: one pass over the logits.
_LIKELIHOOD = "aten.nll_loss_forward.default"
_SCANS = frozenset({"aten.cumsum.default", "aten.cumprod.default"})
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
    """Whether the row operation `step` may be in a fusion group that has `row_op` already."""
    if not isinstance(step, Aten):
        return False
    return (step.target in _SUMS and row_op in YIELD_ROWS) or (
        step.target == _LIKELIHOOD and row_op == "aten._log_softmax.default"
    )


def around_scans(steps: Sequence[Step]) -> frozenset[int]:
    """Positions of layout steps that a scan's kernel takes in: those that lead to it, flips and
    concatenations of its result.
    """
    maker = {out: position for position, step in enumerate(steps) for out in step.writes}
    near: set[int] = set()
    waiting = [position for position, step in enumerate(steps) if _is(step, _SCANS)]
    scanned = {out for position in waiting for out in steps[position].writes}
    for position, step in enumerate(steps):
        if _is(step, _AFTER) and scanned & set(step.reads):
            near.add(position)
            waiting.append(position)
    while waiting:
        for before in _makers(steps[waiting.pop()], maker):
            if before not in near and _is(steps[before], _BEFORE):
                near.add(before)
                waiting.append(before)
    return frozenset(near)


def _makers(step: Step, maker: Mapping[int, int]) -> list[int]:
    return [maker[index] for index in step.reads if index in maker]


def _is(step: Step, targets: frozenset[str]) -> bool:
    return isinstance(step, Aten) and step.target in targets
