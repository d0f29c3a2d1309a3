"""Which of PyTorch's attention operators (flash, cuDNN, memory-efficient) is the fastest for the
shapes of a Program, measured alone on its GPU.

PyTorch chooses one by rules; which is the fastest depends on the shapes and the GPU
(benchmarks/LOG.md). Another operator replaces PyTorch's choice only if it computes the same on
random operands, with rows that a mask hides and with NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_cudal1.core import telemetry
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.device.gpu_lock import lock_gpu
from torch_cudal1.graph.swap import FAILURES
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.ops.attention_steps import (
    KINDS,
    AttentionStep,
    make_alone,
    read_attention,
    replace_attention,
)
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.runtime.cuda_graph import capture_calls
from torch_cudal1.runtime.executor import prepare

__all__ = ["AttentionChoice", "choose_attention"]

# Of PyTorch's own choice over another operator, below which its choice stays.
MIN_SPEEDUP = 1.05
# Calls in one CUDA graph, and replays of it: a call alone takes less than a launch.
CALLS, REPLAYS = 10, 7
# Units in the last place of the format by which two operators may differ, root mean square.
MAX_UNITS = 4
_HALF = (torch.float16, torch.bfloat16)
_ALLOWED = {
    "flash": torch.backends.cuda.can_use_flash_attention,
    "cudnn": getattr(torch.backends.cuda, "can_use_cudnn_attention", lambda *_: False),
    "efficient": torch.backends.cuda.can_use_efficient_attention,
}


@dataclass(frozen=True)
class AttentionChoice:
    """`program` with the fastest operators, and for each form of attention which operator took
    PyTorch's place.
    """

    program: Program
    techniques: tuple[str, ...] = ()


def choose_attention(program: Program, device: torch.device) -> AttentionChoice:
    """The Program with its attentions by the fastest operators, where that differs from PyTorch's
    choice; else as it is. Nothing of the user's is touched: operands and random numbers are its
    own.

    Raises what leaves the CUDA context unusable.
    """
    attentions = read_attention(program)
    if device.type != "cuda" or not attentions:
        return AttentionChoice(program)
    try:
        return _choose_each(program, attentions, device)
    except FAILURES as error:
        if is_sticky(error):
            raise
        telemetry.record("judge", "attention", failed=f"{type(error).__name__}: {error}"[:200])
        return AttentionChoice(program)


def _choose_each(
    program: Program, attentions: Mapping[int, AttentionStep], device: torch.device
) -> AttentionChoice:
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
        return AttentionChoice(program)
    names = sorted({f"{kind} attention" for kind in kinds.values()})
    return AttentionChoice(replaced, tuple(names))


def _find_fastest(
    attention: AttentionStep, specs: dict[int, TensorSpec], out: TensorSpec, device: torch.device
) -> str:
    """The operator for one form of attention; PyTorch's own choice where nothing else is right and
    faster.
    """
    generator = torch.Generator(device).manual_seed(0)
    operands = [_draw(specs[index], device, generator) for index in attention.operands]
    trials = _list_trials(operands)
    own = make_alone(attention, attention.kind, specs, out)
    assert own is not None
    own_run = prepare(own, device)
    references = [own_run(inputs)[0] for inputs in trials]
    graphs = {attention.kind: _capture(own_run, operands)}
    for kind in KINDS:
        alone = make_alone(attention, kind, specs, out)
        if kind == attention.kind or alone is None or not _is_allowed(kind, attention, operands):
            continue
        try:
            run = prepare(alone, device)
            results = [run(inputs)[0] for inputs in trials]
            if all(map(_is_close, results, references)):
                graphs[kind] = _capture(run, operands)
        except FAILURES as error:
            if is_sticky(error):
                raise
            telemetry.record("judge", "attention", failed=f"{kind}: {error}"[:200])
    medians_us = _time_graphs(graphs)
    fastest = min(medians_us, key=medians_us.__getitem__)
    pays = medians_us[attention.kind] >= MIN_SPEEDUP * medians_us[fastest]
    kind = fastest if pays else attention.kind
    shape = [tuple(operand.shape) for operand in operands]
    telemetry.record("judge", "attention", shapes=shape, runs=kind, medians_us=dict(medians_us))
    return kind


def _draw(spec: TensorSpec, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Normal random numbers in the layout of `spec`, which may have expanded dimensions."""
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True)
    )
    values = torch.randn(extent, device=device, generator=generator, dtype=torch.float32)
    return values.to(spec.torch_dtype).as_strided(spec.shape, spec.strides)


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


def _is_close(result: Any, reference: Any) -> bool:
    """Whether both have NaN at the same places and differ by a few units in the last place
    elsewhere.
    """
    if not torch.equal(result.isnan(), reference.isnan()):
        return False
    numbers = reference.nan_to_num(0.0).double()
    error = (result.nan_to_num(0.0).double() - numbers).norm()
    return bool(error <= MAX_UNITS * torch.finfo(reference.dtype).eps * numbers.norm())


def _capture(run: Runner, operands: list[torch.Tensor]) -> Callable[[], object]:
    def call_often() -> None:
        for _ in range(CALLS):
            run(operands)

    # Once before: libraries make their plans at the first call, which cannot be captured.
    run(operands)
    device = operands[0].device
    torch.cuda.synchronize(device)
    return capture_calls(call_often, device)


def _time_graphs(graphs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of one call of each, medians of replays in turns."""
    samples: dict[str, list[float]] = {kind: [] for kind in graphs}
    for replay in graphs.values():
        replay()
    for _ in range(REPLAYS):
        for kind, replay in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            samples[kind].append(1e3 * begin.elapsed_time(end) / CALLS)
    return {kind: median(times) for kind, times in samples.items()}
