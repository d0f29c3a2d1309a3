"""A gate times what it opens in one launch: the kernel run on the CPU thread by thread, what it is
made for and what it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.cuda_on_cpu import run_on_cpu
from tests.kernels.test_half_precision import (
    BF16,
    FP16,
    make_squares,
    measure_error,
    needs_compiler,
    normal,
    on_hopper,
)
from tests.kernels.traced_programs import trace_program
from torch_cudal1.device.cuda.cubin import inspect_cubin
from torch_cudal1.kernels import build, propose
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.templates.hopper import half_precision
from torch_cudal1.runtime.executor import prepare

# name -> (rows and columns of a tile, function, inputs)
GATES: dict[str, tuple[tuple[int, int], Callable[..., Any], tuple[Tensor, ...]]] = {
    "silu, as in Llama": (
        (128, 128),
        lambda x, gate, up: F.silu(x @ gate.t()) * (x @ up.t()),
        (normal(BF16, 140, 200), normal(BF16, 136, 200), 0.5 * normal(BF16, 136, 200)),
    ),
    "narrow tiles without runs": (
        (64, 32),
        lambda x, gate, up: F.silu(x @ gate.t()) * (x @ up.t()),
        (normal(FP16, 70, 72), normal(FP16, 104, 72), 0.5 * normal(FP16, 104, 72)),
    ),
    "weights across k, in three dimensions": (
        (128, 128),
        lambda x, gate, up: F.gelu(x @ gate) * (x @ up),
        (normal(BF16, 2, 65, 72), normal(BF16, 72, 136), 0.5 * normal(BF16, 72, 136)),
    ),
    "biases, and a result with an odd number of columns for a store": (
        (64, 64),
        lambda x, gate, up, b, c: torch.sigmoid(F.linear(x, gate, b)) * F.linear(x, up, c),
        (
            normal(BF16, 66, 136),
            normal(BF16, 76, 136),
            0.5 * normal(BF16, 76, 136),
            normal(BF16, 76),
            0.5 * normal(BF16, 76),
        ),
    ),
    "halves of one weight": (
        (64, 64),
        lambda x, both: F.gelu(x @ both.t()[:, :136]) * (x @ both.t()[:, 136:]),
        (normal(BF16, 70, 200), 0.7 * normal(BF16, 272, 200)),
    ),
    "a residual": (
        (128, 256),
        lambda x, gate, up, r: r + F.relu(x @ gate.t()) * (x @ up.t()),
        (
            normal(BF16, 130, 136),
            normal(BF16, 264, 136),
            0.5 * normal(BF16, 264, 136),
            normal(BF16, 130, 264),
        ),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", GATES)
def test_a_gate_and_what_it_opens_run_in_one_launch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two blocks for several tiles, so that a ring goes on from tile to tile.
    monkeypatch.setattr(half_precision, "_SM_COUNT", 2)
    tile, function, inputs = GATES[name]
    program = trace_program(function, inputs)
    proposal = next(
        proposal
        for proposal in propose(program, 90, most=100)
        if (proposal.config["rows"], proposal.config["columns"]) == tile
    )
    assert proposal.family == "gated_gemm"
    assert len(lower(program, proposal).kernels) == 1
    (result,) = run_on_cpu(program, proposal, inputs, tmp_path)
    eager, exact = function(*inputs), function(*(t.double() for t in inputs))
    assert (result.shape, result.stride(), result.dtype) == (
        eager.shape,
        eager.stride(),
        eager.dtype,
    )
    # Neither product is rounded before the steps after it.
    assert measure_error(result, exact) < measure_error(eager, exact)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        # different left operands
        (lambda x, y, w: (x @ w) * (y @ w), make_squares(BF16)),
        # one lies along k, one across it
        (lambda x, y, w: (x @ w) * (x @ y.t()), make_squares(BF16)),
        # an element of the result needs another one of the second product
        (lambda x, y, w: (x @ w) * (x @ y).t(), make_squares(BF16)),
        (lambda x, y, w: (x @ w) * (x @ y), make_squares(torch.float32)),
        # one product is made of the other
        (lambda x, y, w: x + (x @ w) @ y, make_squares(BF16)),
    ],
)
def test_other_pairs_of_products_get_no_kernel(
    function: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> None:
    assert propose(trace_program(function, inputs), 90) == ()


def test_gates_are_for_hopper_only() -> None:
    program = trace_program(lambda x, y, w: (x @ w) * (x @ y), make_squares(BF16))
    assert propose(program, 90)
    assert all(propose(program, sm) == () for sm in (80, 89, 100, 120))


@pytest.mark.parametrize("tile", [(128, 256), (128, 128), (64, 128)])
def test_the_gate_of_a_language_model_needs_no_memory_for_registers(tile: tuple[int, int]) -> None:
    shapes = ((1024, 4096), (11008, 4096), (11008, 4096))
    inputs = tuple(torch.empty(shape, dtype=BF16, device="meta") for shape in shapes)
    program = trace_program(lambda x, gate, up: F.silu(x @ gate.t()) * (x @ up.t()), inputs)
    proposal = next(
        proposal
        for proposal in propose(program, 90, most=100)
        if (proposal.config["rows"], proposal.config["columns"]) == tile
    )
    (payload,) = build(program, proposal, 90).payloads.values()
    (kernel,) = inspect_cubin(bytes(payload.numpy())).kernels
    assert kernel.stack_bytes == 0


def list_gate_runs() -> list[Any]:
    """Each gate by its number in the schedules that may be proposed for it."""
    return [
        pytest.param(name, number, id=f"{name}, proposal {number}", marks=on_hopper)
        for name in GATES
        for number in range(4)
    ]


@pytest.mark.parametrize(("name", "number"), list_gate_runs())
def test_a_gate_on_a_gpu_is_as_exact_as_eager(name: str, number: int) -> None:
    _, function, small = GATES[name]
    inputs = tuple(t.cuda() for t in small)
    traced = trace_program(function, inputs)
    proposals = propose(traced, 90, most=100)
    program = build(traced, proposals[number % len(proposals)], 90)
    runner = prepare(program, torch.device("cuda", 0))
    exact, eager = function(*(t.double() for t in inputs)), function(*inputs)
    (result,), (again,) = runner(list(inputs)), runner(list(inputs))
    assert result is not None
    assert again is not None
    assert torch.equal(result, again)
    assert (result.shape, result.stride(), result.dtype) == (
        eager.shape,
        eager.stride(),
        eager.dtype,
    )
    assert measure_error(result, exact) <= 1.01 * measure_error(eager, exact)
