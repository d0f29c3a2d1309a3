"""The operators that any candidate's Program may call, whatever its reference calls.

ATen's "core" and "pointwise" tags cover most of what a rewrite may say; the usual names beside them
are listed here. Operators that draw, write to their arguments or read a number on the host are not.
"""

from __future__ import annotations

import torch

from torch_cudal1.ir.aten import overload

__all__ = ["is_allowed"]

_ALSO_ALLOWED = frozenset(
    f"aten.{name}"
    for name in (
        "addbmm.default",
        "addmv.default",
        "addr.default",
        "baddbmm.default",
        "dot.default",
        "linear.default",
        "matmul.default",
        "mv.default",
        "outer.default",
        "vdot.default",
        "einsum.default",
        "chain_matmul.default",
        "addmm.dtype",
        "mm.dtype",
        "bmm.dtype",
        "baddbmm.dtype",
        "conv1d.default",
        "conv2d.default",
        "conv3d.default",
        "batch_norm.default",
        "layer_norm.default",
        "group_norm.default",
        "instance_norm.default",
        "rms_norm.default",
        "softmax.int",
        "log_softmax.int",
        "_safe_softmax.default",
        "glu.default",
        "hardswish.default",
        "prelu.default",
        "logsumexp.default",
        "scaled_dot_product_attention.default",
        "max_pool1d.default",
        "adaptive_max_pool2d.default",
        "max_pool2d.default",
        "max_pool3d.default",
        "native_batch_norm.default",
        "cudnn_batch_norm.default",
        "_unsafe_view.default",
        "reshape.default",
        "_reshape_alias.default",
        "contiguous.default",
        "chunk.default",
        "detach.default",
        "diag.default",
        "diag_embed.default",
        "diagonal_copy.default",
        "expand_as.default",
        "expand_copy.default",
        "flatten.using_ints",
        "unflatten.int",
        "movedim.int",
        "mT.default",
        "narrow.default",
        "numpy_T.default",
        "permute_copy.default",
        "select_backward.default",
        "slice_backward.default",
        "split.Tensor",
        "split.sizes",
        "squeeze.default",
        "stack.default",
        "hstack.default",
        "vstack.default",
        "swapaxes.default",
        "t.default",
        "t_copy.default",
        "transpose.int",
        "transpose_copy.int",
        "tile.default",
        "unbind.int",
        "unfold.default",
        "unfold_copy.default",
        "unsafe_split.Tensor",
        "view.dtype",
        "view_as.default",
        "roll.default",
        "repeat_interleave.self_int",
        "block_diag.default",
        "im2col.default",
        "lift_fresh_copy.default",
        "arange.default",
        "arange.start",
        "eye.default",
        "eye.m",
        "linspace.default",
        "new_full.default",
        "new_ones.default",
        "new_zeros.default",
        "ones.default",
        "ones_like.default",
        "zeros.default",
        "zeros_like.default",
        "tril.default",
        "triu.default",
        "tril_indices.default",
        "triu_indices.default",
        "all.default",
        "all.dim",
        "count_nonzero.default",
        "cummax.default",
        "cummin.default",
        "cumprod.default",
        "logcumsumexp.default",
        "max.default",
        "median.dim",
        "min.default",
        "aminmax.default",
        "kthvalue.default",
        "linalg_vector_norm.default",
        "norm.Scalar",
        "norm.ScalarOpt_dim",
        "std.correction",
        "std_mean.correction",
        "sum.default",
        "trace.default",
        "var_mean.correction",
        "bincount.default",
        "bucketize.Tensor",
        "searchsorted.Tensor",
        "index_add.default",
        "index_copy.default",
        "masked_fill.Tensor",
        "one_hot.default",
        "sort.stable",
        "take.default",
        "nll_loss_forward.default",
        "to.dtype",
        "where.ScalarOther",
        "type_as.default",
        "rsub.Tensor",
        "pixel_shuffle.default",
        "pixel_unshuffle.default",
    )
)
# Functional by their schema and still not for a candidate: memory nobody wrote (Alloc says that
# openly), reads by the host.
_NEVER = (
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "_local_scalar_dense",
    "item",
)
_VIEW_PRIMS = ("prims.convert_element_type.default", "prims.broadcast_in_dim.default")


def is_allowed(target: str) -> bool:
    """Whether any candidate may call this operator, whatever its reference calls."""
    if target in _ALSO_ALLOWED or target in _VIEW_PRIMS:
        return True
    namespace, name, _ = target.split(".")
    # A tag holds for all overloads of an operator, and so does the ban.
    tags = overload(target).tags
    return (
        namespace == "aten"
        and name not in _NEVER
        and (torch.Tag.core in tags or torch.Tag.pointwise in tags)
    )
