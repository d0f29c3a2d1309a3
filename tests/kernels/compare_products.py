"""The interpreted process of `test_gemm`: `python -m tests.kernels.compare_products` with
TRITON_INTERPRET=1; prints one JSON.

As `compare`, for products of every layout, with tiles smaller than the matrices. Triton's
interpreter computes tf32x3 as plain fp32 and no bf16x6, which is asked as tf32x3 here: it shows
addresses, masks, splits, epilogues, not their accuracy.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.compare import errors
from tests.kernels.traced_programs import interpret, trace_program
from torch_cudal1.kernels import Proposal, propose
from torch_cudal1.kernels.templates.gemm_tiles import GemmSchedule

Function = Callable[..., Any]
TILES = (
    GemmSchedule("tf32x3", 16, 32, 16, 4, 2, 2),
    GemmSchedule("bf16x6", 32, 16, 32, 4, 2, 8),
    GemmSchedule("tf32x3", 64, 64, 64, 4, 2, 1, 3),
    GemmSchedule("tf32", 32, 32, 32, 4, 2, 4, 2),
)
HALF = (GemmSchedule("half", 32, 32, 32, 4, 2, 8), GemmSchedule("half", 16, 64, 16, 4, 2, 2, 2))


def normal(*shape: int) -> Tensor:
    """Standard normal, the same at every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def special(*shape: int) -> Tensor:
    """Normal with a NaN and infinities of both signs."""
    matrix = normal(*shape)
    matrix[1, 2], matrix[3, 1], matrix[5, 3], matrix[5, 4] = (
        float("nan"),
        float("inf"),
        float("-inf"),
        float("inf"),
    )
    return matrix


def of_heads(x: Tensor, y: Tensor) -> Tensor:
    """Heads inside rows, as einsum writes out a product of each: copies before it. x: (batch,
    length, heads, k), y likewise.
    """
    batch, length, heads, k = x.shape
    first_operand = (
        x.permute(0, 2, 3, 1)
        .clone(memory_format=torch.contiguous_format)
        .view(batch * heads, k, length)
    )
    right = (
        y.permute(0, 2, 1, 3)
        .clone(memory_format=torch.contiguous_format)
        .view(batch * heads, length, y.shape[3])
    )
    return torch.bmm(first_operand, right)


def heads_put_back(x: Tensor, y: Tensor, scale: Tensor, added: Tensor) -> Tensor:
    """What follows, and a result whose heads are inside rows again. scale: (batch, heads, k),
    added: as the result.
    """
    batch, _, heads, k = x.shape
    rows = of_heads(x, y).view(batch, heads, k, -1).permute(0, 2, 1, 3)
    return (rows * scale.permute(0, 2, 1).unsqueeze(3) + added).clone(
        memory_format=torch.contiguous_format
    )


_HEADS = (normal(2, 21, 3, 37), normal(2, 21, 3, 20))
# name -> (function, inputs)
CASES: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "nn, ragged": (lambda a, b: a @ b, (normal(37, 53), normal(53, 41))),
    "nt": (lambda a, b: a @ b.t(), (normal(40, 64), normal(33, 64))),
    "tn": (lambda a, b: a.t() @ b, (normal(65, 34), normal(65, 50))),
    "tt": (lambda a, b: a.t() @ b.t(), (normal(48, 33), normal(35, 48))),
    "rows with gaps": (lambda a, b: a[:, 3:35] @ b[::2], (normal(30, 40), normal(64, 20))),
    "tn, rows masked at the edge": (lambda a, b: a.t() @ b, (normal(65, 48), normal(65, 80))),
    "exact tiles": (lambda a, b: a @ b, (normal(64, 64), normal(64, 64))),
    "bias and gelu": (
        lambda c, a, b: F.gelu(torch.addmm(c, a, b)),
        (normal(41), normal(37, 53), normal(53, 41)),
    ),
    "alpha and beta": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
        (normal(37, 1), normal(37, 20), normal(20, 41)),
    ),
    "beta 0 hides a NaN": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0),
        (torch.full((9,), float("nan")), normal(7, 20), normal(20, 9)),
    ),
    "relu, scale, residual": (
        lambda a, b, r: F.relu(a @ b) * 0.25 + r,
        (normal(37, 53), normal(53, 41), normal(37, 41)),
    ),
    "batch norm in inference": (
        lambda a, b, *vectors: F.relu(
            torch.ops.aten._native_batch_norm_legit_no_training(a @ b, *vectors, 0.1, 1e-5)[0]
        ),
        (
            normal(37, 53),
            normal(53, 41),
            *(normal(41, place).abs()[:, 0] + 0.5 for place in range(1, 5)),
        ),
    ),
    "two outputs": (
        lambda a, b: (_y := a @ b, torch.sigmoid(_y)),
        (normal(20, 30), normal(30, 40)),
    ),
    "rows cut by a view": (
        lambda c, a, b: F.silu(torch.addmm(c, a, b).view(4, 9, 41)),
        (normal(41), normal(36, 53), normal(53, 41)),
    ),
    "batch": (torch.bmm, (normal(3, 37, 20), normal(3, 20, 41))),
    "batch, transposed and scaled": (
        lambda a, b: torch.bmm(a, b.transpose(1, 2)) * 0.125,
        (normal(4, 20, 16), normal(4, 33, 16)),
    ),
    "batch sharing a matrix": (
        lambda a, b: torch.bmm(a, b.expand(3, 20, 41)),
        (normal(3, 37, 20), normal(1, 20, 41)),
    ),
    "batch with bias": (
        lambda c, a, b: torch.baddbmm(c, a, b),
        (normal(3, 1, 41), normal(3, 17, 20), normal(3, 20, 41)),
    ),
    "batch of heads inside rows": (of_heads, _HEADS),
    "batch of heads, half": (of_heads, tuple(x.half() for x in _HEADS)),
    "heads put back inside rows": (
        heads_put_back,
        (*_HEADS, normal(2, 3, 37) * 0.25, normal(2, 37, 3, 20)),
    ),
    "one column": (lambda a, b: a @ b, (normal(70, 300), normal(300, 1))),
    "one row with bias": (
        lambda c, a, b: torch.addmm(c, a, b),
        (normal(50), normal(1, 200), normal(200, 50)),
    ),
    "three columns, batch": (torch.bmm, (normal(2, 30, 100), normal(2, 100, 3))),
    "nan and infinity": (lambda a, b: F.relu(a @ b), (special(20, 30), normal(30, 40))),
    "half": (lambda a, b: F.relu(a @ b), (normal(37, 53).half(), normal(53, 41).half())),
}


def proposals(inputs: tuple[Tensor, ...], name: str) -> list[Proposal]:
    """Small tiles of every method, and the folds that are proposed."""
    function, _ = CASES[name]
    template_proposals = [
        p
        for p in propose(trace_program(function, inputs), 80, most=100)
        if p.config["method"] == "fold"
    ]
    tiles = HALF if inputs[0].dtype is torch.float16 else TILES
    return [*template_proposals, *(schedule.proposal() for schedule in tiles)]


def main(names: Sequence[str]) -> None:
    """Compare the named cases and print the facts."""
    warnings.simplefilter("ignore")
    facts: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        function, inputs = CASES[name]
        results = function(*inputs)
        eager = results if isinstance(results, tuple) else (results,)
        wide = function(*(t.double() for t in inputs))
        exact = wide if isinstance(wide, tuple) else (wide,)
        facts[name] = []
        program = trace_program(function, inputs)
        for proposal in proposals(inputs, name):
            outputs = interpret(
                program, proposal, inputs, lambda text: text.replace('"bf16x6"', '"tf32x3"')
            )
            for got, plain, true in zip(outputs, eager, exact, strict=True):
                assert got is not None
                facts[name].append({"config": dict(proposal.config), **errors(got, plain, true)})
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
