"""Convolutions: ATen's as nodes, and as sets of classes of taps, which is how the kernel computes
them.

A transposed convolution of stride s yields the outputs s q + r of each class r as a plain
convolution of stride 1 with some of the taps; a plain convolution is one class. `find_convolution`
reads that off; `templates.conv` computes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.nodes import Conv, Leaf, Node, find_nodes, pointwise, reshape
from torch_cudal1.kernels.ops.handlers import Handler

__all__ = ["HANDLERS", "Convolution", "SpatialAxis", "TapClass", "find_convolution"]


@dataclass(frozen=True, slots=True)
class TapClass:
    """The taps that outputs of one class meet along an axis.

    Tap i reads input `low + i * step` beside the place, and weight `index + i * weight_step`.
    """

    count: int
    low: int
    index: int


@dataclass(frozen=True, slots=True)
class SpatialAxis:
    """One axis: sizes of input and output, input elements from a place to the next, its classes,
    and the steps between taps.
    """

    size: int
    out: int
    stride: int
    step: int
    weight_step: int
    classes: tuple[TapClass, ...]

    @property
    def places(self) -> int:
        """Places of the largest class."""
        return -(-self.out // len(self.classes))

    @property
    def low(self) -> int:
        """The first input element that any tap reads beside a place."""
        return min((c.low for c in self.classes if c.count), default=0)

    @property
    def reach(self) -> int:
        """Input elements from the first to the last that taps read beside a place."""
        return (
            max((c.low + (c.count - 1) * self.step + 1 for c in self.classes if c.count), default=1)
            - self.low
        )

    @property
    def taps(self) -> int:
        """Taps of the class that has most."""
        return max(c.count for c in self.classes)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution over three axes (z, y, x; missing ones of size 1) of `images`, `groups` of
    `channels` to `outputs` channels.

    `input` and `weight` are Program values; `input_strides` of image, channel, z, y, x;
    `weight_strides` of group, output channel, channel, z, y, x.
    """

    images: int
    groups: int
    channels: int
    outputs: int
    axes: tuple[SpatialAxis, SpatialAxis, SpatialAxis]
    input: int
    input_strides: tuple[int, ...]
    weight: int
    weight_strides: tuple[int, ...]

    @property
    def depth(self) -> float:
        """Products that are summed for an output, on average over the classes."""
        return self.channels * math.prod(
            sum(c.count for c in axis.classes) / len(axis.classes) for axis in self.axes
        )

    @property
    def flops(self) -> float:
        """Multiplications and additions, those with padding included."""
        return (
            2.0
            * self.images
            * self.groups
            * self.outputs
            * self.depth
            * math.prod(a.out for a in self.axes)
        )

    @property
    def bytes(self) -> int:
        """Input and result, once each."""
        sizes, outs = math.prod(a.size for a in self.axes), math.prod(a.out for a in self.axes)
        return 4 * self.images * self.groups * (self.channels * sizes + self.outputs * outs)


def find_convolution(outputs: tuple[Node, ...]) -> tuple[Conv, Convolution]:
    """The only convolution below `outputs`. Raises NotLowerableError without one, with two, or when
    an operand is not in memory.
    """
    convolutions = find_nodes(Conv, outputs)
    # A tile has the accumulators of one convolution.
    if len(convolutions) != 1:
        raise NotLowerableError(f"{len(convolutions)} convolutions in one fusion group")
    conv = convolutions[0]
    x, w = conv.left, conv.right
    if not isinstance(x, Leaf) or not isinstance(w, Leaf):
        raise NotLowerableError(
            "an operand of a convolution is computed in the fusion group; it is read from memory"
        )
    images, rank = x.shape[0], len(x.shape) - 2
    weight_channels, inputs = (
        (w.shape[0], w.shape[1]) if conv.transposed else (w.shape[1], w.shape[0])
    )
    channels = x.shape[1] // conv.groups
    outs = inputs if conv.transposed else inputs // conv.groups
    assert weight_channels == (x.shape[1] if conv.transposed else channels)
    axes = [SpatialAxis(1, 1, 1, 1, 1, (TapClass(1, 0, 0),))] * (3 - rank)
    axes += [
        _make_axis(conv, d, x.shape[d + 2], w.shape[d + 2], conv.shape[d + 2]) for d in range(rank)
    ]
    # Missing axes are in front, of size 1: one kernel serves one to three dimensions.
    missing = (0,) * (3 - rank)
    # A transposed convolution's weight has its input channels first.
    of_out, of_in = (
        (w.strides[1], w.strides[0]) if conv.transposed else (w.strides[0], w.strides[1])
    )
    # ATen has no stride of groups: they are parts of the channels.
    of_group = channels * of_in if conv.transposed else outs * of_out
    convolution = Convolution(
        images,
        conv.groups,
        channels,
        outs,
        (axes[0], axes[1], axes[2]),
        x.value,
        (*x.strides[:2], *missing, *x.strides[2:]),
        w.value,
        (of_group, of_out, of_in, *missing, *w.strides[2:]),
    )
    return conv, _merge_axes(convolution)


def _make_axis(conv: Conv, d: int, size: int, kernel: int, out: int) -> SpatialAxis:
    stride, padding, dilation = conv.stride[d], conv.padding[d], conv.dilation[d]
    # A plain convolution is a single class: every output meets all taps.
    if not conv.transposed:
        return SpatialAxis(size, out, stride, dilation, 1, (TapClass(kernel, -padding, 0),))
    # Taps of a class: every (stride / common)-th, in the order of the input elements that they
    # meet.
    common = math.gcd(stride, dilation)
    classes = []
    # The outputs s q + r of one r meet every s-th tap only: others would multiply zeros that stand
    # between input elements.
    for rest in range(stride):
        taps = [k for k in range(kernel) if (rest + padding - k * dilation) % stride == 0][::-1]
        # A class without taps yields zeros, or the bias: its outputs lie between those of other
        # classes.
        classes.append(
            TapClass(
                len(taps),
                (rest + padding - taps[0] * dilation) // stride if taps else 0,
                taps[0] if taps else 0,
            )
        )
    step = dilation // common
    # Nothing says how far apart the taps of such a class are: the step is the one that lets the
    # classes share a grid of the input.
    if all(c.count <= 1 for c in classes):
        lows = [c.low for c in classes if c.count]
        step = math.gcd(*(low - min(lows) for low in lows)) or 1
    # Taps in the order of the input run backwards through the weight.
    return SpatialAxis(size, out, 1, step, -(stride // common), tuple(classes))


def _merge_axes(conv: Convolution) -> Convolution:
    """The convolution with its three axes as one, where every output reads a single place (1 x 1)
    and rows follow one another in memory.
    """
    (z, y, x), strides = conv.axes, conv.input_strides
    # A 1 x 1 convolution reads each place by itself.
    single = all(
        a.reach == 1 and a.stride == 1 and len(a.classes) == 1 and a.low == 0 and a.size == a.out
        for a in conv.axes
    )
    if (
        # Rows that do not follow one another in memory cannot become one axis.
        not single
        or strides[4] != 1
        or (y.size > 1 and strides[3] != x.size)
        or (z.size > 1 and strides[2] != y.size * x.size)
    ):
        return conv
    single_axis, size = SpatialAxis(1, 1, 1, 1, 1, (TapClass(1, 0, 0),)), z.size * y.size * x.size
    axes = (single_axis, single_axis, SpatialAxis(size, size, 1, 1, 1, (TapClass(1, 0, 0),)))
    return Convolution(
        conv.images,
        conv.groups,
        conv.channels,
        conv.outputs,
        axes,
        conv.input,
        (*strides[:2], 0, 0, 1),
        conv.weight,
        conv.weight_strides,
    )


def _convolution(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    rank = len(outs[0].shape) - 2
    if kwargs or rank not in (1, 2, 3) or len(x.shape) != rank + 2:
        raise NotLowerableError(f"a convolution of rank {len(x.shape)} with {sorted(kwargs)}")
    if (
        any(t.dtype is not torch.float32 for t in (x, weight))
        or outs[0].torch_dtype is not torch.float32
    ):
        raise NotLowerableError(f"a convolution of {x.dtype} and {weight.dtype}")
    # ATen gives one number for all axes, or one for each.
    steps, edges, dilations = (
        tuple(s) * rank if len(s) == 1 else tuple(s) for s in (stride, padding, dilation)
    )
    shape = outs[0].shape
    node: Node = Conv(
        shape, x.dtype, x, weight, steps, edges, dilations, bool(transposed), int(groups)
    )
    if bias is not None:
        column = reshape(bias, (shape[1], *(1,) * rank))
        node = pointwise("({0} + {1})", node, column, dtype=x.dtype, shape=shape)
    return (node,)


HANDLERS: dict[str, Handler] = {"convolution.default": _convolution}
