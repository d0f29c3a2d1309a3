"""Finds products whose weights are stored in few bits and made into numbers at each call.

    packed ── >> 4 ── & 15 ── stack ── view ── to(half) ── - zeros ── * scales ── t ─┐
                                                                       x ────────── mm ── ...

Eager writes the weights out in full for every call and reads them again; one kernel reads the bits.
What is found has no other use of anything inside. Nothing is decided about speed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_cudal1.graph.fusion.uses import Uses
from torch_cudal1.ir.aten import is_random, overload
from torch_cudal1.ir.program import Aten, Step, TensorSpec, Value

__all__ = ["MAX_ROWS", "find_dequantised_product"]

# of the other operand: a kernel makes the weights once for every 16 to 128 of them; with more, once
# for all pays
MAX_ROWS = 256
_WEIGHT = {"aten.mm.default": 1, "aten.addmm.default": 2}
_LAYOUT = frozenset(
    f"aten.{name}"
    for name in (
        *(
            "view.default",
            "_unsafe_view.default",
            "reshape.default",
            "unsqueeze.default",
            "squeeze.dim",
            "expand.default",
        ),
        *(
            "t.default",
            "transpose.int",
            "permute.default",
            "stack.default",
            "_to_copy.default",
            "clone.default",
        ),
        *("arange.default", "arange.start", "arange.start_step"),
    )
)
_PACKED = frozenset({"uint8", "int8", "int32", "float8_e4m3fn", "float8_e5m2"})
# Bounds the walk: an ordinary weight may hang on a large graph of element-wise steps.
_MOST_STEPS = 24


def find_dequantised_product(
    last: int, uses: Uses, specs: Mapping[int, TensorSpec]
) -> tuple[int, ...]:
    """The steps that make the weight of the product at `last`, and that product; empty where it has
    none in few bits.

    `specs`: of all values.
    """
    step = uses.steps[last]
    if not isinstance(step, Aten) or step.target not in _WEIGHT:
        return ()
    activations, weight = step.args[_WEIGHT[step.target] - 1], step.args[_WEIGHT[step.target]]
    if (
        not isinstance(activations, Value)
        or not isinstance(weight, Value)
        or specs[activations.index].shape[0] > MAX_ROWS
    ):
        return ()
    inside, leaves, waiting = {last}, set[int](), [weight.index]
    while waiting:
        index = waiting.pop()
        position = uses.maker.get(index)
        if position is None:
            # No maker: an input or a constant of the Program.
            leaves.add(index)
        elif position not in inside:
            # One step that a kernel cannot do makes the whole weight pass the memory.
            if not _makes_numbers(uses.steps[position]) or len(inside) > _MOST_STEPS:
                return ()
            inside.add(position)
            waiting += uses.steps[position].reads
    # A weight that something else reads is written out in any case.
    is_exclusive = all(uses.is_used_only_in(position, inside) for position in inside - {last})
    # A single number is no packed weight.
    few_bits = any(specs[leaf].dtype in _PACKED and specs[leaf].numel > 1 for leaf in leaves)
    return tuple(sorted(inside)) if is_exclusive and few_bits and len(inside) > 2 else ()


def _makes_numbers(step: Step) -> bool:
    # Random numbers in a weight would be drawn once for each tile.
    if not isinstance(step, Aten) or is_random(step.target, step.args, dict(step.kwargs)):
        return False
    return step.target in _LAYOUT or torch.Tag.pointwise in overload(step.target).tags
