"""Rules for clamps: two in a row become one.

`clamp_limits` reads relu and hardtanh as the clamps that they are.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    is_op,
    is_tensor,
    iter_calls,
    replace,
)

__all__ = ["clamp_limits", "clamp_of_clamp"]

aten = torch.ops.aten

_CLAMPS = (
    aten.relu.default,
    aten.clamp.default,
    aten.hardtanh.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
)


def clamp_limits(node: fx.Node) -> tuple[float, float] | None:
    """`(low, high)` of a clamp by constants (relu and hardtanh among them), infinite where open;
    None if it is no such thing.
    """
    if not is_op(node, *_CLAMPS):
        return None
    bound_args = arguments(node)
    if is_op(node, aten.relu.default):
        # NaN passes relu as it passes a clamp.
        return 0.0, math.inf
    if is_op(node, aten.hardtanh.default):
        low, high = bound_args["min_val"], bound_args["max_val"]
    else:
        low, high = bound_args.get("min"), bound_args.get("max")
    # An open side is infinite, so that callers compare numbers only.
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    return (low, high) if low <= high else None  # False for NaN limits as well


def clamp_of_clamp(gm: fx.GraphModule) -> int:
    """`clamp(clamp(x, a, b), c, d)` -> `clamp(x, a', b')` with `a'`, `b'` the limits `a`, `b`
    clamped to `[c, d]`.

    Exact: both are monotone, and NaN passes both. Valid for float32 and float64, and where the
    limits are exact in the dtype.
    """
    sites = 0
    for node in iter_calls(gm, *_CLAMPS):
        first = node.args[0]
        if not is_op(first, *_CLAMPS) or not is_tensor(first.args[0]):
            continue
        outer, within, source = clamp_limits(node), clamp_limits(first), first.args[0]
        if (
            outer is None
            or within is None
            # A clamp by Python numbers may promote the dtype, which rounds between the two.
            or not dtype(source) == dtype(first) == dtype(node)
            or not dtype(node).is_floating_point
        ):
            continue
        # The inner limits go through the outer clamp, as the values do.
        low, high = (min(max(limit, outer[0]), outer[1]) for limit in within)
        # 0.1 in bfloat16 is another number, and which one a kernel compares with differs.
        if not all(_is_exact_in(limit, dtype(node)) for limit in (*outer, *within)):
            continue
        with gm.graph.inserting_before(node):
            limits = [None if math.isinf(limit) else limit for limit in (low, high)]
            # `clamp` refuses two open sides, and a limit of the wrong infinity is a constant.
            if limits == [None, None] or math.inf in (low, -high):
                continue
            replace(node, call(gm.graph, aten.clamp.default, source, *limits))
        sites += 1
    return sites


def _is_exact_in(limit: float, kind: torch.dtype) -> bool:
    return kind in (torch.float32, torch.float64) or float(torch.tensor(limit, dtype=kind)) == limit
