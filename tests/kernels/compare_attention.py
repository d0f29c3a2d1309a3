"""The interpreted process of `test_attention`: `python -m tests.kernels.compare_attention`, TRITON_INTERPRET=1; prints one JSON.

As `compare_products`: the interpreter shows addresses, masks and the online softmax; how exact products in pieces are, a GPU tells.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.compare import errors
from tests.kernels.compare_products import normal
from tests.kernels.islands import Step, interpret, island
from torch_cudal1.kernels import propose
from torch_cudal1.program.model import Program, Value

INF, NAN = float("inf"), float("nan")
Case = tuple[Callable[..., Any], tuple[Tensor, ...]]


def _fused(*, causal: bool = False, scale: float | None = None) -> Step:
    """PyTorch's fused operator for fp32 on CUDA; its result has heads inside rows, as has what the reference gives here."""

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return made.transpose(1, 2).contiguous().transpose(1, 2)

    args = (Value(0), Value(1), Value(2), None, False, 0.0, causal)
    return Step("aten._scaled_dot_product_efficient_attention.default", args, 4, reference, (("scale", scale),) if scale else ())


def _shared(*, causal: bool = False) -> Step:
    """The operator for half types on CUDA, whose keys and values may have fewer heads than the queries."""

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).contiguous()

    return Step("aten._scaled_dot_product_flash_attention.default", (Value(0), Value(1), Value(2), 0.0, causal), 9, reference)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values repeated for the heads of the queries, as Llama does, and attention written out."""

    def heads(x: Tensor) -> Tensor:
        batch, own, length, size = x.shape
        return x[:, :, None].expand(batch, own, q.shape[1] // own, length, size).reshape(batch, q.shape[1], length, size)

    return torch.softmax(q @ heads(k).transpose(2, 3) * 0.2, -1) @ heads(v)


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Causal attention of two heads as minGPT writes it."""
    b, t, c = q.shape
    q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in (q, k, v))
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    weights = F.softmax(scores.masked_fill(mask[:, :, :t, :t] == 0, -INF), dim=-1)
    return (weights @ v).transpose(1, 2).contiguous().view(b, t, c)


def with_relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that are no softmax."""
    return torch.bmm(F.relu(torch.bmm(q, k.transpose(1, 2)) * 0.1), v)


def _three(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    whole = normal(3, *shape)
    return whole[0].clone(), whole[1].clone(), whole[2].clone()


def _grouped(batch: int, heads: int, own: int, length: int, size: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, ...]:
    shapes = ((batch, heads, length, size), (batch, own, length, size), (batch, own, length, size))
    return tuple(normal(*shape).to(dtype) for shape in shapes)


def _marked() -> tuple[Tensor, ...]:
    q, k, v = _three(1, 2, 70, 16)
    q[0, 0, 3, 2], k[0, 1, 5, 1], v[0, 0, 9, 4] = NAN, INF, NAN
    return q, k, v


CASES: dict[str, Case] = {
    "ragged": (_fused(), _three(2, 3, 70, 24)),
    "exact tiles": (_fused(), _three(1, 2, 128, 32)),
    "causal": (_fused(causal=True), _three(1, 2, 130, 32)),
    "own scale": (_fused(scale=0.3), _three(1, 2, 33, 16)),
    "keys of another length": (_fused(), (normal(1, 2, 40, 16), normal(1, 2, 90, 16), normal(1, 2, 90, 16) * 2)),
    "heads inside rows": (_fused(), tuple(part.transpose(1, 2) for part in _three(2, 70, 3, 16))),  # type: ignore[dict-item]
    "NaN and infinity": (_fused(), _marked()),
    "written out, causal": (written_out, (*_three(2, 70, 32), torch.tril(torch.ones(1, 1, 128, 128)))),
    "four heads of queries for one of keys": (_shared(), _grouped(2, 8, 2, 70, 40)),
    "two, causal": (_shared(causal=True), _grouped(2, 4, 2, 130, 24)),
    "one head of keys": (_shared(), _grouped(1, 3, 1, 33, 16)),
    "keys that are repeated": (repeated, _grouped(2, 6, 3, 70, 24, dtype=torch.float32)),
    "relu": (with_relu, _three(3, 70, 20)),
    "epilogue": (lambda q, k, v, r: with_relu(q, k, v) * 0.5 + r, (*_three(3, 70, 20), normal(3, 70, 20))),
}


def program_of(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Program:
    """The island of a case."""
    return function.program(inputs, "cuda") if isinstance(function, Step) else island(function, inputs)


def main() -> None:
    """Compare all cases and print the facts."""
    warnings.simplefilter("ignore")
    facts: dict[str, list[dict[str, Any]]] = {}
    for name, (function, inputs) in CASES.items():
        eager, exact, program = function(*inputs), function(*(t.double() for t in inputs)), program_of(function, inputs)
        facts[name] = []
        for proposal in propose(program, 90)[::3]:
            (got,) = interpret(
                program, proposal, inputs, lambda text: re.sub(r', input_precision="\w+"', ', input_precision="ieee"', text)
            )
            assert got is not None
            facts[name].append({"config": dict(proposal.config), **errors(got, eager, exact)})
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
