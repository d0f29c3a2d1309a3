"""Computes the steps of a Program that depend on none of its inputs once, when the Program is
prepared, instead of at every call.

Such steps make masks, positions and tables: their operands are constants, or they have none. Their
values cannot change later. Programs write to no value, and a value that may reach the caller, who
could write to it, is made again at every call. A step that names no dtype uses PyTorch's default
dtype, which is in a region's key and guarded at every call. Nothing that depends on a weight is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch.utils._mode_utils import no_dispatch

from torch_cudal1.ir.aliasing import ValueOrigins, makes_fresh_memory, may_return_operand
from torch_cudal1.ir.aten import is_functional, is_random
from torch_cudal1.ir.program import Alloc, Aten, Launch, Program, Step, renumber_steps

__all__ = ["MAX_FOLDED_BYTES", "fold_constants"]

_MakeRunner: TypeAlias = Callable[
    [Program, torch.device], Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]]
]

# Of all values that are kept for one Program: they hold memory for as long as it may be called.
MAX_FOLDED_BYTES = 16 << 20


def fold_constants(program: Program, device: torch.device, run: _MakeRunner) -> Program:
    """The Program with such values as constants, on `device`; the Program itself where there are
    none, or more than MAX_FOLDED_BYTES.

    `run` makes a Program callable there.
    """
    if any(isinstance(step, (Alloc, Launch)) for step in program.steps):
        # A kernel's own Program: its launches fill what it allocates at every call.
        return program
    folded_positions = _find_constant_steps(program)
    folded_values = {out for position in folded_positions for out in program.steps[position].writes}
    rest = [step for position, step in enumerate(program.steps) if position not in folded_positions]
    read = sorted(folded_values & {index for step in rest for index in step.reads})
    # A capture would record these steps into the user's graph in place of running them.
    if not read or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return program
    values = _compute_values(program, sorted(folded_positions), read, device, run)
    return (
        program
        if values is None
        else _replace_by_constants(program, rest, dict(zip(read, values, strict=True)))
    )


def _find_constant_steps(program: Program) -> frozenset[int]:
    """Positions of the steps that depend on no input, without those whose memory may be an
    output's.
    """
    # The caller may write to a result. As a constant it would be changed for every later call.
    handed_out = _find_output_steps(program)
    constant_values = set(range(len(program.inputs), len(program.inputs) + len(program.constants)))
    positions = set()
    for position, step in enumerate(program.steps):
        if (
            position not in handed_out
            and constant_values.issuperset(step.reads)
            and _is_plain(step)
        ):
            positions.add(position)
            constant_values.update(step.writes)
    return frozenset(positions)


def _is_plain(step: Step) -> bool:
    return (
        isinstance(step, Aten)
        and is_functional(step.target)
        # A random step draws new numbers at each call.
        and not is_random(step.target, step.args, dict(step.kwargs))
    )


def _find_output_steps(program: Program) -> set[int]:
    """Positions of the steps whose memory may be an output's, and of the views between them and the
    outputs.
    """
    makers, positions = ValueOrigins(program), set()
    waiting = [out for out in program.outputs if out is not None]
    while waiting:
        position = makers.maker(waiting.pop())
        if position is None or position in positions:
            continue
        positions.add(position)
        step = program.steps[position]
        # Its result may be an operand's memory, so the steps that made the operands count as well.
        if may_return_operand(step) or not makes_fresh_memory(step):
            waiting += step.reads
    return positions


def _compute_values(
    program: Program,
    positions: Sequence[int],
    read: Sequence[int],
    device: torch.device,
    run: _MakeRunner,
) -> list[torch.Tensor] | None:
    """The values `read`, computed now. None where a step fails, or where the values are too large
    or on another device.
    """
    first = len(program.inputs)
    numbers = {index: index - first for index in range(first, first + len(program.constants))}
    body, numbers = renumber_steps((program.steps[position] for position in positions), numbers)
    folded = Program(
        (), body, tuple(numbers[index] for index in read), program.constants, program.payloads
    )
    try:
        # This may run while a model is traced or in inference mode. The values have to be real
        # tensors, and plain ones that every later call can use.
        with no_dispatch(), torch.inference_mode(False), torch.no_grad():
            tensors = [
                tensor for tensor in run(folded, device)([]) if isinstance(tensor, torch.Tensor)
            ]
            if device.type == "cuda":
                # Later calls may read them on any stream, which would not wait for this one.
                torch.cuda.current_stream(device).synchronize()
    except RuntimeError:
        # The step then fails when it is called, as it does in eager
        # (test_what_fails_fails_when_it_is_called).
        return None
    # By storage: an expanded or sliced value keeps all of it.
    fits = sum(tensor.untyped_storage().nbytes() for tensor in tensors) <= MAX_FOLDED_BYTES
    return (
        tensors
        if len(tensors) == len(read)
        and fits
        # A constant is moved to the Program's device, but this value belongs elsewhere.
        and all(tensor.device.type == device.type for tensor in tensors)
        else None
    )


def _replace_by_constants(
    program: Program, rest: Sequence[Step], values: dict[int, torch.Tensor]
) -> Program:
    """The Program without the steps that made `values`, which are its last constants."""
    first_new = len(program.inputs) + len(program.constants)
    numbers = {index: index for index in range(first_new)} | {
        index: first_new + place for place, index in enumerate(values)
    }
    body, numbers = renumber_steps(rest, numbers)
    outputs = tuple(None if out is None else numbers[out] for out in program.outputs)
    new_constants = {f"once-{place}": value for place, value in enumerate(values.values())}
    return Program(
        program.inputs,
        body,
        outputs,
        (*program.constants, *new_constants),
        {**program.payloads, **new_constants},
    )
