"""Products of groups of rows with a matrix each, as mixtures of experts have them, in every dtype:
`cudal1::grouped_mm`.

PyTorch's own `aten::_grouped_mm` has a result on fake tensors for bfloat16 only, so no other dtype
can be traced through it. For those transformers calls an operator of its own under Dynamo, which no
Program may name. `replace_library_operators` puts this one in its place: the same products,
computed by PyTorch's kernel as transformers' eager does, and with gradients.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["TARGETS", "operator_of", "replace_library_operators"]

TARGETS = frozenset({"cudal1.grouped_mm.default"})
_NAME = "cudal1::grouped_mm"
_LIBRARY_OPERATORS = frozenset(
    {"transformers.grouped_mm_fallback", "transformers.grouped_mm_fallback.default"}
)
# Of the operators in `_LIBRARY_OPERATORS`, which may be called by keyword.
_ARGUMENTS = {"input": 0, "weight": 1, "offs": 2}


def operator_of(target: str) -> torch._ops.OpOverload:
    """The operator called `target`, one of `TARGETS`:
    `grouped_mm(Tensor self, Tensor mat2, Tensor offs) -> Tensor`.

    `offs` (groups,) int32 says where groups end. (rows, terms) x (groups, terms, columns) gives
    (rows, columns), groups of rows; (rows, terms) x (terms, columns) gives (groups, rows, columns),
    groups of terms. Rows behind the last group are 0.
    """
    _define()
    operator: torch._ops.OpOverload = torch.ops.cudal1.grouped_mm.default
    return operator


def replace_library_operators(graph: fx.Graph) -> None:
    """Let a Dynamo graph call this operator where it calls another library's operator for the same
    products.
    """
    for node in graph.nodes:
        if node.op != "call_function" or str(node.target) not in _LIBRARY_OPERATORS:
            continue
        operands = dict(enumerate(node.args)) | {
            _ARGUMENTS[name]: value for name, value in node.kwargs.items()
        }
        node.target, node.args, node.kwargs = (
            operator_of(next(iter(TARGETS))),
            tuple(operands[i] for i in range(3)),
            {},
        )


def _products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    try:
        product: Tensor = torch.ops.aten._grouped_mm.default(rows, matrices, ends)
        # The fake implementation promises a contiguous result, whatever strides the kernel gives.
        return product.contiguous()
    # Strides that are no multiple of 16 bytes, float64, or a GPU for which it has no kernel.
    except RuntimeError:
        return _multiply_groups(rows, matrices, ends)


def _multiply_groups(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    # Zeros: rows behind the last group belong to no product.
    out = rows.new_zeros(_shape(rows, matrices, ends))
    for number, (begin, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if matrices.dim() == 2:
            torch.mm(rows[:, begin:end], matrices[begin:end], out=out[number])
        elif begin < end:
            torch.mm(rows[begin:end], matrices[number], out=out[begin:end])
    return out


def _shape(rows: Tensor, matrices: Tensor, ends: Tensor) -> tuple[int, ...]:
    """Raises ValueError for operands that do not fit."""
    fits = rows.dim() == 2 and matrices.dim() in (2, 3) and rows.shape[1] == matrices.shape[-2]
    if not fits or (matrices.dim() == 3 and matrices.shape[0] != ends.shape[0]):
        shapes = f"{tuple(rows.shape)}, {tuple(matrices.shape)} and {tuple(ends.shape)}"
        raise ValueError(
            f"grouped_mm: expected (rows, terms), ([groups,] terms, columns) and (groups,); came {shapes}"
        )
    return (
        (rows.shape[0], matrices.shape[2])
        if matrices.dim() == 3
        else (ends.shape[0], rows.shape[0], matrices.shape[1])
    )


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    # `_backward` uses the form with two matrices itself; its own gradient is not written.
    if inputs[1].dim() != 3:
        raise NotImplementedError(
            "gradients of a gradient of grouped products; expected (rows, terms) x (groups, terms, columns)"
        )
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, matrices, ends = ctx.saved_tensors
    products = operator_of(next(iter(TARGETS)))
    return (
        products(gradient, matrices.transpose(-2, -1), ends),
        products(rows.t(), gradient, ends),
        None,
    )


@cache
def _define() -> torch.library.Library:
    # FRAGMENT: other modules define operators in the same namespace.
    library = torch.library.Library("cudal1", "FRAGMENT")
    library.define(
        "grouped_mm(Tensor self, Tensor mat2, Tensor offs) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    for key in ("CPU", "CUDA"):
        library.impl("grouped_mm", _products, key)
    torch.library.register_fake(
        _NAME, lambda left, right, ends: left.new_empty(_shape(left, right, ends)), lib=library
    )
    torch.library.register_autograd(_NAME, _backward, setup_context=_keep, lib=library)
    return library
