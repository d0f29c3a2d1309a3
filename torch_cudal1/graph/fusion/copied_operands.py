"""Finds batched products whose operands are copied into rows before them, as einsum and heads
inside rows make them.

    (batch, length, heads, k) ── permute ── clone ── view(batch * heads, length, k) ── bmm ── ...

A kernel reads the tensor as it lies. What is found has no other use of anything inside, and its
copies cost a good part of what the product costs: of larger products a library's kernel is the
better one, and copies pay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch_cudal1.graph.fusion.uses import Uses
from torch_cudal1.ir.cost import DEVICE_RATES
from torch_cudal1.ir.program import Aten, Step, TensorSpec, Value
from torch_cudal1.kernels.ops.matmul import LEFT_POSITIONS

__all__ = ["find_copied_operand"]

_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default"})
# Below it a library's kernel on copied operands is the faster way.
_WORTH = 0.4  # estimated seconds of the copies over those of the product


def find_copied_operand(last: int, uses: Uses, specs: Mapping[int, TensorSpec]) -> tuple[int, ...]:
    """The product at `last` with the copies before it; empty where it has none, or they are cheap
    beside it.

    `specs`: of all values.
    """
    step = uses.steps[last]
    # A matrix alone has no batch whose heads would be copied into rows.
    if (
        not isinstance(step, Aten)
        or step.target not in LEFT_POSITIONS
        or len(specs[step.writes[0]].shape) != 3
    ):
        return ()
    first = LEFT_POSITIONS[step.target]
    copies: set[int] = set()
    for operand in step.args[first : first + 2]:
        assert isinstance(operand, Value)
        copies |= _copy_before(operand.index, last, uses, specs)
    # Views are free, so copies count alone.
    copied = sum(
        specs[out].size_bytes
        for at in copies
        if _is_copy(uses.steps[at])
        for out in uses.steps[at].writes
    )
    lhs, result = step.args[first], specs[step.writes[0]]
    assert isinstance(lhs, Value)
    flops = 2.0 * math.prod(result.shape) * specs[lhs.index].shape[-1]
    roofline = DEVICE_RATES[result.device]
    # Twice: a copy reads and writes each byte.
    worth = 2 * copied / roofline.bytes_per_s >= _WORTH * flops / roofline.flops_per_s
    return tuple(sorted({*copies, last})) if copies and worth else ()


def _copy_before(value: int, reader: int, uses: Uses, specs: Mapping[int, TensorSpec]) -> set[int]:
    """The copy that makes an operand, and the views of it. Empty where there is none, or where the
    copied tensor has no single stride for rows and for columns.
    """
    steps: set[int] = set()
    matrix = specs[value].shape[1:]
    # Another reader of the copy would keep it alive, and nothing would be saved.
    while (position := uses.maker.get(value)) is not None and uses.is_used_only_in(
        position, {*steps, reader}
    ):
        step = uses.steps[position]
        (source,) = step.reads if _is_copy(step) or _is_view(step) else (None,)
        if source is None:
            break
        steps.add(position)
        if _is_copy(step):
            return steps if _keeps_strides(specs[source], matrix) else set()
        value = source
    return set()


def _keeps_strides(spec: TensorSpec, matrix: tuple[int, ...]) -> bool:
    """Whether the last dimensions of a tensor are a matrix of this shape with one stride for rows
    and one for columns.
    """
    dims = [
        # A dim of size 1 has no stride that matters.
        (size, stride)
        for size, stride in zip(spec.shape, spec.strides, strict=True)
        if size > 1
    ]
    for matrix_size in reversed(matrix):
        size, expected = 1, None
        while size < matrix_size:
            # Rows or columns made of several dims need one stride, or a kernel could not step
            # through them.
            if not dims or expected not in (None, dims[-1][1]):
                return False
            extent, stride = dims.pop()
            size, expected = size * extent, stride * extent
        if size != matrix_size:
            return False
    return True


def _is_copy(step: Step) -> bool:
    return isinstance(step, Aten) and step.target == "aten.clone.default"


def _is_view(step: Step) -> bool:
    return isinstance(step, Aten) and step.target in _VIEWS
