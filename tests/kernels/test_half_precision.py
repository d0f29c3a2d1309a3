"""The wgmma kernel of half types, run on the CPU thread by thread: layouts, edges, the ring of
stages from tile to tile, and the steps after the product.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cuda_on_cpu import compiler, run_on_cpu
from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.device.cuda.cubin import inspect_cubin
from torch_cudal1.kernels import build, propose
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.ops.matmul import Operand, Product
from torch_cudal1.kernels.templates.gemm_tiles import (
    GemmSchedule,
    choose_schedules,
    read_schedule,
)
from torch_cudal1.kernels.templates.hopper import half_precision
from torch_cudal1.runtime.executor import prepare

needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
BF16, FP16 = torch.bfloat16, torch.float16


def make_schedule(columns: int, stages: int = 3, rows: int = 128) -> GemmSchedule:
    return GemmSchedule("wgmma", rows, columns, 64, 8, stages, 2)


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    """Standard normal, the same at every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make_squares(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Three matrices: equal objects would be one input of a traced program."""
    return tuple(normal(dtype, 64, 64).clone() for _ in range(3))


# name -> (schedule, function, inputs)
CASES: dict[str, tuple[GemmSchedule, Callable[..., Any], tuple[Tensor, ...]]] = {
    "a linear layer with gelu, ragged, more tiles than stages": (
        make_schedule(64, 4),
        lambda c, a, b: F.gelu(torch.addmm(c, a, b.t())),
        (normal(BF16, 136), normal(BF16, 140, 200), normal(BF16, 136, 200)),
    ),
    "fp16, three stages": (
        make_schedule(32, 3),
        lambda a, b: a @ b.t(),
        (normal(FP16, 70, 72), normal(FP16, 104, 72)),
    ),
    "the right operand lies across k": (
        make_schedule(128, 6),
        lambda c, a, b: torch.addmm(c, a, b),
        (normal(BF16, 136), normal(BF16, 130, 200), normal(BF16, 200, 136)),
    ),
    "both lie across k": (
        make_schedule(64),
        lambda a, b: F.relu(a.t() @ b),
        (normal(FP16, 100, 136), normal(FP16, 100, 72)),
    ),
    "a batch, and a residual": (
        make_schedule(64, 8),
        lambda r, a, b: r + torch.bmm(a, b.transpose(1, 2)),
        (normal(BF16, 3, 66, 40), normal(BF16, 3, 66, 72), normal(BF16, 3, 40, 72)),
    ),
    "few rows: the operands change places": (
        make_schedule(16),
        lambda c, a, b: F.silu(torch.addmm(c, a, b.t())),
        (normal(BF16, 140), normal(BF16, 5, 136), normal(BF16, 140, 136)),
    ),
    "one warpgroup of consumers": (
        make_schedule(32, 3, 64),
        lambda c, a, b: F.relu(torch.addmm(c, a, b.t())),
        (normal(BF16, 72), normal(BF16, 140, 256), normal(BF16, 72, 256)),
    ),
    "one row, as a step of a decoder": (
        make_schedule(16, 4, 64),
        lambda c, a, b: torch.tanh(torch.addmm(c, a, b.t())),
        (normal(BF16, 136), normal(BF16, 1, 200), normal(BF16, 136, 200)),
    ),
    "one warpgroup, few rows": (
        make_schedule(16, 4, 64),
        lambda a, b: a @ b,
        (normal(FP16, 3, 200), normal(FP16, 200, 136)),
    ),
    "columns in heads": (
        make_schedule(64),
        lambda a, b: (a @ b.t()).view(2, 33, 4, 16).transpose(1, 2).contiguous(),
        (normal(BF16, 66, 72), normal(BF16, 64, 72)),
    ),
    "an odd number of columns": (
        make_schedule(32),
        lambda a, b: a @ b.t(),
        (normal(BF16, 66, 72), normal(BF16, 35, 72)),
    ),
    "pairs of columns": (
        make_schedule(32),
        lambda a, b: a @ b.t(),
        (normal(BF16, 66, 72), normal(BF16, 34, 72)),
    ),
}


def project(x: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value of attention with fewer heads for the last two, as models have them."""
    query = torch.addmm(b, x, q.t()).view(7, 10, 3, 24).transpose(1, 2)
    return query * 0.5, F.silu(x @ k.t()), (x @ v.t()).float()


# name -> (rows of a tile, columns of a tile, function, inputs)
SIBLINGS: dict[str, tuple[int, int, Callable[..., Any], tuple[Tensor, ...]]] = {
    "three along k, of different widths": (
        64,
        32,
        project,
        (
            normal(BF16, 70, 72),
            normal(BF16, 72, 72),
            normal(BF16, 40, 72),
            normal(BF16, 41, 72),
            normal(BF16, 72),
        ),
    ),
    "two across k, of a reshaped operand": (
        128,
        64,
        lambda x, a, b: (x.view(140, 72) @ a, torch.relu(x.view(140, 72) @ b)),
        (normal(FP16, 2, 70, 72), normal(FP16, 72, 128), normal(FP16, 72, 64)),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", SIBLINGS)
def test_products_of_one_left_operand_run_in_one_launch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_precision, "_SM_COUNT", 1)
    rows, columns, function, inputs = SIBLINGS[name]
    program = trace_program(function, inputs)
    proposal = next(
        proposal
        for proposal in propose(program, 90, most=100)
        if (proposal.config["rows"], proposal.config["columns"]) == (rows, columns)
    )
    assert len(lower(program, proposal).kernels) == 1
    results = run_on_cpu(program, proposal, inputs, tmp_path)
    eager, exact = function(*inputs), function(*(t.double() for t in inputs))
    for got, plain, right in zip(results, eager, exact, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (plain.shape, plain.stride(), plain.dtype)
        assert measure_error(got, right) <= 1.01 * measure_error(plain, right)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        # different left operands
        (lambda x, y, w: (x @ w, y @ w), make_squares(BF16)),
        # one lies along k, one across it
        (lambda x, y, w: (x @ w, x @ y.t()), make_squares(BF16)),
        (lambda x, y, w: (x @ w, x @ y), make_squares(torch.float32)),
    ],
)
def test_other_pairs_of_products_get_no_kernel(
    function: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> None:
    assert propose(trace_program(function, inputs), 90) == ()


def test_siblings_are_for_hopper_only() -> None:
    program = trace_program(lambda x, y, w: (x @ w, x @ y), make_squares(BF16))
    assert propose(program, 90)
    assert all(propose(program, sm) == () for sm in (80, 89, 100, 120))


def measure_error(got: Tensor, exact: Tensor) -> float:
    """Root mean square, in units of the result's."""
    return float((got.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())


@pytest.mark.parametrize(
    ("stages", "threads_that_copy"),
    # two blocks share an SM, and only a warp of each copies; or one block has it for itself
    [(3, 32), (6, 128)],
)
def test_registers_of_all_warps_are_there(stages: int, threads_that_copy: int) -> None:
    shapes = ((256, 128), (128, 128))
    program = trace_program(lambda a, b: a @ b.t(), tuple(normal(BF16, *s) for s in shapes))
    (kernel,) = lower(program, make_schedule(128, stages).proposal()).kernels
    assert kernel.warps == (threads_that_copy + 256) // 32
    if threads_that_copy == 128:
        of_producers, of_consumers = (
            int(re.search(rf"setmaxnreg.{way}.sync.aligned.u32 (\d+)", kernel.text)[1])  # type: ignore[index]
            for way in ("dec", "inc")
        )
        # ptxas gives each of 384 threads 168; who asks for more than that waits for ever
        assert of_producers + 2 * of_consumers <= 3 * 168


@pytest.mark.parametrize(("columns", "stages"), [(128, 3), (256, 4)])
def test_an_operand_across_k_leaves_registers_for_the_sums(columns: int, stages: int) -> None:
    shapes = ((512, 768), (768, 3072))
    inputs = tuple(torch.empty(shape, dtype=BF16, device="meta") for shape in shapes)
    proposal = make_schedule(columns, stages).proposal()
    (payload,) = build(trace_program(lambda x, w: x @ w, inputs), proposal, 90).payloads.values()
    (kernel,) = inspect_cubin(bytes(payload.numpy())).kernels
    # Addresses of all copies of a stage, kept for the next one, once took 1,264 bytes of a thread.
    assert kernel.stack_bytes == 0


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_products_of_half_types_match_float64(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two blocks for several tiles, so that a ring goes on from tile to tile.
    monkeypatch.setattr(half_precision, "_SM_COUNT", 2)
    schedule, function, inputs = CASES[name]
    (got,) = run_on_cpu(trace_program(function, inputs), schedule.proposal(), inputs, tmp_path)
    eager, exact = function(*inputs), function(*(t.double() for t in inputs))
    assert (got.shape, got.stride(), got.dtype) == (eager.shape, eager.stride(), eager.dtype)
    assert measure_error(got, exact) <= 1.01 * measure_error(eager, exact)


@needs_compiler
def test_nan_and_infinity_go_where_eager_sends_them(tmp_path: Path) -> None:
    a, b = normal(BF16, 70, 72), normal(BF16, 40, 72)
    a[3, 7], a[5, 1], a[7, 9] = float("nan"), float("inf"), 3e38
    inputs = (a, b)
    program = trace_program(lambda a, b: a @ b.t(), inputs)
    (got,) = run_on_cpu(program, make_schedule(64).proposal(), inputs, tmp_path)
    plain = a @ b.t()
    assert torch.equal(got.isnan(), plain.isnan())
    assert torch.equal(got.isinf(), plain.isinf())


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_as_exact_as_eager_over_the_whole_range(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    activation = ACTIVATIONS[name]
    special = [float("nan"), float("inf"), -float("inf"), 0.0, 3e4, -3e4, 1e-6, -1e-6]
    values = torch.cat([torch.linspace(-30, 30, 500), torch.tensor(special)]).to(dtype)
    # a product with one: the sum of its first terms and zeros
    a, b = torch.zeros(len(values), 16, dtype=dtype), torch.zeros(32, 16, dtype=dtype)
    a[:, 0], b[:, 0] = values, 1
    program = trace_program(lambda a, b: activation(a @ b.t()), (a, b))
    (got,) = run_on_cpu(program, make_schedule(32, 3, 64).proposal(), (a, b), tmp_path)
    assert (got == got[:, :1]).all(dim=1).logical_or(got.isnan().all(dim=1)).all()
    column, eager, exact = got[:, 0], activation(values), activation(values.double())
    assert torch.equal(column.isnan(), exact.isnan())
    assert torch.equal(column.isinf(), exact.isinf())
    finite = eager.isfinite() & exact.isfinite()
    error, eager_error = ((each.double() - exact).abs()[finite] for each in (column, eager))
    # half a step of the type, or of its smallest numbers, and what the approximation adds
    rounding = exact[finite].abs() * (torch.finfo(dtype).eps / 2 + 3e-5)
    rounding += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert (error <= torch.maximum(rounding, eager_error)).all()


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda a, b: a @ b.t(), (normal(BF16, 70, 76), normal(BF16, 40, 76))),
        (lambda a, b: a[:, 4:] @ b.t(), (normal(BF16, 70, 76), normal(BF16, 40, 72))),
        (lambda a, b: a @ b, (normal(BF16, 70, 72), normal(BF16, 72, 44))),
        (lambda a, b: a @ b.t(), (normal(torch.float32, 70, 72), normal(torch.float32, 40, 72))),
    ],
)
def test_what_cannot_be_copied_16_bytes_at_a_time_is_refused(
    function: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> None:
    program = trace_program(function, inputs)
    with pytest.raises(NotLowerableError):
        lower(program, make_schedule(64).proposal())


def test_pieces_of_k_go_into_planes_of_fp32() -> None:
    a, b = normal(BF16, 66, 256), normal(BF16, 72, 256)
    schedule = replace(make_schedule(64), split=2)
    program = trace_program(lambda a, b: a @ b.t(), (a, b))
    planes = lower(program, schedule.proposal())
    assert [kernel.cuda is not None for kernel in planes.kernels] == [True, False]
    (scratch,) = [spec for value, spec in planes.written.items() if value not in program.outputs]
    assert (scratch.dtype, scratch.shape) == ("float32", (2, 66, 72))


@pytest.mark.parametrize("columns", [24, 272])
def test_a_tile_that_no_kernel_is_made_for_is_nonsense(columns: int) -> None:
    with pytest.raises(ProgramError, match="a wgmma tile"):
        read_schedule(make_schedule(columns).proposal())


# On a GPU
# ----------------------------------------------------------------------------------------------------------------------

# rows, columns, k: a tile's edge in each, fewer tiles than SMs and more, one row
SIZES = [(128, 768, 768), (4000, 3080, 712), (1, 4096, 1024), (40, 1000, 4096), (8192, 256, 64)]
on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs an NVIDIA GPU of capability 9.0",
    ),
]


def list_layers() -> list[Any]:
    """Each size in each schedule that is proposed for it."""
    return [
        pytest.param(
            schedule,
            size,
            id=f"{size}, {schedule.rows} x {schedule.columns}, split {schedule.split}",
            marks=on_hopper,
        )
        for size in SIZES
        for schedule in list_schedules(size)
    ]


def list_schedules(size: tuple[int, int, int]) -> list[GemmSchedule]:
    """What is proposed for a linear layer of that size."""
    rows, columns, inner = size
    left, right = Operand(0, inner, 1), Operand(1, inner, 1)
    product = Product(1, rows, columns, inner, left, right, BF16)
    return list(choose_schedules(product, 90, (), 100, ["wgmma"]))


def compare_on_gpu(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], schedule: GemmSchedule
) -> None:
    """As exact as eager against float64, and equal bits when it runs again."""
    program = build(trace_program(function, inputs), schedule.proposal(), 90)
    runner = prepare(program, torch.device("cuda", 0))
    first, second = runner(list(inputs))[0], runner(list(inputs))[0]
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    exact, eager = function(*(t.double() for t in inputs)), function(*inputs)
    assert measure_error(first, exact) <= 1.01 * measure_error(eager, exact)


@pytest.mark.parametrize(("schedule", "size"), list_layers())
def test_a_layer_on_a_gpu_is_as_exact_as_eager(
    schedule: GemmSchedule, size: tuple[int, int, int]
) -> None:
    rows, columns, inner = size
    shapes = ((rows, inner), (columns, inner), (columns,), (rows, columns))

    def layer(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return F.gelu(torch.addmm(b, x, w.t())) + r

    compare_on_gpu(layer, tuple(normal(BF16, *shape).cuda() for shape in shapes), schedule)


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_hopper) for name in CASES])
def test_small_products_on_a_gpu_are_as_exact_as_eager(name: str) -> None:
    schedule, function, inputs = CASES[name]
    compare_on_gpu(function, tuple(t.cuda() for t in inputs), schedule)


def list_sibling_runs() -> list[Any]:
    """Each set of siblings by its number in the schedules that may be proposed for it."""
    return [
        pytest.param(name, number, id=f"{name}, proposal {number}", marks=on_hopper)
        for name in SIBLINGS
        for number in range(4)
    ]


@pytest.mark.parametrize(("name", "number"), list_sibling_runs())
def test_products_of_one_left_operand_on_a_gpu_are_as_exact_as_eager(
    name: str, number: int
) -> None:
    _, _, function, small = SIBLINGS[name]
    inputs = tuple(t.cuda() for t in small)
    traced = trace_program(function, inputs)
    proposals = propose(traced, 90, most=100)
    program = build(traced, proposals[number % len(proposals)], 90)
    runner = prepare(program, torch.device("cuda", 0))
    exact, eager = function(*(t.double() for t in inputs)), function(*inputs)
    for got, again, plain, right in zip(
        runner(list(inputs)), runner(list(inputs)), eager, exact, strict=True
    ):
        assert got is not None
        assert again is not None
        assert torch.equal(got, again)
        assert (got.shape, got.stride(), got.dtype) == (plain.shape, plain.stride(), plain.dtype)
        assert measure_error(got, right) <= 1.01 * measure_error(plain, right)
