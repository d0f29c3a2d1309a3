"""Convolutions' CUDA C++, run on the CPU thread by thread: taps of every class, edges, layouts,
epilogues; and what is refused.
"""

from __future__ import annotations

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
from torch_cudal1.device.cuda.nvrtc import nvrtc_status
from torch_cudal1.ir.program import Launch
from torch_cudal1.kernels.codegen.compile import build
from torch_cudal1.kernels.lowering import lower, propose
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.kernels.templates.conv_tiles import ConvSchedule
from torch_cudal1.runtime.executor import prepare

needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
needs_nvrtc = pytest.mark.skipif(not nvrtc_status()[0], reason="needs NVRTC")


def normal(*shape: int) -> Tensor:
    """Standard normal, the same at every run, in what TF32 holds: products are exact, and only sums
    round.
    """
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return ((values.view(torch.int32) + 4096) & -8192).view(torch.float32)


def cut(**how: int) -> ConvSchedule:
    """A schedule, most of it the usual."""
    return ConvSchedule(
        **{"z": 1, "y": 1, "channels": 8, "taps": 1, "wide": 1, "stages": 3, "blocks": 1, **how}
    )


def normalise(y: Tensor, *vectors: Tensor) -> Tensor:
    """Batch norm in inference: scale, shift, mean, and what the variance is the square of."""
    scale, shift, mean, deviation = vectors
    normalised: Tensor = torch.ops.aten._native_batch_norm_legit_no_training(
        y, scale, shift, mean, deviation * deviation, 0.1, 1e-5
    )[0]
    return normalised


# name -> (schedule, function, shapes of its inputs)
CASES: dict[str, tuple[ConvSchedule, Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "3x3, bias and relu, ragged": (
        cut(y=4, x=32, columns=16),
        lambda x, w, b: F.relu(F.conv2d(x, w, b)),
        ((2, 8, 9, 18), (12, 8, 3, 3), (12,)),
    ),
    "batch norm, residual and relu": (
        cut(y=4, x=32, columns=16),
        lambda x, w, r, *vectors: F.relu(normalise(F.conv2d(x, w), *vectors) + r),
        ((2, 8, 9, 18), (12, 8, 3, 3), (2, 12, 7, 16), *[(12,)] * 4),
    ),
    "three channels, odd width, two blocks of columns": (
        cut(y=8, x=16, columns=16, channels=3, taps=3),
        lambda x, w: F.conv2d(x, w, padding=1),
        ((1, 3, 8, 17), (20, 3, 3, 3)),
    ),
    "stride 2, residual": (
        cut(y=4, x=32, columns=24, channels=16, stages=2),
        lambda x, w, r: F.conv2d(x, w, stride=2, padding=2) * 0.5 + r,
        ((1, 16, 9, 20), (24, 16, 5, 5), (1, 24, 5, 10)),
    ),
    "three axes, dilated": (
        cut(z=2, y=4, x=16, columns=8, taps=3),
        lambda x, w: F.conv3d(x, w, padding=(1, 0, 2), dilation=(1, 2, 1)),
        ((1, 8, 3, 7, 12), (8, 8, 3, 3, 3)),
    ),
    "one axis, two rows of 64": (
        cut(x=256, columns=16, wide=2),
        lambda x, w: F.conv1d(x, w, dilation=3),
        ((1, 8, 270), (16, 8, 5)),
    ),
    "groups of four channels": (
        cut(y=4, x=32, columns=8, channels=4, taps=3),
        lambda x, w: F.conv2d(x, w, groups=2, padding=1),
        ((1, 8, 5, 16), (10, 4, 3, 3)),
    ),
    "1 x 1": (
        cut(x=128, columns=16, channels=16),
        lambda x, w: F.conv2d(x, w),
        ((1, 16, 12, 16), (16, 16, 1, 1)),
    ),
    "transposed, stride 1": (
        cut(x=128, columns=8),
        lambda x, w: F.conv_transpose1d(x, w),
        ((1, 8, 140), (8, 8, 3)),
    ),
    "transposed, stride 2, tanh": (
        cut(y=8, x=16, columns=8),
        lambda x, w, b: torch.tanh(
            F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1)
        ),
        ((1, 16, 7, 9), (16, 8, 3, 3), (8,)),
    ),
    "transposed, three axes, kernel 4": (
        cut(z=2, y=4, x=16, columns=8, taps=2),
        lambda x, w: F.conv_transpose3d(x, w, stride=2, padding=1),
        ((1, 8, 2, 4, 9), (8, 8, 4, 4, 4)),
    ),
    "transposed, stride 5, dilated: outputs without a tap": (
        cut(y=8, x=16, columns=8),
        lambda x, w: F.conv_transpose2d(x, w, stride=5, padding=1, dilation=2),
        ((1, 8, 5, 9), (8, 8, 3, 3)),
    ),
    "transposed, three channels filled up": (
        cut(y=8, x=16, columns=8),
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
        ((1, 3, 7, 9), (3, 8, 3, 3)),
    ),
    "transposed, groups, classes apart along x": (
        cut(x=128, columns=8),
        lambda x, w: F.conv_transpose1d(x, w, stride=2, padding=1, dilation=3, groups=2),
        ((1, 16, 70), (16, 4, 4)),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_convolutions_match_float64(name: str, tmp_path: Path) -> None:
    schedule, function, shapes = CASES[name]
    inputs = tuple(normal(*shape) for shape in shapes)
    (got,) = run_on_cpu(trace_program(function, inputs), schedule.proposal(), inputs, tmp_path)
    eager, exact = function(*inputs), function(*(t.double() for t in inputs))
    assert (got.shape, got.stride(), got.dtype) == (eager.shape, eager.stride(), eager.dtype)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=3e-5)


@needs_compiler
@pytest.mark.parametrize("shapes", [((1, 8, 9, 18), (12, 8, 3, 3)), ((1, 3, 9, 18), (8, 3, 3, 3))])
def test_three_products_have_the_error_of_fp32(
    shapes: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    x, w = (torch.randn(*shape, generator=torch.Generator().manual_seed(3)) for shape in shapes)
    schedule = cut(y=4, x=32, columns=16, channels=shapes[0][1], taps=3, products=3)
    (got,) = run_on_cpu(trace_program(F.conv2d, (x, w)), schedule.proposal(), (x, w), tmp_path)
    exact, eager = F.conv2d(x.double(), w.double()), F.conv2d(x, w)
    assert (got - exact).pow(2).mean() <= 4 * (eager - exact).pow(2).mean()


@needs_compiler
@pytest.mark.parametrize("products", [1, 3])
def test_nan_and_infinity_reach_only_the_outputs_that_eager_sends_them_to(
    products: int, tmp_path: Path
) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1)

    x, w = normal(1, 8, 7, 9), normal(8, 8, 3, 3)
    x[0, 2, 3, 4], x[0, 0, 0, 0], x[0, 1, 6, 8] = float("nan"), float("inf"), float("-inf")
    schedule = cut(y=8, x=16, columns=8, products=products)
    (got,) = run_on_cpu(trace_program(function, (x, w)), schedule.proposal(), (x, w), tmp_path)
    plain = function(x, w)
    assert torch.equal(got.isnan(), plain.isnan())
    assert torch.equal(got.isinf(), plain.isinf())


TRANSPOSED: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "stride 2": ({"stride": 2, "padding": 1, "output_padding": 1}, (1, 8, 7, 9), (8, 8, 3, 3)),
    "stride 1": ({"padding": 1}, (1, 8, 7, 9), (8, 8, 3, 3)),
    "copied four at a time": ({}, (1, 8, 7, 40), (8, 8, 3, 3)),
    "stride and dilation of 2": (
        {"stride": 2, "padding": 1, "dilation": 2},
        (1, 8, 7, 36),
        (8, 8, 3, 3),
    ),
    "a stride beyond the taps": (
        {"stride": 5, "padding": 1, "dilation": 2},
        (1, 8, 5, 24),
        (8, 8, 3, 3),
    ),
    "in every way": (
        {"stride": (2, 3), "padding": (1, 2), "dilation": (2, 1), "groups": 2},
        (2, 16, 6, 7),
        (16, 8, 3, 5),
    ),
}


def with_specials(name: str) -> tuple[Callable[..., Tensor], Tensor, Tensor]:
    """A transposed convolution, an input and a weight with NaN and infinity in both."""
    how, of_input, of_weight = TRANSPOSED[name]
    x, w = normal(*of_input).abs(), normal(*of_weight)
    w[0, 1, 0, 0], w[5, 3, 2, 1], w[-1, 6, 1, 2] = float("nan"), float("inf"), float("nan")
    x[0, 2, 3, 4], x[0, 5, 0, 0], x[-1, -1, -1, -1] = float("nan"), float("inf"), float("nan")
    return (lambda x, w: F.relu(F.conv_transpose2d(x, w, **how))), x, w


@needs_compiler
@pytest.mark.parametrize("products", [1, 3])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_beside_the_input_a_transposed_convolution_has_no_products(
    name: str, products: int, tmp_path: Path
) -> None:
    function, x, w = with_specials(name)
    (got,) = run_on_cpu(
        trace_program(function, (x, w)),
        cut(y=8, x=16, columns=8, products=products).proposal(),
        (x, w),
        tmp_path,
    )
    with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
        plain = function(x, w)
    assert plain.isnan().any()
    torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-4, equal_nan=True)


@needs_compiler
def test_infinite_weights_and_the_largest_numbers_are_eagers_with_three_products(
    tmp_path: Path,
) -> None:
    x, w = normal(1, 8, 6, 18).abs(), normal(8, 8, 3, 3)
    w[:, 0] *= 0.125  # the largest number's products stay finite
    w[1, 5, 0, 0], w[2, 0, 1, 1] = float("inf"), float("nan")
    x[0, 0, 2, 2] = torch.finfo(torch.float32).max
    schedule = cut(y=4, x=32, columns=8, taps=3, products=3)
    (got,) = run_on_cpu(trace_program(F.conv2d, (x, w)), schedule.proposal(), (x, w), tmp_path)
    torch.testing.assert_close(got, F.conv2d(x, w), rtol=1e-6, atol=1e-4, equal_nan=True)


@needs_nvrtc
def test_every_proposal_becomes_machine_code_for_sm_90() -> None:
    program = trace_program(
        lambda x, w: F.gelu(F.conv_transpose2d(x, w, stride=2)),
        (normal(1, 16, 20, 24), normal(16, 8, 3, 3)),
    )
    proposals = propose(program, 90, ("conv",), most=3)
    assert len(proposals) == 3
    for proposal in proposals:
        built = build(program, proposal, 90)
        assert [
            step.symbol.partition("_")[0] for step in built.steps if isinstance(step, Launch)
        ] == ["pack", "convolve"]


def test_tf32_needs_its_right_and_all_need_sm_90() -> None:
    program = trace_program(lambda x, w: F.conv2d(x, w), (normal(1, 8, 9, 9), normal(8, 8, 3, 3)))
    assert {p.config["products"] for p in propose(program, 90, ("matmul",))} == {3}
    assert {p.config["products"] for p in propose(program, 90, ("conv",))} == {1}
    assert not propose(program, 80, ("conv",))


DEPTHWISE: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = {
    "3x3, bias and relu": (
        lambda x, w, b: F.relu(F.conv2d(x, w, b, groups=3)),
        ((2, 3, 13, 37), (3, 1, 3, 3), (3,)),
        8,
    ),
    "batch norm": (
        lambda x, w, *vectors: F.hardtanh(normalise(F.conv2d(x, w, groups=3), *vectors), 0, 6),
        ((2, 3, 13, 37), (3, 1, 3, 3), *[(3,)] * 4),
        8,
    ),
    "3x7, stride 2, dilated, padded": (
        lambda x, w: F.conv2d(x, w, groups=2, stride=2, dilation=(2, 3), padding=(3, 2)),
        ((1, 2, 14, 40), (2, 1, 3, 7)),
        2,
    ),
    "two outputs a group, small image": (
        lambda x, w: F.conv2d(x, w, groups=4, padding=1),
        ((2, 4, 7, 7), (8, 1, 3, 3)),
        4,
    ),
    "one axis": (lambda x, w: F.conv1d(x, w, groups=3, padding=2), ((2, 3, 70), (3, 1, 5)), 1),
    "three axes": (
        lambda x, w: F.conv3d(x, w, groups=2, padding=1),
        ((1, 2, 4, 5, 9), (2, 1, 3, 3, 3)),
        4,
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_convolutions_match_float64(name: str, tmp_path: Path) -> None:
    function, shapes, rows = DEPTHWISE[name]
    inputs = tuple(
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in shapes
    )
    program = trace_program(function, inputs)
    (proposal,) = (p for p in propose(program, 86) if p.config["rows"] == rows)
    (got,) = run_on_cpu(program, proposal, inputs, tmp_path)
    eager, exact = function(*inputs), function(*(t.double() for t in inputs))
    assert (got.shape, got.stride(), got.dtype) == (eager.shape, eager.stride(), eager.dtype)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=3e-6)


@needs_nvrtc
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_depthwise_convolutions_become_machine_code(sm: int) -> None:
    program = trace_program(
        lambda x, w: torch.sigmoid(F.conv2d(x, w, groups=8)),
        (normal(1, 8, 9, 40), normal(8, 1, 3, 3)),
    )
    for proposal in propose(program, sm, most=2):
        assert any(isinstance(step, Launch) for step in build(program, proposal, sm).steps)


def test_nonsense_is_refused() -> None:
    program = trace_program(lambda x, w: F.conv2d(x, w), (normal(1, 8, 9, 9), normal(8, 8, 3, 3)))
    with pytest.raises(ProgramError, match="places"):
        lower(program, cut(y=3, x=32, columns=8).proposal())
    with pytest.raises(NotLowerableError, match="divide"):
        lower(program, cut(y=4, x=32, columns=8, channels=5).proposal())


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


on_hopper = pytest.mark.skipif(
    not has_hopper(), reason="wgmma is sm_90's own: needs an H100 or H200"
)


def run_on_gpu(
    function: Callable[..., Any], proposal: Proposal, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Three calls of the machine code, which must have the same bits; and the inputs where it read
    them.
    """
    run = prepare(build(trace_program(function, inputs), proposal, 90), torch.device("cuda"))
    device_inputs = tuple(tensor.cuda() for tensor in inputs)
    first, second, third = (run(device_inputs)[0] for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
    assert torch.equal(first.nan_to_num(), third.nan_to_num())
    return first, device_inputs


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("products", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_too(name: str, products: int) -> None:
    schedule, function, shapes = CASES[name]
    inputs = tuple(normal(*shape) for shape in shapes)
    got, device_inputs = run_on_gpu(
        function, replace(schedule, products=products).proposal(), inputs
    )
    exact = function(*(tensor.double() for tensor in device_inputs))
    assert (got.shape, got.stride()) == (exact.shape, exact.stride())
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=3e-5)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("products", [1, 3])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_nan_beside_the_input_stays_out_of_it_on_a_gpu_too(name: str, products: int) -> None:
    function, x, w = with_specials(name)
    got, device_inputs = run_on_gpu(
        function, cut(y=8, x=16, columns=8, products=products).proposal(), (x, w)
    )
    with torch.backends.cudnn.flags(enabled=False):  # kernels of PyTorch's own sum over what exists
        plain = function(*device_inputs)
    torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-4, equal_nan=True)
