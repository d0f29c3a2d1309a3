"""Convolutions that read each element of their input a few times at most, and the matrix product of
their windows that computes the same.

The patch embedding of a vision transformer cuts its input into windows that lie side by side, the
front of a speech model into windows of two or three positions: copied as the rows of a matrix they
are little more than the input, and a product of half types runs at full speed for any number of
channels. cuDNN takes 300 us for 49 windows of 32 x 32 of three channels in fp16 on an H200
(benchmarks/LOG.md, 2026-12-01).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from torch_cudal1.ir.program import Arg, Aten, Program, Step, TensorSpec, Value, renumber_step
from torch_cudal1.ir.step_replacement import make_restoring_steps, replace_steps
from torch_cudal1.ir.value_specs import value_specs

__all__ = ["WindowStep", "make_alone", "read_windows", "replace_windows"]

_CONVOLUTION = "aten.convolution.default"
_PAD, _UNFOLD = "aten.constant_pad_nd.default", "aten.unfold.default"
_VIEW, _PERMUTE, _CLONE = "aten.view.default", "aten.permute.default", "aten.clone.default"
_T, _MM, _ADDMM = "aten.t.default", "aten.mm.default", "aten.addmm.default"
# Elements of all windows over those of the input. With more the copy costs what the product saves.
_MAX_COPIES = 4


@dataclass(frozen=True)
class WindowStep:
    """`operands`: input, weight and, where there is one, the bias. `kernel`, `stride` and `padding`
    of each spatial dimension.
    """

    step: Aten
    operands: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]


def read_windows(program: Program) -> dict[int, WindowStep]:
    """By position, the convolutions of `program` whose windows have few elements more than their
    input: dense weights, no groups, no dilation, more than one position a window.
    """
    convolutions = {
        position: step
        for position, step in enumerate(program.steps)
        if isinstance(step, Aten) and step.target == _CONVOLUTION
    }
    # Most Programs have none, and the shapes of values take a while.
    specs = value_specs(program) if convolutions else {}
    windows = {position: _read_step(step, specs) for position, step in convolutions.items()}
    return {position: window for position, window in windows.items() if window is not None}


def _read_step(step: Aten, specs: Mapping[int, TensorSpec]) -> WindowStep | None:
    if step.kwargs or len(step.args) != 9:
        return None
    source, weight, bias, stride, padding, dilation, transposed, _, groups = step.args
    if not isinstance(source, Value) or not isinstance(weight, Value) or transposed or groups != 1:
        return None
    source_spec, weight_spec, out = (
        specs[index] for index in (source.index, weight.index, step.outs[0])
    )
    kernel = weight_spec.shape[2:]
    rank = len(kernel)
    steps, pads, gaps = (_repeat(each, rank) for each in (stride, padding, dilation))
    if (
        not kernel
        or len(source_spec.shape) != rank + 2
        or math.prod(kernel) == 1
        or steps is None
        or pads is None
        or gaps != (1,) * rank
        or not source_spec.numel
        or not out.numel
        or not _is_dense(weight_spec)
    ):
        return None
    elements = out.numel // out.shape[1] * source_spec.shape[1] * math.prod(kernel)
    operands = [source.index, weight.index, *([bias.index] if isinstance(bias, Value) else [])]
    # Mixed types are converted within the operator.
    dtypes = {specs[index].dtype for index in (*operands, step.outs[0])}
    if elements > _MAX_COPIES * source_spec.numel or len(dtypes) > 1:
        return None
    return WindowStep(step, tuple(operands), kernel, steps, pads)


def _repeat(sizes: Arg, rank: int) -> tuple[int, ...] | None:
    """One number for each dimension: ATen lets one stand for all of them."""
    if not isinstance(sizes, tuple) or not all(isinstance(size, int) for size in sizes):
        return None
    return tuple(int(size) for size in sizes) * (rank if len(sizes) == 1 else 1)


def _is_dense(spec: TensorSpec) -> bool:
    """Whether the elements lie in the order of the dimensions, without gaps."""
    dense = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        if size > 1 and stride != dense:
            return False
        dense *= size
    return True


def make_alone(
    window: WindowStep, specs: Mapping[int, TensorSpec], *, as_product: bool
) -> Program | None:
    """The convolution alone, or as a product; None where no copy has the layout of its result."""
    inputs = tuple(specs[index] for index in window.operands)
    numbers = {index: number for number, index in enumerate(window.operands)}
    if not as_product:
        step = renumber_step(window.step, numbers, (len(inputs),))
        return Program(inputs, (step,), (len(inputs),))
    steps = _make_product(window, specs, numbers, len(inputs))
    return Program(inputs, tuple(steps), (steps[-1].writes[0],)) if steps is not None else None


def replace_windows(
    program: Program, windows: Mapping[int, WindowStep], specs: Mapping[int, TensorSpec]
) -> Program | None:
    """`program` with the convolutions `windows` as products; None where one cannot be."""
    return replace_steps(
        program,
        {position: partial(_make_product, window, specs) for position, window in windows.items()},
    )


def _make_product(
    window: WindowStep, specs: Mapping[int, TensorSpec], numbers: Mapping[int, int], first: int
) -> list[Step] | None:
    """The windows as rows, the weight as columns, their product, and its result in the layout of
    the convolution's.
    """
    steps: list[Step] = []

    def add(target: str, *args: Arg, **kwargs: Arg) -> Value:
        number = first + len(steps)
        steps.append(Aten(target, args, tuple(kwargs.items()), (number,)))
        return Value(number)

    source, weight, out = (specs[index] for index in (*window.operands[:2], window.step.outs[0]))
    rank, counts = len(window.kernel), out.shape[2:]
    value = Value(numbers[window.operands[0]])
    if any(window.padding):
        # From the last dimension to the first, before and behind.
        pads = tuple(pad for pad in reversed(window.padding) for _ in range(2))
        value = add(_PAD, value, pads, 0.0)
    for dimension in range(rank):
        sizes = (window.kernel[dimension], window.stride[dimension])
        value = add(_UNFOLD, value, 2 + dimension, *sizes)
    # Batch and windows first, then channels and the positions within a window.
    order = (0, *range(2, 2 + rank), 1, *range(2 + rank, 2 + 2 * rank))
    copied = add(_CLONE, add(_PERMUTE, value, order), memory_format=torch.contiguous_format)
    taps = source.shape[1] * math.prod(window.kernel)
    rows = add(_VIEW, copied, (source.shape[0] * math.prod(counts), taps))
    columns = add(_T, add(_VIEW, Value(numbers[window.operands[1]]), (weight.shape[0], taps)))
    product = (
        add(_ADDMM, Value(numbers[window.operands[2]]), rows, columns)
        if len(window.operands) > 2
        else add(_MM, rows, columns)
    )
    placed = add(_VIEW, product, (out.shape[0], *counts, weight.shape[0]))
    result = add(_PERMUTE, placed, (0, rank + 1, *range(1, rank + 1)))
    restoring = make_restoring_steps(result.index, first + len(steps), out)
    return None if restoring is None else [*steps, *restoring]
