"""On a GPU: products by every method are as exact as cuBLAS, keep NaN and infinity, repeat, and
survive ill-scaled numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels import Proposal, build
from torch_cudal1.kernels.templates.gemm_tiles import GemmSchedule
from torch_cudal1.runtime.executor import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SCHEDULES = {
    "bf16x6": GemmSchedule("bf16x6", 128, 128, 32, 8, 3),
    "bf16x6, split": GemmSchedule("bf16x6", 64, 64, 32, 4, 3, 8, 3),
    "tf32x3": GemmSchedule("tf32x3", 128, 64, 32, 8, 3),
    "packed-f16x3": GemmSchedule("packed-f16x3", 128, 128, 64, 8, 3),
    "packed-f16x3, wide": GemmSchedule("packed-f16x3", 128, 192, 64, 8, 2),
    "packed-f16x3, narrow": GemmSchedule("packed-f16x3", 128, 64, 64, 8, 4, 2),
    "packed-f16x3, in pairs": GemmSchedule("packed-f16x3", 128, 128, 64, 8, 3, 4, 1, 1, 2),
    "packed-f16x3, split": GemmSchedule("packed-f16x3", 128, 128, 64, 8, 3, 8, 2),
    "packed-stream": GemmSchedule("packed-stream", 128, 128, 64, 8, 3),
    "packed-stream, narrow": GemmSchedule("packed-stream", 128, 64, 64, 8, 4),
    "packed-stream, split": GemmSchedule("packed-stream", 128, 64, 64, 8, 4, 8, 2),
    "packed-bf16x6": GemmSchedule("packed-bf16x6", 128, 128, 64, 8, 2),
}
FAST = {
    "tf32": GemmSchedule("tf32", 128, 128, 32, 8, 3),
    "packed-f16x1": GemmSchedule("packed-f16x1", 128, 192, 64, 8, 4, 8, 1, 2),
    "packed-f16x1, never promoted": GemmSchedule("packed-f16x1", 128, 256, 64, 8, 4, 8, 1, 0),
    "packed-f16x1, in pairs": GemmSchedule("packed-f16x1", 128, 256, 64, 8, 4, 4, 1, 0, 2),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed + sum(shape))
    )


def wide(*shape: int) -> Tensor:
    """Magnitudes over 2^40, some of them zero."""
    return (
        normal(*shape)
        * torch.exp2(torch.randint(-20, 21, shape, device="cuda").float())
        * (normal(*shape, seed=1) > -1)
    )


def with_specials(*shape: int) -> Tensor:
    matrix = normal(*shape)
    matrix[3, 7], matrix[5, 1], matrix[200, 9], matrix[200, 11] = (
        float("nan"),
        float("inf"),
        float("-inf"),
        float("inf"),
    )
    return matrix


# name -> (function, inputs)
CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "square": (torch.mm, lambda: (normal(512, 1024), normal(1024, 640))),
    "ragged": (torch.mm, lambda: (normal(333, 517), normal(517, 259))),
    "nt": (lambda a, b: a @ b.t(), lambda: (normal(300, 512), normal(390, 512))),
    "tn": (lambda a, b: a.t() @ b, lambda: (normal(512, 300), normal(512, 390))),
    "tt": (lambda a, b: a.t() @ b.t(), lambda: (normal(511, 300), normal(390, 511))),
    "odd columns": (torch.mm, lambda: (normal(130, 70), normal(70, 131))),
    "batch": (torch.bmm, lambda: (normal(5, 200, 96), normal(5, 96, 300))),
    "batch sharing a matrix": (
        lambda a, b: torch.bmm(a, b.expand(3, 96, 300)),
        lambda: (normal(3, 200, 96), normal(1, 96, 300)),
    ),
    "bias and gelu": (
        lambda c, a, b: F.gelu(torch.addmm(c, a, b)),
        lambda: (normal(260), normal(200, 96), normal(96, 260)),
    ),
    "residual": (
        lambda r, a, b: F.silu(a @ b) * 0.5 + r,
        lambda: (normal(200, 260), normal(200, 96), normal(96, 260)),
    ),
    "rows cut": (
        lambda a, b: (a @ b).view(4, 50, 260) + 1,
        lambda: (normal(200, 96), normal(96, 260)),
    ),
    "deep": (torch.mm, lambda: (normal(128, 16384), normal(16384, 192))),
    "positive": (torch.mm, lambda: (normal(256, 2048).abs(), normal(2048, 256).abs())),
    "rows far apart": (
        torch.mm,
        lambda: (
            normal(256, 256) * torch.logspace(-30, 5, 256, device="cuda")[:, None],
            normal(256, 256),
        ),
    ),
    "nearly the largest": (torch.mm, lambda: (normal(256, 256) * 1e37, normal(256, 256) * 1e-3)),
    "subnormal": (torch.mm, lambda: (normal(256, 256) * 1e-39, normal(256, 256) * 1e3)),
    "zeros": (
        torch.mm,
        lambda: (F.relu(normal(256, 512)) * (normal(256, 1) > 0), F.relu(normal(512, 256))),
    ),
}


def run(function: Callable[..., Any], inputs: tuple[Tensor, ...], schedule: GemmSchedule) -> Tensor:
    """What the machine code gives, twice the same."""
    if schedule.method.startswith("packed") and not HOPPER:
        pytest.skip("for sm_90 only")
    major, minor = torch.cuda.get_device_capability()
    shapes = tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in inputs)
    try:
        program = build(
            trace_program(function, shapes),
            Proposal("gemm", schedule.proposal().config),
            10 * major + minor,
        )
    except NotLowerableError as reason:
        if schedule.method != "packed-stream" and schedule.split == 1:
            raise
        pytest.skip(f"a method for some products: {reason}")
    runner = prepare(program, torch.device("cuda"))
    first, second = runner(list(inputs))[0], runner(list(inputs))[0]
    assert first is not None
    assert second is not None
    assert torch.equal(
        first.view(torch.int32), second.view(torch.int32)
    )  # no atomics, no races: the same bits every time
    return first


def errors(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """Root mean square and worst, row by row in units of the row's size, so that small rows count
    as much as large ones.
    """
    scale = exact.pow(2).mean(-1, keepdim=True).sqrt() + 1e-300
    relative_error = (got.double() - exact).abs() / scale
    return relative_error.pow(2).mean().sqrt().item(), relative_error.max().item()


def lost_below(inputs: tuple[Tensor, ...], exact: Tensor) -> float:
    """What pieces that end at 2^-134 may lose of operands, in units of the result: nothing but for
    subnormal numbers.
    """
    sizes = [t.double().pow(2).mean().sqrt().item() for t in inputs[-2:]]
    return 2.0**-133 * max(sizes) * inputs[-1].shape[-2] ** 0.5 / exact.pow(2).mean().sqrt().item()


@pytest.mark.parametrize("method", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_a_product_is_as_exact_as_cublas(name: str, method: str) -> None:
    function, make = CASES[name]
    inputs = make()
    got, plain = run(function, inputs, SCHEDULES[method]), function(*inputs)
    exact = function(*(t.double() for t in inputs))
    kernel, eager = errors(got, exact), errors(plain, exact)
    lost = 0.0 if SCHEDULES[method].method.startswith("packed") else lost_below(inputs, exact)
    assert kernel[0] <= max(1.25 * eager[0], 3e-7) + lost, (kernel, eager, lost)
    assert kernel[1] <= max(2.0 * eager[1], 3e-6) + 5 * lost, (kernel, eager, lost)


@pytest.mark.parametrize("method", FAST)
@pytest.mark.parametrize("name", ["square", "ragged", "tt", "batch", "bias and gelu"])
def test_a_tf32_product_is_as_exact_as_tf32(name: str, method: str) -> None:
    function, make = CASES[name]
    inputs = make()
    exact = function(*(t.double() for t in inputs))
    assert errors(run(function, inputs, FAST[method]), exact)[0] <= 6e-4


@pytest.mark.parametrize("method", SCHEDULES)
def test_nan_and_infinity_go_where_fp32_sends_them(method: str) -> None:
    inputs = (with_specials(300, 256), normal(256, 270))
    got, plain = run(torch.mm, inputs, SCHEDULES[method]), torch.mm(*inputs)
    assert torch.equal(got.isnan(), plain.isnan())
    assert torch.equal(got.isinf(), plain.isinf())
    assert torch.equal(got[plain.isinf()], plain[plain.isinf()])


@pytest.mark.parametrize(
    "method", ["packed-f16x3", "packed-f16x3, wide", "packed-stream", "packed-bf16x6"]
)
def test_numbers_that_pieces_cannot_hold_are_computed_in_fp32(method: str) -> None:
    """A row's huge number meets only zeros: what is left of the row is 2^-40 of its scale, below
    what fp16 pieces hold.
    """
    a, b = normal(256, 256), normal(256, 256)
    a[:, 0], b[0] = 2.0**40, 0.0
    inputs = (a, b)
    kernel, eager = (
        errors(c, a.double() @ b.double())
        for c in (run(torch.mm, inputs, SCHEDULES[method]), torch.mm(*inputs))
    )
    assert kernel[0] <= max(1.25 * eager[0], 3e-7), (kernel, eager)
    inputs = (b.t().contiguous(), a.t().contiguous())  # the same of columns
    exact = inputs[0].double() @ inputs[1].double()
    kernel, eager = (
        errors(c, exact) for c in (run(torch.mm, inputs, SCHEDULES[method]), torch.mm(*inputs))
    )
    assert kernel[0] <= max(1.25 * eager[0], 3e-7), (kernel, eager)


@pytest.mark.parametrize("method", ["packed-f16x3", "packed-bf16x6", "bf16x6"])
def test_magnitudes_over_many_powers_of_two_stay_as_exact(method: str) -> None:
    inputs = (wide(256, 512), wide(512, 256))
    exact = inputs[0].double() @ inputs[1].double()
    kernel, eager = (
        errors(c, exact) for c in (run(torch.mm, inputs, SCHEDULES[method]), torch.mm(*inputs))
    )
    assert kernel[0] <= max(1.25 * eager[0], 3e-7), (kernel, eager)
