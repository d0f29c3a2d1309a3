"""Whether a convolution of few overlapping windows runs as one, or as a matrix product of them,
measured for its shapes on its GPU (`ir.ops.window_steps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_cudal1.core import telemetry
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.device.gpu_lock import lock_gpu
from torch_cudal1.graph.swap import FAILURES
from torch_cudal1.ir.ops.window_steps import (
    WindowStep,
    make_alone,
    read_windows,
    replace_windows,
)
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.search.operator_timing import (
    OperatorChoice,
    draw_operands,
    find_fastest_form,
)

__all__ = ["choose_convolutions"]

_CONVOLUTION, _PRODUCT = "convolution", "product"
_TECHNIQUE = "convolution as product"


def choose_convolutions(program: Program, device: torch.device) -> OperatorChoice:
    """The Program with such convolutions as products, where that is faster; else as it is. Nothing
    of the user's is touched.

    Raises what leaves the CUDA context unusable.
    """
    if device.type != "cuda":
        return OperatorChoice(program)
    try:
        windows = read_windows(program)
        return _choose_each(program, windows, device) if windows else OperatorChoice(program)
    except FAILURES as error:
        if is_sticky(error):
            raise
        telemetry.record("judge", "convolution", failed=f"{type(error).__name__}: {error}"[:200])
        return OperatorChoice(program)


def _choose_each(
    program: Program, windows: Mapping[int, WindowStep], device: torch.device
) -> OperatorChoice:
    specs = value_specs(program)
    is_faster: dict[Any, bool] = {}
    chosen: dict[int, WindowStep] = {}
    with tracing(None), unset_fake_temporarily(), torch.no_grad(), lock_gpu(device, "convolution"):
        for position, window in windows.items():
            shapes = tuple(specs[index] for index in (*window.operands, *window.step.outs))
            form = (shapes, window.stride, window.padding)
            if form not in is_faster:
                is_faster[form] = _is_product_faster(window, specs, device)
            if is_faster[form]:
                chosen[position] = window
    replaced = replace_windows(program, chosen, specs) if chosen else None
    return OperatorChoice(program) if replaced is None else OperatorChoice(replaced, (_TECHNIQUE,))


def _is_product_faster(
    window: WindowStep, specs: Mapping[int, TensorSpec], device: torch.device
) -> bool:
    convolution = make_alone(window, specs, as_product=False)
    product = make_alone(window, specs, as_product=True)
    if convolution is None or product is None:
        return False
    source, weight, *bias = draw_operands([specs[index] for index in window.operands], device)
    trials = [
        [source, weight, *bias],
        [_put_first(source, "nan"), weight, *bias],
        # Times the zeros of the padding it is NaN, for an operator that reads them.
        [source, _put_first(weight, "inf"), *bias],
    ]
    forms = {_CONVOLUTION: convolution, _PRODUCT: product}
    return find_fastest_form(forms, _CONVOLUTION, trials, "convolution") == _PRODUCT


def _put_first(tensor: torch.Tensor, number: str) -> torch.Tensor:
    """A copy with `number` as its first element."""
    changed = tensor.clone()
    changed[(0,) * changed.dim()] = float(number)
    return changed
