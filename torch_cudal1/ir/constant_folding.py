"""Computes what depends on none of a Program's inputs once, when the Program is made ready, instead
of at every call.

Masks, positions, tables: steps whose operands are constants or nothing. Nothing can change them
afterwards. What a step makes without naming a dtype has PyTorch's default one, which is in a
region's key and guarded at every call; Programs write to no value; and what may reach the caller,
who could write to it, is made anew at every call. Nothing that depends on a weight is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch.utils._mode_utils import no_dispatch

from torch_cudal1.ir.aliasing import Makers, makes_memory, passes_on
from torch_cudal1.ir.aten import is_functional, is_random
from torch_cudal1.ir.check import used_values
from torch_cudal1.ir.program import (
    Alloc,
    Aten,
    Launch,
    Program,
    Step,
    renumbered_in_turn,
    step_outs,
)

__all__ = ["MOST_BYTES", "computed_once"]

_Run: TypeAlias = Callable[
    [Program, torch.device], Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]]
]

MOST_BYTES = 16 << 20  # of all that is kept for one Program


def computed_once(program: Program, device: torch.device, run: _Run) -> Program:
    """The Program with such values as constants, on `device`; the Program itself where there are
    none, or more than MOST_BYTES.

    `run` makes a Program callable there.
    """
    if any(isinstance(step, (Alloc, Launch)) for step in program.steps):
        return program  # a kernel's own Program: what it allocates it fills
    apart = _independent(program)
    made = {out for position in apart for out in step_outs(program.steps[position])}
    rest = [step for position, step in enumerate(program.steps) if position not in apart]
    read = sorted(made & {index for step in rest for index in used_values(step)})
    if not read or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return program
    values = _values(program, sorted(apart), read, device, run)
    return program if values is None else _with(program, rest, dict(zip(read, values, strict=True)))


def _independent(program: Program) -> frozenset[int]:
    """Positions of the steps that depend on no input, but for those whose memory may be an
    output's.
    """
    handed_out = _handed_out(program)
    known = set(range(len(program.inputs), len(program.inputs) + len(program.constants)))
    found = set()
    for position, step in enumerate(program.steps):
        if position not in handed_out and known.issuperset(used_values(step)) and _is_plain(step):
            found.add(position)
            known.update(step_outs(step))
    return frozenset(found)


def _is_plain(step: Step) -> bool:
    return (
        isinstance(step, Aten)
        and is_functional(step.target)
        and not is_random(step.target, step.args, dict(step.kwargs))
    )


def _handed_out(program: Program) -> set[int]:
    """Steps whose memory may be an output's, and the views in between."""
    makers, found = Makers(program), set()
    waiting = [out for out in program.outputs if out is not None]
    while waiting:
        position = makers.maker(waiting.pop())
        if position is None or position in found:
            continue
        found.add(position)
        step = program.steps[position]
        if passes_on(step) or not makes_memory(step):
            waiting += used_values(step)
    return found


def _values(
    program: Program, apart: Sequence[int], read: Sequence[int], device: torch.device, run: _Run
) -> list[torch.Tensor] | None:
    """The values `read`, computed now; None where that fails, which is then the call's failure, or
    where they are too much.
    """
    first = len(program.inputs)
    names = {index: index - first for index in range(first, first + len(program.constants))}
    body, names = renumbered_in_turn((program.steps[position] for position in apart), names)
    alone = Program(
        (), body, tuple(names[index] for index in read), program.constants, program.payloads
    )
    try:
        with (
            no_dispatch(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # whatever is being traced, these are real
            found = [one for one in run(alone, device)([]) if isinstance(one, torch.Tensor)]
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # they will be read on any stream
    except RuntimeError:
        return None
    fits = sum(one.untyped_storage().nbytes() for one in found) <= MOST_BYTES
    return (
        found
        if len(found) == len(read) and fits and all(one.device.type == device.type for one in found)
        else None
    )


def _with(program: Program, rest: Sequence[Step], values: dict[int, torch.Tensor]) -> Program:
    """The Program without the steps that made `values`, which are its last constants."""
    old = len(program.inputs) + len(program.constants)
    names = {index: index for index in range(old)} | {
        index: old + place for place, index in enumerate(values)
    }
    body, names = renumbered_in_turn(rest, names)
    outputs = tuple(None if out is None else names[out] for out in program.outputs)
    kept = {f"once-{place}": value for place, value in enumerate(values.values())}
    return Program(
        program.inputs, body, outputs, (*program.constants, *kept), {**program.payloads, **kept}
    )
