"""Rules that reduce before they convolve: sums and means over positions or channels of a
convolution or transposed convolution.

The sums and means may come after scaling by numbers and additions (`pushed_reductions.trace`). Grouped
convolutions are left alone: they move so few operations per byte that reading the input several
times costs more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    is_op,
    iter_calls,
    replace,
    shape,
)
from torch_cudal1.graph.rewrite.pushed_reductions import (
    FLOATS,
    REDUCTIONS,
    Kind,
    choose,
    emit_bounds,
    emit_reduction,
    estimate_work,
    finish,
    parse,
    rebuild,
    split_signs,
    trace,
)
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["CONV_REDUCTION_RULES"]

aten = torch.ops.aten
# As in `reduction_rules`: below it the extra launches are not worth a try.
_GAIN = 1.3
# a convolution to fewer channels than this costs as much as one to this many: kernels work on tiles
_THIN = 16


@dataclass(frozen=True)
class _Conv:
    """The arguments of one ungrouped `aten.convolution` over `rank` spatial dims, with its output
    shape.
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.out) - 2

    @property
    def kernel(self) -> tuple[int, ...]:
        return shape(self.weight)[2:]

    @property
    def out_axis(self) -> int:
        """Which dim of the weight counts output channels; the other of the first two counts input
        channels.
        """
        return 1 if self.transposed else 0

    def estimate_cost(self, batch: int, channels: int, sizes: Sequence[int]) -> float:
        """Work of a convolution like this one with other sizes: `batch` images, `channels` out,
        positions `sizes`.
        """
        places = math.prod(shape(self.x)[2:]) if self.transposed else math.prod(sizes)
        weight = shape(self.weight)
        flops = 2.0 * batch * channels * weight[1 - self.out_axis] * math.prod(self.kernel) * places
        return estimate_work(
            flops,
            math.prod(shape(self.x)) + math.prod(weight) + 2 * batch * channels * math.prod(sizes),
        )


def _match_conv(node: fx.Node) -> _Conv | None:
    if not is_op(node, aten.convolution.default):
        return None
    bound = arguments(node)
    x, weight, bias = bound["input"], bound["weight"], bound["bias"]
    rank = len(shape(node)) - 2
    # Grouped ones: see the top of the file.
    if bound["groups"] != 1 or rank < 1 or dtype(node) not in FLOATS or 0 in shape(x):
        return None
    if len({dtype(part) for part in (x, weight, bias, node) if part is not None}) != 1:
        return None
    each = {
        # ATen lets one number stand for all dims.
        name: tuple(bound[name]) * (rank if len(bound[name]) == 1 else 1)
        for name in ("stride", "padding", "dilation", "output_padding")
    }
    return _Conv(x, weight, bias, transposed=bool(bound["transposed"]), out=shape(node), **each)


def _pays_positions(node: fx.Node, dims: tuple[int, ...]) -> bool:
    conv = _match_conv(node)
    # Dims 0 and 1 are batch and channels.
    spatial = [dim - 2 for dim in dims if dim >= 2]
    if (
        conv is None
        or not spatial
        or any(_find_tap_windows(conv, axis) is None for axis in spatial)
    ):
        return False
    sizes = [1 if axis in spatial else size for axis, size in enumerate(conv.out[2:])]
    before = conv.estimate_cost(conv.out[0], conv.out[1], conv.out[2:])
    # Every tap of the first reduced dim reads the input 3 times (sum, least, greatest); padding
    # copies it.
    passes = 3 * conv.kernel[spatial[0]] + 2
    positions = (
        math.prod(sizes)
        if not conv.transposed
        else math.prod(s for a, s in enumerate(shape(conv.x)[2:]) if a not in spatial)
    )
    flops = 4.0 * conv.out[0] * math.prod(shape(conv.weight)) * positions
    return before >= _GAIN * estimate_work(
        flops, passes * math.prod(shape(conv.x)) + 3 * math.prod(shape(conv.weight))
    )


def _pays_channels(node: fx.Node, dims: tuple[int, ...]) -> bool:
    conv = _match_conv(node)
    # A single channel is its own sum.
    if conv is None or 1 not in dims or conv.out[1] < 2:
        return False
    before = conv.estimate_cost(conv.out[0], conv.out[1], conv.out[2:])
    return before >= _GAIN * (
        # Priced as _THIN channels, though it has two.
        conv.estimate_cost(conv.out[0], min(_THIN, conv.out[1]), conv.out[2:])
        + 2 * math.prod(shape(conv.weight))
    )


def _push(gm: fx.GraphModule, positions: bool) -> int:
    sites = 0
    for node in iter_calls(gm, *REDUCTIONS):
        reduction = parse(node)
        path = (
            trace(
                reduction.source, reduction.dims, _pays_positions if positions else _pays_channels
            )
            if reduction
            else None
        )
        conv = _match_conv(path.root) if path else None
        if reduction is None or path is None or conv is None:
            continue
        with gm.graph.inserting_before(node):
            value = (_reduce_over_positions if positions else _reduce_over_channels)(
                gm.graph, conv, path.dims, reduction.kind
            )
            new = finish(gm.graph, reduction, rebuild(gm.graph, path, value, reduction.kind))
        replace(node, new)
        sites += 1
    return sites


def _push_positions(gm: fx.GraphModule) -> int:
    """Sum or mean of a convolution over some or all spatial dims -> sums of the input under each
    kernel tap, then a product.

    conv(x, w).sum(H, W)[n, o] = sum over c, t of w[o, c, t] * S[n, c, t], where S[n, c, t] adds up
    the inputs that tap t meets: every stride-th element of a window (padding read as zeros), one
    dim after another. Over all spatial dims the rest is one `mm`; dims that are not reduced stay a
    convolution of lower rank with C * (taps of the reduced dims) channels. For a transposed
    convolution tap t meets the inputs whose copy is not cropped away: without cropping all of them,
    so S is a plain sum.

    Before: 2 N O C T P flops (T taps, P positions); after: 4 N O C T, the input read 3k times (k
    taps of the first dim), mostly from cache. Valid for any stride, padding and dilation, groups 1,
    each tap meeting something, the convolution used once. Mask-exact for any input, and for
    infinite or NaN weights as far as eager is one thing: whether the zeros of a padding meet such a
    weight differs between PyTorch's own algorithms (on CPU float32 and float64 disagree); here they
    do, as in im2col.
    """
    return _push(gm, True)


def _reduce_over_positions(
    graph: fx.Graph, conv: _Conv, dims: Sequence[int], kind: Kind
) -> fx.Node:
    axes = [dim - 2 for dim in dims if dim >= 2]
    rest = [axis for axis in range(conv.rank) if axis not in axes]
    total, low, high = conv.x, conv.x, conv.x
    # One dim after another: sums, minima and maxima over positions separate.
    for axis in axes:
        total, low, high = _reduce_taps(graph, conv, axis, kind, (total, low, high))
    # Reduced dims right after the channels, where `_fold_taps` merges them.
    order = [0, 1, *(axis + 2 for axis in axes), *(axis + 2 for axis in rest)]
    # Along the batch: one product computes the sums and their twins.
    both = call(graph, aten.cat.default, [total, split_signs(graph, total, low, high)], 0)
    both = _fold_taps(graph, both, order, len(axes))
    first = conv.out_axis
    weight = _fold_taps(graph, conv.weight, [first, 1 - first, *order[2:]], len(axes))
    value = _emit_remaining_product(graph, conv, both, weight, rest)
    # The batch was doubled: sums first, twins second.
    halves = [
        call(graph, aten.slice.Tensor, value, 0, i * conv.out[0], (i + 1) * conv.out[0])
        for i in (0, 1)
    ]
    kept_sizes = [1 if axis in axes else size for axis, size in enumerate(conv.out[2:])]
    value = call(
        graph, aten.reshape.default, choose(graph, *halves), [conv.out[0], conv.out[1], *kept_sizes]
    )
    if conv.bias is not None:
        # The bias is added at each position of the output.
        times = math.prod(conv.out[axis + 2] for axis in axes) if kind == "sum" else 1
        bias = call(graph, aten.mul.Tensor, conv.bias, times) if times > 1 else conv.bias
        value = call(
            graph,
            aten.add.Tensor,
            value,
            call(graph, aten.view.default, bias, [1, -1] + [1] * conv.rank),
        )
    return emit_reduction(graph, kind, value, [dim for dim in dims if dim < 2], keepdim=True)


def _fold_taps(graph: fx.Graph, value: fx.Node, order: Sequence[int], taps: int) -> fx.Node:
    """Permute to `order`, then merge dim 1 and the `taps` dims after it: (A, B * taps, rest)."""
    moved = (
        value
        if list(order) == sorted(order)
        else call(graph, aten.permute.default, value, list(order))
    )
    sizes = shape(moved)
    return call(
        graph,
        aten.reshape.default,
        moved,
        [sizes[0], math.prod(sizes[1 : 2 + taps]), *sizes[2 + taps :]],
    )


def _emit_remaining_product(
    graph: fx.Graph, conv: _Conv, x: fx.Node, weight: fx.Node, rest: Sequence[int]
) -> fx.Node:
    """x (2N, CT, rest...) with weight (O, CT, rest...): an mm, or a convolution over the dims that
    are left.
    """
    # No position is left, so a matrix product does.
    if not rest:
        return call(graph, aten.mm.default, x, call(graph, aten.t.default, weight))
    if conv.transposed:
        weight = call(graph, aten.transpose.int, weight, 0, 1)
    conv_args = [
        [values[axis] for axis in rest]
        for values in (conv.stride, conv.padding, conv.dilation, conv.output_padding)
    ]
    return call(
        graph,
        aten.convolution.default,
        x,
        weight,
        None,
        *conv_args[:3],
        conv.transposed,
        conv_args[3],
        1,
    )


def _find_tap_windows(conv: _Conv, axis: int) -> list[tuple[int, int]] | None:
    """Per tap of a transposed convolution the inputs [from, to) whose copy is kept; None if a tap
    has none. Plain ones: [].
    """
    if not conv.transposed:
        return []
    # A transposed convolution writes the input at every step-th place, and crops.
    size, step = shape(conv.x)[axis + 2], conv.stride[axis]
    windows: list[tuple[int, int]] = []
    for tap in range(conv.kernel[axis]):
        # Input p lands on p * step + offset.
        offset = tap * conv.dilation[axis] - conv.padding[axis]
        first, last = (
            max(0, -(offset // step)),
            min(size - 1, (conv.out[axis + 2] - 1 - offset) // step),
        )
        # The sum over nothing is 0, but least and greatest of nothing do not exist.
        if last < first:
            return None
        windows.append((first, last + 1))
    return windows


def _reduce_taps(
    graph: fx.Graph, conv: _Conv, axis: int, kind: Kind, parts: tuple[fx.Node, fx.Node, fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(sum or mean, least, greatest) of the inputs each tap of `axis` meets: that dim becomes one
    entry per tap.
    """
    total, low, high = parts
    if not conv.transposed:
        # At the first dim all three are the input itself, so one view serves them.
        views = {part: _view_taps(graph, conv, axis, part) for part in dict.fromkeys(parts)}
        return (
            emit_reduction(graph, kind, views[total], [-1]),
            *emit_bounds(graph, views[low], views[high], [-1]),
        )
    windows = _find_tap_windows(conv, axis) or []
    sums_by_window = {
        window: _reduce_window(graph, conv, axis, kind, parts, window)
        for window in dict.fromkeys(windows)
    }
    # Without cropping all taps meet all inputs.
    if len(sums_by_window) == 1:
        # `expand` gives every tap the same sums without a copy.
        sums = sums_by_window[windows[0]]
        wide = [
            conv.kernel[axis] if dim == axis + 2 else size
            for dim, size in enumerate(shape(sums[0]))
        ]
        only = [call(graph, aten.expand.default, part, wide) for part in sums]
        return only[0], only[1], only[2]
    all_taps = [
        call(graph, aten.cat.default, [sums_by_window[window][i] for window in windows], axis + 2)
        for i in range(3)
    ]
    return all_taps[0], all_taps[1], all_taps[2]


def _view_taps(graph: fx.Graph, conv: _Conv, axis: int, part: fx.Node) -> fx.Node:
    """A view whose dim `axis` counts taps and whose last dim runs over the positions of the output
    (padding read as zeros).
    """
    dim, out, step, taps = axis + 2, conv.out[axis + 2], conv.stride[axis], conv.kernel[axis]
    pad, span = conv.padding[axis], (out - 1) * step + 1
    if pad:
        # `constant_pad_nd` counts dims from the last.
        ends = [0, 0] * (conv.rank - 1 - axis) + [pad, pad]
        # Zeros take part in minimum and maximum too: they are summands, as in im2col.
        part = call(graph, aten.constant_pad_nd.default, part, ends, 0)
    view = call(graph, aten.unfold.default, part, dim, span, conv.dilation[axis])
    if shape(view)[dim] != taps:  # the stride leaves inputs at the end that no output meets
        view = call(graph, aten.slice.Tensor, view, dim, 0, taps)
    return (
        view
        if step == 1
        else call(graph, aten.slice.Tensor, view, len(shape(view)) - 1, 0, span, step)
    )


def _reduce_window(
    graph: fx.Graph,
    conv: _Conv,
    axis: int,
    kind: Kind,
    parts: tuple[fx.Node, fx.Node, fx.Node],
    window: tuple[int, int],
) -> tuple[fx.Node, fx.Node, fx.Node]:
    dim = axis + 2
    cut = {part: part for part in parts}
    if window != (0, shape(conv.x)[dim]):
        cut = {part: call(graph, aten.slice.Tensor, part, dim, *window) for part in cut}
    total, low, high = (cut[part] for part in parts)
    value = emit_reduction(graph, kind, total, [dim], keepdim=True)
    if kind == "mean":  # of the output, which has another number of positions than the window
        value = call(graph, aten.mul.Tensor, value, (window[1] - window[0]) / conv.out[dim])
    return value, *emit_bounds(graph, low, high, [dim], keepdim=True)


def _push_channels(gm: fx.GraphModule) -> int:
    """Sum or mean of a convolution over its output channels -> a convolution with the summed
    weight.

    conv(x, w, b).sum(1) = conv(x, w.sum(0), b.sum()), plain or transposed, with any stride, padding
    and dilation. Before: O output channels; after: 2 (the sum and the twin that keeps NaN where an
    infinite input meets weights of both signs). Flops and bytes of the output fall O / 2 times.
    Valid for groups 1, the convolution used once. Mask-exact, with the proviso of `_push_positions`
    for weights and padding.
    """
    return _push(gm, False)


def _reduce_over_channels(graph: fx.Graph, conv: _Conv, dims: Sequence[int], kind: Kind) -> fx.Node:
    axis = conv.out_axis
    total = emit_reduction(graph, kind, conv.weight, [axis], keepdim=True)
    twin = split_signs(
        graph, total, *emit_bounds(graph, conv.weight, conv.weight, [axis], keepdim=True)
    )
    # Two output channels instead of all: the sum and its twin.
    weight = call(graph, aten.cat.default, [total, twin], axis)
    value = call(
        graph,
        aten.convolution.default,
        *(conv.x, weight, None, list(conv.stride), list(conv.padding), list(conv.dilation)),
        *(conv.transposed, list(conv.output_padding), 1),
    )
    value = choose(graph, *(call(graph, aten.slice.Tensor, value, 1, i, i + 1) for i in (0, 1)))
    if conv.bias is not None:
        bias = emit_reduction(graph, kind, conv.bias, [0])
        value = call(graph, aten.add.Tensor, value, bias)
    return emit_reduction(graph, kind, value, [dim for dim in dims if dim != 1], keepdim=True)


CONV_REDUCTION_RULES: tuple[Rule, ...] = (
    Rule("reduce_before_convolution", _push_positions),
    Rule("sum_channels_of_weight", _push_channels),
)
