"""The interpreted process of `test_attention_backward`:
`python -m tests.kernels.compare_attention_backward`, TRITON_INTERPRET=1; prints one JSON.

As `compare_attention`: addresses, masks and formulas are seen here; how exact products in pieces
are, a GPU tells.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.compare import errors
from tests.kernels.compare_attention import (
    BF16,
    HALF,
    INF,
    NAN,
    _draw_bias_with_hidden_keys,
    align_rows,
    repeat_heads,
)
from tests.kernels.compare_products import normal
from tests.kernels.traced_programs import interpret
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.kernels import propose

RESULTS = ("query", "key", "value")


@dataclass(frozen=True)
class BackwardCase:
    """A backward of fused attention: what the forward got, and which gradients are read."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool = False
    scale: float | None = None
    operator: str = "efficient"
    wanted: tuple[str, ...] = RESULTS
    bias: Tensor | None = None
    grad_of_rows: bool = (
        False  # the gradient of a sum over elements: each row's is one number in memory
    )

    def inputs(self) -> tuple[Tensor, ...]:
        """grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, a bias: as the
        operators get them.
        """
        out, total = self.forward(torch.float32)
        grad = (
            normal(*out.shape[:-1], 1).expand(out.shape)
            if self.grad_of_rows
            else normal(*out.shape)
        )
        kind = self.query.dtype
        grad = grad if self.grad_of_rows else grad.to(kind)
        rows = out.shape[2]
        if self.operator == "efficient":
            total = torch.nn.functional.pad(total, (0, -rows % 32), value=INF)
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        total = total.unsqueeze(-1) if self.operator == "cudnn" else total
        seeds = (torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64))
        biases = () if self.bias is None else (self.bias,)
        return grad, self.query, self.key, self.value, out.to(kind), total, *seeds, *biases

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Result and log-sum-exp of each row."""
        query, key, value = (tensor.to(dtype) for tensor in (self.query, self.key, self.value))
        scores = self._scores(query, key)
        weights, total = torch.ops.aten._safe_softmax(scores, -1), scores.logsumexp(-1)
        return weights @ repeat_heads(value, query.shape[1]), total.masked_fill(
            total == -INF, 0.0
        ) if self.bias is not None else total

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        scores = query @ repeat_heads(key, query.shape[1]).transpose(-1, -2) * scale
        scores = scores if self.bias is None else scores + self.bias.to(scores.dtype)
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~allowed, -INF) if self.causal else scores

    def program(self) -> Program:
        """Its Program, on a GPU."""
        specs = tuple(replace(TensorSpec.of(tensor), device="cuda") for tensor in self.inputs())
        v = [Value(index) for index in range(len(specs))]
        kwargs = () if self.scale is None else (("scale", self.scale),)
        rows, columns = self.query.shape[2], self.key.shape[2]
        args: tuple[Any, ...] = (
            *v[:4],
            None if self.bias is None else v[8],
            *v[4:8],
            0.0,
            (True, True, True, False),
            self.causal,
        )
        if self.operator == "flash":
            args = (*v[:6], None, None, rows, columns, 0.0, self.causal, *v[6:])
        elif self.operator == "cudnn":
            args = (*v[:8], None, None, None, rows, columns, 0.0, self.causal)
        outs = tuple(range(len(specs), len(specs) + (4 if self.operator == "efficient" else 3)))
        step = Aten(
            f"aten._scaled_dot_product_{self.operator}_attention_backward.default",
            args,
            kwargs,
            outs,
            True,
        )
        return Program(specs, (step,), tuple(outs[RESULTS.index(name)] for name in self.wanted))

    def compute_gradients(self, dtype: torch.dtype) -> list[Tensor]:
        """The gradients that are read, by the operators' formula from the result and log-sum-exp
        that are given.

        In fp32 as eager's kernels have it: weights and slopes are rounded to the type of what they
        are multiplied with.
        """
        grad, query, key, value, out, total = (tensor.to(dtype) for tensor in self.inputs()[:6])
        heads, key_heads = query.shape[1], key.shape[1]
        total = total.reshape(*total.shape[:2], -1)[..., : query.shape[2]]
        allowed = self._scores(torch.zeros_like(query), torch.zeros_like(key)) > -INF
        weights = torch.where(allowed, (self._scores(query, key) - total[..., None]).exp(), 0.0)
        back = grad @ repeat_heads(value, heads).transpose(-1, -2) - (grad * out).sum(
            -1, keepdim=True
        )
        slopes = torch.where(allowed, weights * back, 0.0)
        if dtype is torch.float32:
            weights, slopes = (tensor.to(self.query.dtype).float() for tensor in (weights, slopes))
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        gradients = {
            "query": slopes @ repeat_heads(key, heads) * scale,
            "key": (slopes.transpose(-1, -2) @ query * scale).unflatten(1, (key_heads, -1)).sum(2),
            "value": (weights.transpose(-1, -2) @ grad).unflatten(1, (key_heads, -1)).sum(2),
        }
        return [gradients[name] for name in self.wanted]


def _draw_three(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    stacked = normal(3, *shape).to(dtype)
    return stacked[0].clone(), stacked[1].clone(), stacked[2].clone()


def _cross(rows: int, columns: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(1, 2, rows, size), normal(1, 2, columns, size), normal(1, 2, columns, size) * 2


def _draw_grouped(
    heads: int, key_heads: int, length: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    return tuple(
        normal(2, count, length, size).to(dtype) for count in (heads, key_heads, key_heads)
    )


def _inside_rows(batch: int, length: int, heads: int, size: int) -> tuple[Tensor, ...]:
    """Three parts of one projection, turned to heads before rows: what models give."""
    return tuple(
        part.unflatten(-1, (heads, size)).transpose(1, 2)
        for part in normal(batch, length, 3 * heads * size).chunk(3, -1)
    )


def _draw_with_special(name: str, value: float) -> tuple[Tensor, ...]:
    """With one special number in a tensor."""
    tensors = dict(zip(RESULTS, _draw_three(1, 2, 70, 16), strict=True))
    tensors[name][0, 1, 20, 3] = value
    return tuple(tensors.values())


CASES: dict[str, BackwardCase] = {
    "ragged": BackwardCase(*_draw_three(2, 3, 70, 32)),
    "exact tiles": BackwardCase(*_draw_three(1, 2, 128, 64)),
    "heads of 40": BackwardCase(*_draw_three(1, 2, 70, 40)),
    "heads of 128": BackwardCase(*_draw_three(1, 1, 70, 128)),
    "causal": BackwardCase(*_draw_three(1, 2, 150, 32), causal=True),
    "causal, exact tiles": BackwardCase(*_draw_three(1, 2, 128, 128), causal=True),
    "causal, more queries than keys": BackwardCase(*_cross(150, 70, 16), causal=True),
    "causal, fewer queries than keys": BackwardCase(*_cross(40, 130, 16), causal=True),
    "keys of another length": BackwardCase(*_cross(40, 90, 16)),
    "values of another size": BackwardCase(
        normal(1, 2, 40, 16), normal(1, 2, 90, 16), normal(1, 2, 90, 48)
    ),
    "own scale": BackwardCase(*_draw_three(1, 2, 33, 16), scale=0.3),
    "heads inside rows": BackwardCase(*_inside_rows(2, 70, 3, 32), causal=True),  # type: ignore[arg-type]
    "a gradient that is one number a row": BackwardCase(
        *_draw_three(1, 2, 70, 32), grad_of_rows=True
    ),
    "queries' only": BackwardCase(*_draw_three(1, 2, 70, 32), wanted=("query",)),
    "values' only": BackwardCase(*_draw_three(1, 2, 70, 32), wanted=("value",)),
    "keys' and queries'": BackwardCase(*_draw_three(1, 2, 70, 32), wanted=("key", "query")),
    "NaN in a query": BackwardCase(*_draw_with_special("query", NAN)),  # type: ignore[arg-type]
    "NaN in a key": BackwardCase(*_draw_with_special("key", NAN)),  # type: ignore[arg-type]
    "infinity in a value": BackwardCase(*_draw_with_special("value", INF)),  # type: ignore[arg-type]
    "bias": BackwardCase(*_draw_three(2, 3, 70, 32), bias=align_rows(normal(2, 3, 70, 70))),
    "bias, a key for nobody and a query without keys": BackwardCase(
        *_draw_three(2, 2, 70, 32), bias=_draw_bias_with_hidden_keys(2, 70).expand(2, 2, 70, 70)
    ),
    "bias, one for all heads, keys of another length": BackwardCase(
        *_cross(40, 90, 16), bias=align_rows(normal(1, 1, 40, 90)).expand(1, 2, 40, 90)
    ),
    "bias, fp16": BackwardCase(
        *_draw_three(1, 2, 90, 32, dtype=HALF),
        bias=_draw_bias_with_hidden_keys(1, 90, HALF).expand(1, 2, 90, 90),
    ),
    "flash, fp16": BackwardCase(*_draw_three(1, 2, 70, 64, dtype=HALF), operator="flash"),
    "flash, bf16, causal, heads of 128": BackwardCase(
        *_draw_three(1, 2, 150, 128, dtype=BF16), operator="flash", causal=True
    ),
    "flash, fp16, shared keys, causal": BackwardCase(
        *_draw_grouped(6, 2, 70, 24, HALF), operator="flash", causal=True
    ),  # type: ignore[arg-type]
    "cudnn, bf16": BackwardCase(*_draw_three(1, 2, 90, 32, dtype=BF16), operator="cudnn"),
    "efficient, fp16": BackwardCase(*_draw_three(1, 2, 90, 32, dtype=HALF)),
}


def _facts(case: BackwardCase) -> list[dict[str, Any]]:
    program, inputs = case.program(), case.inputs()
    eager, exact = case.compute_gradients(torch.float32), case.compute_gradients(torch.float64)
    facts = []
    first, *_, last = propose(program, 90)
    for proposal in (first, last):
        outputs = interpret(
            program,
            proposal,
            inputs,
            lambda text: re.sub(r', input_precision="\w+"', ', input_precision="ieee"', text),
        )
        for name, output, eager_output, exact_output in zip(
            case.wanted, outputs, eager, exact, strict=True
        ):
            assert output is not None
            facts.append(
                {
                    "config": dict(proposal.config),
                    "of": name,
                    **errors(output, _like(eager_output, output), exact_output),
                }
            )
    return facts


def _like(tensor: Tensor, got: Tensor) -> Tensor:
    """As the operator would yield it: its own type, and the strides that its meta kernel tells."""
    return torch.empty_strided(got.shape, got.stride(), dtype=got.dtype).copy_(tensor)


def main(names: Sequence[str]) -> None:
    """Compare the named cases and print the facts."""
    warnings.simplefilter("ignore")
    print(json.dumps({name: _facts(CASES[name]) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
