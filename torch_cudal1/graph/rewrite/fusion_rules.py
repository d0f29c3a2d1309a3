"""Rules that fold an operation into its neighbour: batch norm into the weights beside it, a
broadcast into the arithmetic after it.

Everything derived from parameters is computed in the graph at every call, so a weight that changes
can never leave a stale fold. Merging and re-ordering matrix products is `gemm_rules`' subject; the
tuple below names both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.gemm_rules import GEMM_RULES
from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    is_op,
    is_tensor,
    iter_calls,
    replace,
    shape,
    strides,
    uses_once,
    val,
)
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["FUSION_RULES"]

aten = torch.ops.aten
# A folded weight in a half type would be rounded once more than eager's.
_WIDE = (torch.float32, torch.float64)
# PyTorch picks one by backend; all compute the same in inference.
_NORMS = (
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
    aten._batch_norm_no_update.default,
)


@dataclass(frozen=True)
class _Norm:
    """Inference batch norm: (x - mean) / sqrt(var + eps) * weight + bias per channel. `result` is
    the normalised tensor's node.
    """

    x: fx.Node
    mean: fx.Node
    var: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    result: fx.Node


def _match_norm(node: fx.Node) -> _Norm | None:
    """`node` as an inference batch norm of one float32 or float64 dtype whose statistics outputs
    are unread.
    """
    # The operator yields statistics too, and a reader of them needs it.
    if not uses_once(node):
        return None
    bound, result = arguments(node), next(iter(node.users))
    # In training the statistics are those of the batch, which no weight can hold.
    if result.args[1:] != (0,) or bound.get("training", False):
        return None
    x, mean, var, weight, bias = (
        bound[name] for name in ("input", "running_mean", "running_var", "weight", "bias")
    )
    # Without running statistics the norm takes the batch's.
    if mean is None or var is None or dtype(x) not in _WIDE:
        return None
    if {dtype(part) for part in (mean, var, weight, bias) if part is not None} != {dtype(x)}:
        return None
    # cuDNN's and MIOpen's overloads call it epsilon.
    eps = bound["eps"] if "eps" in bound else bound["epsilon"]
    return _Norm(x, mean, var, weight, bias, eps, result) if isinstance(eps, float) else None


def _scale_and_shift(graph: fx.Graph, norm: _Norm, bias: fx.Node | None) -> tuple[fx.Node, fx.Node]:
    """a and c, both (C), with batch_norm(y + bias) = a * y + c."""
    scale = call(graph, aten.rsqrt.default, call(graph, aten.add.Scalar, norm.var, norm.eps))
    if norm.weight is not None:
        scale = call(graph, aten.mul.Tensor, scale, norm.weight)
    # The bias goes into the mean: a * (y + b - mean).
    centre = norm.mean if bias is None else call(graph, aten.sub.Tensor, norm.mean, bias)
    shift = call(graph, aten.neg.default, call(graph, aten.mul.Tensor, centre, scale))
    return scale, shift if norm.bias is None else call(graph, aten.add.Tensor, shift, norm.bias)


def _view_along_axis(graph: fx.Graph, vector: fx.Node, axis: int, rank: int) -> fx.Node:
    return call(graph, aten.view.default, vector, [-1 if dim == axis else 1 for dim in range(rank)])


def _conv_then_norm(gm: fx.GraphModule) -> int:
    """batch_norm(conv(x, w, b)) -> conv(x, w * a, (b - mean) * a + beta), a = gamma / sqrt(var +
    eps) per output channel.

    Before: a pass over the output (read and write N O P elements); after: a pass over the weight.
    Valid for inference statistics, the convolution used once; plain with any groups, transposed
    with groups 1. Only for finite parameters: with an infinite gamma eager gives infinities of both
    signs, the folded weight gives NaN. Infinite and NaN activations come out alike.
    """
    sites = 0
    for node in iter_calls(gm, *_NORMS):
        norm = _match_norm(node)
        if norm is None or not is_op(norm.x, aten.convolution.default) or not uses_once(norm.x):
            continue
        bound = arguments(norm.x)
        x, weight, bias = bound["input"], bound["weight"], bound["bias"]
        transposed, groups = bound["transposed"], bound["groups"]
        if (
            # There the output channels are not one dim of the weight.
            (transposed and groups != 1)
            or {dtype(x), dtype(weight)} != {dtype(norm.x)}
            or 0 in shape(norm.x)
        ):
            continue
        if bias is not None and dtype(bias) != dtype(weight):
            continue
        with gm.graph.inserting_before(node):
            scale, shift = _scale_and_shift(gm.graph, norm, bias)
            # A transposed convolution keeps its output channels in dim 1 of the weight.
            wide = _view_along_axis(gm.graph, scale, 1 if transposed else 0, len(shape(weight)))
            folded = call(gm.graph, aten.mul.Tensor, weight, wide)
            new = call(gm.graph, aten.convolution.default, x, folded, shift, *norm.x.args[3:])
        replace(norm.result, new)
        sites += 1
    return sites


def _linear_then_norm(gm: fx.GraphModule) -> int:
    """batch_norm(x @ w + b) -> x @ (w * a) + ((b - mean) * a + beta), for `addmm` and `mm` followed
    by a batch norm of (N, C).

    Before: a pass over the output (read and write M N elements); after: a pass over the weight (K
    N), so only where M >= K / 2. Valid for inference statistics, alpha and beta 1, a bias vector,
    the product used once. Only for finite parameters, as above.
    """
    sites = 0
    for node in iter_calls(gm, *_NORMS):
        norm = _match_norm(node)
        if (
            norm is None
            or not is_op(norm.x, aten.addmm.default, aten.mm.default)
            or not uses_once(norm.x)
        ):
            continue
        bound = arguments(norm.x)
        lhs, rhs = bound.get("mat1", bound["self"]), bound["mat2"]
        bias = bound["self"] if "mat1" in bound else None
        if (
            bound.get("alpha", 1) != 1
            or bound.get("beta", 1) != 1
            or (bias is not None and shape(bias) != shape(norm.mean))
        ):
            continue
        if {dtype(part) for part in (lhs, rhs, bias) if part is not None} != {dtype(norm.x)}:
            continue
        # With few rows the pass over the weight costs more than that over the result.
        if 2 * shape(lhs)[0] < shape(lhs)[1]:
            continue
        with gm.graph.inserting_before(node):
            scale, shift = _scale_and_shift(gm.graph, norm, bias)
            folded = call(gm.graph, aten.mul.Tensor, rhs, scale)
            new = call(gm.graph, aten.addmm.default, shift, lhs, folded)
        replace(norm.result, new)
        sites += 1
    return sites


def _norm_then_conv(gm: fx.GraphModule) -> int:
    """conv(batch_norm(x), w, b) -> conv(x, w * a, b + sum over c, t of w * c_shift), a and c_shift
    per input channel.

    Before: a pass over the input of the convolution (read and write N C H W); after: two passes
    over the weight. Valid for inference statistics, the batch norm used once, groups 1, not
    transposed, and no padding: zeros are padded in after the norm, so with padding the edges would
    differ. Only for finite parameters, as above.
    """
    sites = 0
    for node in iter_calls(gm, *_NORMS):
        norm = _match_norm(node)
        if norm is None or not uses_once(norm.result):
            continue
        conv = next(iter(norm.result.users))
        if (
            not is_op(conv, aten.convolution.default)
            # The norm's result may also be the weight.
            or conv.args[0] is not norm.result
            or conv.args[1] is norm.result
        ):
            continue
        bound = arguments(conv)
        weight, bias = bound["weight"], bound["bias"]
        # Zeros are padded in after the norm: folded, they would count as shifted inputs.
        if bound["groups"] != 1 or bound["transposed"] or any(bound["padding"]):
            continue
        if {dtype(part) for part in (norm.x, weight, bias) if part is not None} != {dtype(conv)}:
            continue
        with gm.graph.inserting_before(conv):
            scale, shift = _scale_and_shift(gm.graph, norm, None)
            rank = len(shape(weight))
            folded = call(
                gm.graph, aten.mul.Tensor, weight, _view_along_axis(gm.graph, scale, 1, rank)
            )
            moved = call(
                gm.graph, aten.mul.Tensor, weight, _view_along_axis(gm.graph, shift, 1, rank)
            )
            offset = call(gm.graph, aten.sum.dim_IntList, moved, list(range(1, rank)))
            if bias is not None:
                offset = call(gm.graph, aten.add.Tensor, offset, bias)
            new = call(gm.graph, aten.convolution.default, norm.x, folded, offset, *conv.args[3:])
        replace(conv, new)
        sites += 1
    return sites


def _broadcast_source(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A view that holds what the copy `node` holds, built at the insertion point, if `node` copies
    elements several times.
    """
    source = node.args[0]
    if not is_tensor(source) or 0 in shape(node):
        return None
    if is_op(node, aten.clone.default):
        return (
            source
            # Stride 0 in a dim of more than one element: the same element is read several times.
            if 0 in (s for s, n in zip(strides(source), shape(source), strict=True) if n > 1)
            else None
        )
    times = node.args[1]
    lead = len(shape(node)) - len(shape(source))
    old = (1,) * lead + shape(source)
    if (
        not isinstance(times, (list, tuple))
        or old == shape(node)
        # `repeat` of a dim with several elements is no expand.
        or any(t > 1 and n > 1 for t, n in zip(times, old, strict=True))
    ):
        return None
    return call(graph, aten.expand.default, source, list(shape(node)))


def _copy_of_broadcast(gm: fx.GraphModule) -> int:
    """mul(clone(expand(a)), b) -> mul(expand(a), b); the same for `repeat` along dims of size 1,
    and any elementwise user.

    Before: the broadcast tensor is written and read again (2 numel elements); after: only `a` is
    read. Exact. Valid for the users that are elementwise and keep their strides; other users
    (products, views, the output) keep the copy.
    """
    sites = 0
    for node in iter_calls(gm, aten.clone.default, aten.repeat.default):
        with gm.graph.inserting_before(node):
            source = _broadcast_source(gm.graph, node)
        if source is None:
            continue
        # Each user by itself: those that need the copy keep it.
        users = [user for user in node.users if _takes_broadcast(user, node, source)]
        for user in users:
            user.replace_input_with(node, source)
        # The view was built to ask its shape; without a user it goes again.
        if not source.users:
            gm.graph.erase_node(source)
        sites += bool(users)
    return sites


def _takes_broadcast(user: fx.Node, copy: fx.Node, source: fx.Node) -> bool:
    target = user.target
    if (
        not isinstance(target, torch._ops.OpOverload)
        or torch.Tag.pointwise not in target.tags
        or target._schema.is_mutable
    ):
        return False
    if not is_tensor(user):
        return False
    source_value = val(source)
    args, kwargs = fx.map_arg(
        (user.args, user.kwargs), lambda item: source_value if item is copy else item.meta["val"]
    )
    mode = (
        source_value.fake_mode if isinstance(source_value, torch._subclasses.FakeTensor) else None
    )
    if mode is None:
        return False
    with mode, torch.no_grad():
        # Element-wise results take their strides from the operands.
        return tuple(target(*args, **kwargs).stride()) == strides(user)


FUSION_RULES: tuple[Rule, ...] = (
    Rule("conv_batchnorm_fold", _conv_then_norm, finite_only=True),
    Rule("linear_batchnorm_fold", _linear_then_norm, finite_only=True),
    Rule("batchnorm_conv_fold", _norm_then_conv, finite_only=True),
    Rule("broadcast_without_copy", _copy_of_broadcast),
    *GEMM_RULES,
)
