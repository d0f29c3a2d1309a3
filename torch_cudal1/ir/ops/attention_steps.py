"""PyTorch's three fused attention operators of GPUs, one in place of another.

All three compute softmax(Q K^T * scale + bias) V, from (batch, heads, rows, head size). They differ
in their arguments, in their other results, and in the layout of the first, which is restored here:
a step behind it may view it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch_cudal1.ir.program import (
    Arg,
    Aten,
    Program,
    Step,
    TensorSpec,
    Value,
)
from torch_cudal1.ir.step_replacement import MakeSteps, make_restoring_steps, replace_steps

__all__ = ["KINDS", "AttentionStep", "make_alone", "read_attention", "replace_attention"]

KINDS = ("flash", "cudnn", "efficient")
_TARGETS = {f"aten._scaled_dot_product_{kind}_attention.default": kind for kind in KINDS}
# How many results each has; only the first is the attention's.
_RESULTS = {"flash": 9, "cudnn": 9, "efficient": 4}
_EXPAND = "aten.expand.default"


@dataclass(frozen=True)
class AttentionStep:
    """`operands`: query, key, value and, where there is one, the bias; `scale` None: 1 / sqrt(head
    size).
    """

    kind: str
    operands: tuple[int, ...]
    is_causal: bool
    scale: float | None


def read_attention(program: Program) -> dict[int, AttentionStep]:
    """By position, the steps that are such an attention of inference: without dropout, and of which
    nothing but the first result is read.
    """
    read_values = {index for index in program.outputs if index is not None}
    for step in program.steps:
        read_values.update(step.reads)
    attentions = {}
    for position, step in enumerate(program.steps):
        if not isinstance(step, Aten) or step.target not in _TARGETS:
            continue
        attention = _read_step(step)
        if attention is not None and read_values.isdisjoint(step.outs[1:]):
            attentions[position] = attention
    return attentions


def _read_step(step: Aten) -> AttentionStep | None:
    kind, kwargs = _TARGETS[step.target], dict(step.kwargs)
    scale = kwargs.pop("scale", None)
    # Positional arguments after query, key and value, with the operator's own defaults.
    names: tuple[tuple[str, Arg], ...] = (
        (("dropout_p", 0.0), ("is_causal", False), ("return_debug_mask", False))
        if kind == "flash"
        else (
            ("attn_bias", None),
            ("compute_log_sumexp", False),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("return_debug_mask", False),
        )
    )
    positional = dict(zip((name for name, _ in names), step.args[3:], strict=False))
    arguments = {**dict(names), **positional, **kwargs}
    operands = [*step.args[:3]]
    if arguments.get("attn_bias") is not None:
        operands.append(arguments["attn_bias"])
    if (
        arguments["dropout_p"] != 0
        or arguments["return_debug_mask"]
        or not all(isinstance(operand, Value) for operand in operands)
        or not isinstance(scale, (float, int, type(None)))
    ):
        return None
    indices = tuple(operand.index for operand in operands if isinstance(operand, Value))
    return AttentionStep(kind, indices, bool(arguments["is_causal"]), scale)


def make_alone(
    attention: AttentionStep, kind: str, specs: Mapping[int, TensorSpec], out: TensorSpec
) -> Program | None:
    """The attention alone, by the operator `kind`, with a result as `out`; None where that operator
    has no such argument, or the layout is none that a copy has.
    """
    count = len(attention.operands)
    renumbered = replace(attention, operands=tuple(range(count)))
    inputs = tuple(specs[index] for index in attention.operands)
    steps = _make_steps(renumbered, kind, count, inputs, out)
    if steps is None:
        return None
    return Program(inputs, tuple(steps), (steps[-1].writes[0],))


def replace_attention(
    program: Program, kinds: Mapping[int, str], specs: Mapping[int, TensorSpec]
) -> Program | None:
    """`program` with the attentions at the positions of `kinds` by these operators; None where one
    has no such argument.
    """
    attentions = read_attention(program)

    def make(position: int) -> MakeSteps:
        def make_steps(numbers: Mapping[int, int], first: int) -> list[Step] | None:
            attention = attentions[position]
            operands = tuple(numbers[index] for index in attention.operands)
            return _make_steps(
                replace(attention, operands=operands),
                kinds[position],
                first,
                tuple(specs[index] for index in attention.operands),
                specs[program.steps[position].writes[0]],
            )

        return make_steps

    return replace_steps(program, {position: make(position) for position in kinds})


def _make_steps(
    attention: AttentionStep,
    kind: str,
    first: int,
    operand_specs: tuple[TensorSpec, ...],
    out: TensorSpec,
) -> list[Step] | None:
    """The operator, what expands its bias before and what gives its first result the layout of
    `out` behind; their results are numbered from `first` on, and the last step's first result is
    the attention's.
    """
    operands: tuple[Arg, ...] = tuple(map(Value, attention.operands))
    if kind == "flash" and len(operands) > 3:
        return None
    steps: list[Step] = []
    if kind == "efficient" and kind != attention.kind and len(operands) > 3:
        # Only cuDNN's broadcasts a bias.
        query, key, _, bias_spec = operand_specs
        shape = (*query.shape[:3], key.shape[2])
        if bias_spec.shape != shape:
            steps.append(Aten(_EXPAND, (operands[3], shape), (), (first,)))
            operands = (*operands[:3], Value(first))
            first += 1
    options: tuple[Arg, ...] = (0.0, attention.is_causal)
    if kind != "flash":
        bias = operands[3] if len(operands) > 3 else None
        options = (bias, False, *options)
    scale: tuple[tuple[str, Arg], ...] = (
        () if attention.scale is None else (("scale", attention.scale),)
    )
    outs = tuple(range(first, first + _RESULTS[kind]))
    target = f"aten._scaled_dot_product_{kind}_attention.default"
    steps.append(Aten(target, (*operands[:3], *options), scale, outs, True))
    if kind == attention.kind:
        return steps
    restoring = make_restoring_steps(outs[0], outs[-1] + 1, out)
    return None if restoring is None else [*steps, *restoring]
