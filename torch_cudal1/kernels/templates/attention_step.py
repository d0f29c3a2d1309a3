"""Reads the backward of a fused attention operator: its tensors as kernels address them. Steps that
no kernel serves are refused with a reason.

Dropout, packed sequences and the gradient of a bias are refused. No kernel is made here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.ops import attention_names
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.kernels.expr.affine import row_major
from torch_cudal1.kernels.templates.attention import MAX_HEAD_ELEMENTS
from torch_cudal1.kernels.templates.attention_kernel import HALVES

__all__ = ["TARGETS", "BackwardStep", "StepTensor", "is_backward", "read_backward"]

TARGETS = attention_names.targets(attention_names.BACKWARDS)
_INT32_REACH = 2**31 - 1


@dataclass(frozen=True)
class StepTensor:
    """A tensor of the step: its value number, sizes and strides of batch, heads, rows and, but for
    one number a row, elements.
    """

    value: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tile(self, head: str, rows: str, columns: str) -> str:
        """Addresses of a matrix; `head` counts the heads of all batches, `rows` and `columns` name
        vectors.
        """
        return f"{self._head(head)} + {rows}[:, None] * {self.strides[2]} + {columns}[None, :] * {self.strides[3]}"

    def transposed_tile(self, head: str, rows: str, columns: str) -> str:
        """As `tile`, of the transposed matrix."""
        return f"{self._head(head)} + {columns}[:, None] * {self.strides[3]} + {rows}[None, :] * {self.strides[2]}"

    def row(self, head: str, rows: str) -> str:
        """Addresses of one number a row."""
        return f"{self._head(head)} + {rows} * {self.strides[2]}"

    def _head(self, head: str) -> str:
        return f"p{self.value} + {head} // {self.shape[1]} * {self.strides[0]} + {head} % {self.shape[1]} * {self.strides[1]}"

    @property
    def reach(self) -> int:
        """The largest offset of an element."""
        return sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )


@dataclass(frozen=True)
class BackwardStep:
    """The step: its operands, and those of its results that are read. `delta` is scratch. `bias` has
    an element for every score, with strides of 0 where one serves several.
    """

    grad: StepTensor
    query: StepTensor
    key: StepTensor
    value: StepTensor
    out: StepTensor
    logsumexp: StepTensor
    delta: StepTensor
    bias: StepTensor | None
    results: Mapping[str, StepTensor]
    scale: float
    causal: bool

    @property
    def queries_per_key(self) -> int:
        """Heads of queries for each of keys and values."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def offset_cast(self) -> str:
        """The text of a cast to int64 where an offset needs 64 bits, else empty."""
        return (
            ".to(tl.int64)" if max(tensor.reach for tensor in self.tensors) > _INT32_REACH else ""
        )

    @property
    def tensors(self) -> tuple[StepTensor, ...]:
        """All tensors of the step."""
        operands = (
            self.grad,
            self.query,
            self.key,
            self.value,
            self.out,
            self.logsumexp,
            self.delta,
        )
        return (*operands, *([] if self.bias is None else [self.bias]), *self.results.values())


def is_backward(program: Program) -> bool:
    """Whether a Program is the backward of a fused attention operator and nothing else."""
    return (
        len(program.steps) == 1
        and isinstance(program.steps[0], Aten)
        and program.steps[0].target in TARGETS
    )


def read_backward(program: Program) -> BackwardStep:
    """Read the step. Raises NotLowerableError with what the kernels do not serve."""
    if not is_backward(program):
        raise NotLowerableError("no backward of fused attention by itself")
    (step,) = program.steps
    assert isinstance(step, Aten)
    # The efficient operator's schema calls the gradient `grad_out_`, the others `grad_out`.
    names = [
        argument.name.removesuffix("_") for argument in overload(step.target)._schema.arguments
    ]
    bound = dict(zip(names, step.args, strict=False)) | dict(step.kwargs)
    specs = value_specs(program)
    names = [
        *("grad_out", "query", "key", "value", "out", "logsumexp"),
        *["attn_bias"] * (bound.get("attn_bias") is not None),
    ]
    tensors = {name: _read_tensor(bound[name], specs) for name in names}
    _refuse_unserved(step.target, bound, tensors)
    results = dict(zip(("query", "key", "value"), step.outs, strict=False))
    # A bias's gradient is a sum over heads or batches that no kernel here makes.
    requested = {value for value in program.outputs if value is not None}
    if not requested <= set(results.values()):
        raise NotLowerableError("a result that is no gradient of queries, keys or values")
    batch, heads, rows, depth = tensors["query"].shape
    scale = bound.get("scale")
    return BackwardStep(
        grad=tensors["grad_out"],
        query=tensors["query"],
        key=tensors["key"],
        value=tensors["value"],
        out=tensors["out"],
        logsumexp=tensors["logsumexp"],
        # Scratch takes the first value number that the Program does not use.
        delta=StepTensor(
            program.value_count,
            torch.float32,
            (batch, heads, rows),
            row_major((batch, heads, rows)),
        ),
        bias=_broadcast_bias(
            tensors.get("attn_bias"), (batch, heads, rows, tensors["key"].shape[2])
        ),
        results={
            name: _read_tensor(Value(value), specs)
            for name, value in results.items()
            if value in requested
        },
        scale=_round_to_fp32(1 / math.sqrt(depth) if scale is None else scale),
        causal=bool(bound.get("is_causal")),
    )


def _read_tensor(value: object, specs: Mapping[int, TensorSpec]) -> StepTensor:
    if not isinstance(value, Value) or value.index not in specs:
        raise NotLowerableError("an operand that is no tensor")
    spec = specs[value.index]
    return StepTensor(value.index, spec.torch_dtype, spec.shape, spec.strides)


def _broadcast_bias(bias: StepTensor | None, shape: tuple[int, ...]) -> StepTensor | None:
    """The bias expanded to the shape of the scores, with a stride of 0 in dimensions of size 1."""
    if bias is None:
        return None
    # A stride of 0 reads the one element for every place of a dimension, so that no copy is made.
    strides = tuple(
        stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.strides, strict=True)
    )
    return StepTensor(bias.value, bias.dtype, shape, strides)


def _round_to_fp32(number: float) -> float:
    """The number as eager's kernels get it."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _refuse_unserved(
    target: str, bound: Mapping[str, Any], tensors: Mapping[str, StepTensor]
) -> None:
    query, key, value = (tensors[name].shape for name in ("query", "key", "value"))
    matrices = [tensor for name, tensor in tensors.items() if name != "logsumexp"]
    total = tensors["logsumexp"]
    # The first problem that holds is the reason of the refusal.
    problems = {
        "no dropout": bool(bound.get("dropout_p")),
        # Weights are made again from the log-sum-exp: a row without keys must have a number there.
        "a bias of the efficient operators, whose log-sum-exp of a row without keys is a number": "attn_bias"
        in tensors
        and "efficient" not in target,
        "a bias for every score, or the same for all of a dimension": "attn_bias" in tensors
        and any(
            size not in (1, scores)
            for size, scores in zip(tensors["attn_bias"].shape, (*query[:3], key[2]), strict=False)
        ),
        "no packed sequences": any(
            bound.get(name) is not None for name in ("cum_seq_q", "cum_seq_k")
        ),
        "tensors of one type, fp32 or a half one": len({tensor.dtype for tensor in matrices}) > 1
        or matrices[0].dtype not in (torch.float32, *HALVES),
        "heads in a dimension of their own, of some elements": any(
            len(tensor.shape) != 4 or 0 in tensor.shape for tensor in matrices
        ),
        # The rows may be padded, as the efficient operator leaves them; cuDNN has a last dimension
        # of 1.
        "one log-sum-exp in fp32 a row": total.dtype != torch.float32
        or total.shape[:2] != query[:2]
        or math.prod(total.shape[2:]) < query[2]
        or total.shape[3:] not in ((), (1,)),
        "keys and values of as many heads, which divide the queries'": key[:3] != value[:3]
        or bool(query[1] % key[1]),
        f"heads of at most {MAX_HEAD_ELEMENTS} elements": max(query[3], value[3])
        > MAX_HEAD_ELEMENTS,
        # With other numbers of keys than of queries the operators align the mask differently.
        "a causal mask of as many queries as keys, where operators disagree about others": "efficient"
        not in target
        and bool(bound.get("is_causal"))
        and query[2] != key[2],
    }
    if unserved := [text for text, broken in problems.items() if broken]:
        raise NotLowerableError(f"kernels for gradients of attention serve {unserved[0]}")
