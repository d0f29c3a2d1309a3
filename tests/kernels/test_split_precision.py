"""Packed products' CUDA C++, run on the CPU thread by thread: layouts, edges, scales, and when a
tile is computed again in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cuda_on_cpu import compiler, run_on_cpu
from tests.kernels.traced_programs import emit_program, trace_program
from torch_cudal1.ir.program import Launch
from torch_cudal1.kernels.templates.gemm_tiles import GemmSchedule

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
THREE = GemmSchedule("packed-f16x3", 128, 64, 64, 8, 2, 2)
SIX = GemmSchedule("packed-bf16x6", 128, 64, 64, 8, 2, 8)
PAIR = GemmSchedule("packed-f16x3", 128, 64, 64, 8, 2, 2, 1, 1, 2)
ONE = GemmSchedule("packed-f16x1", 128, 32, 64, 8, 3, 8, 1, 2)
STREAM = GemmSchedule("packed-stream", 128, 64, 64, 8, 2, 2)
NEVER = GemmSchedule("packed-f16x1", 128, 64, 64, 8, 2, 8, 1, 0)


def normal(*shape: int) -> Tensor:
    """Standard normal, the same at every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def hidden(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A huge column of A that meets a zero row of B: fp16 pieces of the rest would hold nothing."""
    a, b = normal(rows, columns), normal(columns, 40)
    a[:, 5], b[5] = 2.0**40, 0.0
    return a, b


def far_apart() -> tuple[Tensor, Tensor]:
    """Rows of very different size, some zero; the products are far from fp32's ends."""
    a = normal(40, 70) * torch.logspace(-30, 20, 40)[:, None]
    a[3] = 0
    return a, F.relu(normal(70, 36))


def depths_far_apart() -> tuple[Tensor, Tensor]:
    """Rows and runs of 64 of k of very different size, some zero."""
    a = normal(40, 208) * torch.logspace(-15, 10, 40)[:, None]
    b = normal(208, 36)
    a[:, 64:128] *= 1e10
    b[64:128] *= 1e-10
    a[3], a[:, 128:192] = 0, 0
    return a, b


# name -> (schedule, function, inputs, rms error over eager's that is allowed)
CASES: dict[str, tuple[GemmSchedule, Callable[..., Any], tuple[Tensor, ...], float]] = {
    "ragged, several tiles, bias and gelu": (
        THREE,
        lambda c, a, b: F.gelu(torch.addmm(c, a, b.t())),
        (normal(70), normal(140, 130), normal(70, 130)),
        1.5,
    ),
    "batch, transposed, more stages than depths": (
        SIX,
        lambda a, b: torch.bmm(a.transpose(1, 2), b),
        (normal(2, 66, 50), normal(2, 66, 41)),
        1.5,
    ),
    "a pair of blocks shares columns": (
        PAIR,
        lambda a, b: a.t() @ b,
        (normal(200, 250), normal(200, 60)),
        1.5,
    ),
    "rows far apart": (THREE, torch.mm, far_apart(), 1.5),
    "hidden by a huge number": (THREE, torch.mm, hidden(30, 70), 1.01),
    "streamed, the weight is": (
        STREAM,
        lambda c, a, b: F.gelu(torch.addmm(c, a, b.t())),
        (normal(140), normal(70, 132), normal(140, 132)),
        1.5,
    ),
    "streamed, the left one is, in a batch": (
        STREAM,
        torch.bmm,
        (normal(2, 130, 68), normal(2, 68, 41)),
        1.5,
    ),
    "streamed, rows and depths far apart": (STREAM, torch.mm, depths_far_apart(), 1.5),
    "streamed, hidden by a huge number": (STREAM, torch.mm, hidden(30, 72), 1.01),
    "tf32's accuracy, never promoted": (
        NEVER,
        lambda a, b: a @ b,
        (normal(33, 192), normal(192, 34)),
        5e3,
    ),
    "tf32's accuracy": (ONE, lambda a, b: F.relu(a @ b), (normal(33, 192), normal(192, 34)), 5e3),
}


def row_errors(got: Tensor, exact: Tensor) -> float:
    """Root mean square, row by row in units of the row's size."""
    scale = exact.pow(2).mean(-1, keepdim=True).sqrt() + 1e-300
    return ((got.double() - exact) / scale).pow(2).mean().sqrt().item()


@pytest.mark.parametrize("name", CASES)
def test_packed_products_match_float64(name: str, tmp_path: Path) -> None:
    schedule, function, inputs, allowed = CASES[name]
    (got,) = run_on_cpu(trace_program(function, inputs), schedule.proposal(), inputs, tmp_path)
    eager, exact = function(*inputs), function(*(t.double() for t in inputs))
    assert (got.shape, got.stride(), got.dtype) == (eager.shape, eager.stride(), eager.dtype)
    assert row_errors(got, exact) <= allowed * max(row_errors(eager, exact), 1e-7)


@pytest.mark.parametrize("schedule", [SIX, STREAM])
def test_nan_and_infinity_go_where_fp32_sends_them(schedule: GemmSchedule, tmp_path: Path) -> None:
    a, b = normal(36, 72), normal(72, 66)
    a[3, 7], a[5, 1], a[7, 9], a[7, 11], b[2, 65] = (
        float("nan"),
        float("inf"),
        float("-inf"),
        float("inf"),
        3.4e38,
    )
    (got,) = run_on_cpu(trace_program(torch.mm, (a, b)), schedule.proposal(), (a, b), tmp_path)
    plain = a @ b
    assert torch.equal(got.isnan(), plain.isnan())
    assert torch.equal(got.isinf(), plain.isinf())
    finite = plain.isfinite()
    torch.testing.assert_close(got[finite], plain[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", [THREE, PAIR])
def test_as_many_blocks_are_launched_as_there_are_tiles(schedule: GemmSchedule) -> None:
    """A launch counts clusters: twice the blocks of a pair's kernel would read and write beyond
    every operand.
    """
    (a, b), rows, columns = (normal(500, 64), normal(64, 200)), 4, 4
    built, _ = emit_program(trace_program(torch.mm, (a, b)), schedule.proposal())
    launches = [step for step in built.steps if isinstance(step, Launch)]
    assert launches[-1].grid[0] * launches[-1].cluster == rows * columns
