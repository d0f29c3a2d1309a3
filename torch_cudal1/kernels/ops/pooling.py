"""Maximum and average pooling over 1, 2 or 3 dimensions: every tap of the window is a read at a
shifted place, the padding a value.

Taps of neighbouring results are neighbours in memory and come from the L1. Bytes moved: one read of
the input, one write of the result. Windows of more than `MAX_TAPS` elements, and windows that
leave the padded input (`ceil_mode`), stay with PyTorch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.affine import Index
from torch_cudal1.kernels.expr.nodes import Node, Padded, cast, constant, pointwise
from torch_cudal1.kernels.ops.handlers import Handler, div

__all__ = ["HANDLERS", "MAX_TAPS"]

# Every tap is a load in the text: a window of 11 x 11 has no kernel.
MAX_TAPS = 64
_MAX = "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"


def _expand_setting(setting: Any, axes: int, default: int) -> tuple[int, ...]:
    """A setting for every axis: ATen gives one number for all, or none for the default."""
    values = tuple(setting) if isinstance(setting, (tuple, list)) else (setting,)
    if not values or values[0] is None:
        return (default,) * axes
    return tuple(values) * axes if len(values) == 1 else tuple(values)


def _slice_taps(
    x: Node,
    outs: tuple[TensorSpec, ...],
    window: tuple[int, ...],
    steps: tuple[tuple[int, ...], ...],
    fill: str,
) -> list[Node]:
    """The input at each place of the window, as tensors of the result's shape. `steps`: stride,
    padding, dilation.
    """
    shape, axes = outs[0].shape, len(window)
    if math.prod(window) > MAX_TAPS or x.dtype not in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):
        raise NotLowerableError(f"a window of {window} over {x.dtype}")
    for size, out, k, stride, pad, step in zip(
        x.shape[-axes:], shape[-axes:], window, *steps, strict=True
    ):
        # `ceil_mode` lets a window leave the padded input; eager then divides by another count or
        # skips what is outside.
        if (out - 1) * stride + (k - 1) * step >= size + 2 * pad:
            raise NotLowerableError("a window that leaves the padded input")
    # A tap beyond the edge is the fill value, by a mask of the load: nothing is copied to pad.
    return [
        Padded(shape, x.dtype, x, _place(axes, tap, steps), fill)
        for tap in itertools.product(*map(range, window))
    ]


def _place(
    axes: int, tap: tuple[int, ...], steps: tuple[tuple[int, ...], ...]
) -> Callable[[Index], Index]:
    def remap(index: Index) -> Index:
        moved = [
            form.scale(stride).shift(at * step - pad)
            for form, at, stride, pad, step in zip(
                index[len(index) - axes :], tap, *steps, strict=True
            )
        ]
        return (*index[: len(index) - axes], *moved)

    return remap


def _fold_taps(taps: list[Node], template: str) -> Node:
    """All taps in one, as a tree: sums of many keep their accuracy."""
    # As a tree the rounding errors of a sum grow with the logarithm of its length.
    while len(taps) > 1:
        pairs = [
            pointwise(template, a, b, dtype=torch.float32)
            for a, b in zip(taps[::2], taps[1::2], strict=False)
        ]
        # An odd one is carried over to the next round.
        taps = pairs + taps[len(taps) - len(taps) % 2 :]
    return taps[0]


def _max(axes: int) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node | None, ...]:
        x, *rest = args
        # ATen leaves out trailing arguments that have their default.
        settings = [*rest, *[None] * (5 - len(rest))]
        window = _expand_setting(settings[0], axes, 1)
        # An empty stride is the window's size.
        stride = _expand_setting(settings[1], axes, 1) if settings[1] else window
        steps = (
            stride,
            _expand_setting(settings[2], axes, 0),
            _expand_setting(settings[3], axes, 1),
        )
        # Minus infinity loses against every number, so that the padding never wins.
        taps: list[Node] = [
            cast(tap, torch.float32) for tap in _slice_taps(x, outs, window, steps, 'float("-inf")')
        ]
        # The second result, the positions, has no kernel: a group that reads them is refused.
        return pointwise("({0})", _fold_taps(taps, _MAX), dtype=outs[0].torch_dtype), None

    return handle


def _average(axes: int) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        x, *rest = args
        settings = [*rest, *[None] * (6 - len(rest))]
        window = _expand_setting(settings[0], axes, 1)
        stride = _expand_setting(settings[1], axes, 1) if settings[1] else window
        padding = _expand_setting(settings[2], axes, 0)
        # Without the padding in the count the divisor differs from place to place.
        if settings[4] is False and any(padding) and settings[5] is None:
            raise NotLowerableError("an average that does not count the padding")
        taps: list[Node] = [
            cast(tap, torch.float32)
            for tap in _slice_taps(x, outs, window, (stride, padding, (1,) * axes), "0.0")
        ]
        # `divisor_override` takes the place of the window's size.
        count = settings[5] or math.prod(window)
        # The sum is divided once, correctly rounded, as in eager.
        total = div(_fold_taps(taps, "({0} + {1})"), constant(count, torch.float32))
        return (pointwise("({0})", total, dtype=outs[0].torch_dtype),)

    return handle


HANDLERS: dict[str, Handler] = {
    "max_pool2d_with_indices.default": _max(2),
    "max_pool3d_with_indices.default": _max(3),
    "avg_pool1d.default": _average(1),
    "avg_pool2d.default": _average(2),
    "avg_pool3d.default": _average(3),
}
