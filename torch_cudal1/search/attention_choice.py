"""Which of PyTorch's attention operators (flash, cuDNN, memory-efficient) is the fastest for the
shapes of a Program, measured alone on its GPU.

PyTorch chooses one by rules; which is the fastest depends on the shapes and the GPU
(benchmarks/LOG.md). Another operator replaces PyTorch's choice only if it computes the same on
random operands, with rows that a mask hides and with NaN.
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
from torch_cudal1.ir.ops.attention_steps import (
    KINDS,
    AttentionStep,
    make_alone,
    read_attention,
    replace_attention,
)
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.search.operator_timing import (
    OperatorChoice,
    draw_operands,
    find_fastest_form,
)

__all__ = ["choose_attention"]

_HALF = (torch.float16, torch.bfloat16)
_ALLOWED = {
    "flash": torch.backends.cuda.can_use_flash_attention,
    "cudnn": getattr(torch.backends.cuda, "can_use_cudnn_attention", lambda *_: False),
    "efficient": torch.backends.cuda.can_use_efficient_attention,
}


def choose_attention(program: Program, device: torch.device) -> OperatorChoice:
    """The Program with its attentions by the fastest operators, where that differs from PyTorch's
    choice; else as it is. Nothing of the user's is touched: operands and random numbers are its
    own.

    Raises what leaves the CUDA context unusable.
    """
    attentions = read_attention(program)
    if device.type != "cuda" or not attentions:
        return OperatorChoice(program)
    try:
        return _choose_each(program, attentions, device)
    except FAILURES as error:
        if is_sticky(error):
            raise
        telemetry.record("judge", "attention", failed=f"{type(error).__name__}: {error}"[:200])
        return OperatorChoice(program)


def _choose_each(
    program: Program, attentions: Mapping[int, AttentionStep], device: torch.device
) -> OperatorChoice:
    specs = value_specs(program)
    fastest: dict[Any, str] = {}
    kinds: dict[int, str] = {}
    with tracing(None), unset_fake_temporarily(), torch.no_grad(), lock_gpu(device, "attention"):
        for position, attention in attentions.items():
            out = specs[program.steps[position].writes[0]]
            form = (tuple(specs[index] for index in attention.operands), out)
            key = (form, attention.kind, attention.is_causal, attention.scale)
            if key not in fastest:
                fastest[key] = _find_fastest(attention, specs, out, device)
            if fastest[key] != attention.kind:
                kinds[position] = fastest[key]
    replaced = replace_attention(program, kinds, specs) if kinds else None
    if replaced is None:
        return OperatorChoice(program)
    names = sorted({f"{kind} attention" for kind in kinds.values()})
    return OperatorChoice(replaced, tuple(names))


def _find_fastest(
    attention: AttentionStep, specs: dict[int, TensorSpec], out: TensorSpec, device: torch.device
) -> str:
    """The operator for one form of attention; PyTorch's own choice where nothing else is right and
    faster.
    """
    operands = draw_operands([specs[index] for index in attention.operands], device)
    forms = {kind: make_alone(attention, kind, specs, out) for kind in KINDS}
    return find_fastest_form(
        {
            kind: program
            for kind, program in forms.items()
            if program is not None and _is_allowed(kind, attention, operands)
        },
        attention.kind,
        _list_trials(operands),
        "attention",
    )


def _list_trials(operands: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The operands; with a bias also one that hides keys from some rows, and all of them from
    others; and the operands with NaN in one key.
    """
    query, key, value, *bias = operands
    key_with_nan = key.clone()
    key_with_nan[0, 0, 0, 0] = float("nan")
    trials = [operands, [query, key_with_nan, value, *bias]]
    for hiding in (float("-inf"), torch.finfo(query.dtype).min) if bias else ():
        mask = bias[0].clone()
        mask[..., 0, :] = hiding
        mask[..., -1, ::2] = hiding
        trials.append([query, key, value, mask])
    return trials


def _is_allowed(kind: str, attention: AttentionStep, operands: list[torch.Tensor]) -> bool:
    """Whether PyTorch itself would let the operator compute this."""
    query, key, value, *bias = operands
    # With rows and keys of different numbers the operators align a causal mask differently.
    if query.dtype not in _HALF or (attention.is_causal and query.shape[2] != key.shape[2]):
        return kind == attention.kind
    has_fewer_heads = query.shape[1] != key.shape[1]
    parameters = torch.backends.cuda.SDPAParams(
        query, key, value, bias[0] if bias else None, 0.0, attention.is_causal, has_fewer_heads
    )
    return kind == attention.kind or bool(_ALLOWED[kind](parameters, False))
