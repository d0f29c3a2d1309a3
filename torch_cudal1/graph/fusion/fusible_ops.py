"""Which steps a fusion group may contain: element-wise ones, row operations, sums of their results,
products, layout of scans.

`group_growth` decides how fusion groups grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torch_cudal1.ir.aten import is_random, overload
from torch_cudal1.ir.program import Aten, Program, Step
from torch_cudal1.kernels import registry

__all__ = [
    "EXPRESSED",
    "ROW_RESHAPES",
    "SHARED_LEFT_DTYPES",
    "YIELD_ROWS",
    "find_layout_steps_of_scans",
    "has_own_kernel",
    "has_product",
    "is_anchor",
    "is_fusible",
    "is_pool",
    "is_product",
    "is_row_op",
    "may_follow",
    "starts_group",
]

# What changes the shape of a product's result and leaves its rows whole.
ROW_RESHAPES = frozenset({"aten.view.default", "aten._unsafe_view.default"})
# What kernels of several right operands beside one left operand are made for.
SHARED_LEFT_DTYPES = frozenset({"float16", "bfloat16"})

# element-wise, and a kernel has an expression for it
EXPRESSED = registry.list_elementwise()
# yield one value a row: a sum of those over everything may be part of the same fusion group
YIELD_ROWS = registry.list_row_results()
# read their input from memory, each element several times
_POOLS = registry.list_anchors("window")
_ROW_OPS = registry.list_anchors("row", "window")
_KERNEL_TO_ITSELF = registry.list_lone_anchors()
_PRODUCTS = registry.list_anchors("product")
_RECURRENT = registry.list_anchors("sequence")
# element-wise, though torch does not say so
_UNTAGGED = frozenset(
    {
        *("aten._to_copy.default", "aten.hardswish.default", "aten.rsub.Tensor"),
        *(
            f"aten.{name}_backward.default"
            for name in ("elu", "hardsigmoid", "hardtanh", "leaky_relu", "softplus")
        ),
    }
)
# A fusion group with an element-wise step that no kernel has would get no kernel at all, not even
# for its product. The same holds for two results in one memory, which `detach` makes of a value
# that a forward keeps for its backward.
_POINTWISE_WITH_KERNEL = EXPRESSED - {"aten.detach.default", "aten.alias.default"}
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


def find_layout_steps_of_scans(steps: Sequence[Step]) -> frozenset[int]:
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
        for before in _find_makers(steps[waiting.pop()], maker):
            if before not in near and _is(steps[before], _BEFORE):
                near.add(before)
                waiting.append(before)
    return frozenset(near)


def has_own_kernel(step: Step) -> bool:
    """Whether the step's kernel takes no further step in."""
    return _is(step, _KERNEL_TO_ITSELF)


def is_row_op(step: Step) -> bool:
    """Whether a kernel makes a pass over a row for the step: a norm, softmax, reduction or pooling."""
    return _is(step, _ROW_OPS)


def is_pool(step: Step) -> bool:
    """Whether the step reads each element of its input several times, from memory."""
    return _is(step, _POOLS)


def is_product(step: Step) -> bool:
    """Whether it is a matrix product that a fusion group may be made around."""
    return _is(step, _PRODUCTS)


def starts_group(step: Step) -> bool:
    """Whether only `partition(products=True)` makes a fusion group of it: a product, or a recurrent
    layer.
    """
    return is_product(step) or _is_recurrent(step)


def has_product(program: Program) -> bool:
    """Whether a step of `program` starts a group as `starts_group` says."""
    return any(map(starts_group, program.steps))


def _is_recurrent(step: Step) -> bool:
    return _is(step, _RECURRENT)


def is_anchor(step: Step, products: bool) -> bool:
    """Whether the step is worth a kernel by itself."""
    return is_row_op(step) or (products and starts_group(step))


def is_fusible(step: Step) -> bool:
    """Whether the step is element-wise or a row operation, and a kernel has an expression for it."""
    # A kernel would draw other numbers than eager, and no check could compare them.
    if not isinstance(step, Aten) or is_random(step.target, step.args, dict(step.kwargs)):
        return False
    pointwise_step = torch.Tag.pointwise in overload(step.target).tags or step.target in _UNTAGGED
    return is_row_op(step) or (pointwise_step and step.target in _POINTWISE_WITH_KERNEL)


def _find_makers(step: Step, maker: Mapping[int, int]) -> list[int]:
    return [maker[index] for index in step.reads if index in maker]


def _is(step: Step, targets: frozenset[str]) -> bool:
    return isinstance(step, Aten) and step.target in targets
