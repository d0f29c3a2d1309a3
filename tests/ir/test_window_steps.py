"""Convolutions as products of their windows: the same numbers, in the same layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.traced_programs import trace_program
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.ops.window_steps import make_alone, read_windows, replace_windows
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.ir.value_specs import output_specs, value_specs
from torch_cudal1.runtime.executor import prepare

CPU = torch.device("cpu")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# name -> (function, inputs)
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "the patches of an image": (
        lambda x, w, b: F.conv2d(x, w, b, stride=4).flatten(2).transpose(1, 2),
        (normal(2, 3, 8, 12), normal(10, 3, 4, 4), normal(10)),
    ),
    "no bias, an input that is no multiple of a window": (
        lambda x, w: F.conv2d(x, w, stride=(2, 3)),
        (normal(2, 3, 9, 11), normal(5, 3, 2, 3)),
    ),
    "channels last": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2),
        (
            normal(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
            normal(6, 3, 2, 2),
            normal(6),
        ),
    ),
    "overlapping windows with padding, in one dimension": (
        lambda x, w, b: F.gelu(F.conv1d(x, w, b, stride=1, padding=1)),
        (normal(2, 4, 17), normal(8, 4, 3), normal(8)),
    ),
    "every second position": (
        lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1),
        (normal(1, 4, 18), normal(8, 4, 3), normal(8)),
    ),
    "padding that differs, and one number for all strides": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=(1, 0)),
        (normal(2, 3, 8, 9), normal(4, 3, 3, 2)),
    ),
    "the patches of a volume": (
        lambda x, w, b: F.conv3d(x, w, b, stride=2),
        (normal(2, 3, 4, 6, 8), normal(5, 3, 2, 2, 2), normal(5)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_of_windows_computes_the_convolution(name: str) -> None:
    function, inputs = CASES[name]
    program = trace_program(function, inputs)
    windows, specs = read_windows(program), value_specs(program)
    assert len(windows) == 1
    replaced = replace_windows(program, windows, specs)
    assert replaced is not None
    check_program(replaced)
    assert not read_windows(replaced)
    assert output_specs(replaced) == output_specs(program)
    (result,) = prepare(replaced, CPU)(list(inputs))
    expected = function(*inputs)
    torch.testing.assert_close(result, expected)
    assert result is not None
    assert result.stride() == output_specs(program)[0].strides


@pytest.mark.parametrize("name", CASES)
def test_alone_it_is_the_convolution_and_its_product(name: str) -> None:
    program = trace_program(*CASES[name])
    specs = value_specs(program)
    (window,) = read_windows(program).values()
    inputs = [normal(*specs[index].shape) for index in window.operands]
    results = []
    for as_product in (False, True):
        alone = make_alone(window, specs, as_product=as_product)
        assert alone is not None
        check_program(alone)
        results.append(prepare(alone, CPU)(inputs)[0])
    torch.testing.assert_close(results[1], results[0])


def test_inductor_compiles_it() -> None:
    function, inputs = CASES["overlapping windows with padding, in one dimension"]
    program = trace_program(function, inputs)
    replaced = replace_windows(program, read_windows(program), value_specs(program))
    assert replaced is not None
    run = prepare(replaced, CPU)
    compiled = torch.compile(lambda *given: run(list(given))[0], dynamic=False)
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        # One position a window: cuDNN has a product for that.
        (lambda x, w: F.conv2d(x, w), (normal(2, 3, 8, 8), normal(4, 3, 1, 1))),
        # Nine copies of each element.
        (lambda x, w: F.conv2d(x, w, padding=1), (normal(2, 3, 8, 8), normal(4, 3, 3, 3))),
        (lambda x, w: F.conv2d(x, w, stride=2, groups=3), (normal(2, 3, 8, 8), normal(3, 1, 2, 2))),
        (lambda x, w: F.conv1d(x, w, dilation=2), (normal(2, 3, 8), normal(4, 3, 2))),
        (lambda x, w: F.conv_transpose1d(x, w, stride=2), (normal(2, 3, 8), normal(3, 4, 2))),
        # A weight that is a view across the dimensions would be copied at each call.
        (
            lambda x, w: F.conv1d(x, w.transpose(0, 1), stride=2),
            (normal(2, 3, 8), normal(3, 4, 2)),
        ),
    ],
)
def test_other_convolutions_stay(function: Callable[..., Tensor], inputs: Any) -> None:
    assert not read_windows(trace_program(function, inputs))


def test_a_result_with_gaps_has_no_product() -> None:
    program = trace_program(*CASES["the patches of an image"])
    specs = value_specs(program)
    (window,) = read_windows(program).values()
    out = window.step.outs[0]
    gaps = replace(specs[out], strides=tuple(2 * stride for stride in specs[out].strides))
    assert make_alone(window, {**specs, out: gaps}, as_product=True) is None


def test_steps_behind_keep_their_values() -> None:
    """Two convolutions, of which the second reads the first: numbers move along."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first = F.conv1d(x, w, stride=2)
        return first + 1.0, F.conv1d(first, v, stride=2)

    inputs = (normal(2, 3, 16), normal(4, 3, 2), normal(5, 4, 2))
    program: Program = trace_program(function, inputs)
    replaced = replace_windows(program, read_windows(program), value_specs(program))
    assert replaced is not None
    assert not [s for s in replaced.steps if isinstance(s, Aten) and "convolution" in s.target]
    for result, expected in zip(
        prepare(replaced, CPU)(list(inputs)), function(*inputs), strict=True
    ):
        torch.testing.assert_close(result, expected)
