"""Compiles a checked Program for the C++ executor: inlines nested Programs, renumbers values, loads
kernels and finds the last use of each value.

The result computes what `interpret` computes, in less time. For a Program that the C++ executor
does not serve there is a `Refusal`, and the interpreter runs it. `executor` chooses between both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from torch_cudal1.core import native
from torch_cudal1.core.errors import ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda import addresses, driver
from torch_cudal1.ir.eager_operators import use_eager_operators
from torch_cudal1.ir.program import (
    Alloc,
    Aten,
    Call,
    Launch,
    LaunchArg,
    Program,
    Step,
    Value,
    renumber_arg,
    renumber_step,
)

__all__ = ["compile_program"]

Load: TypeAlias = Callable[[torch.Tensor, Launch, torch.device], driver.LoadedLaunch]
_InlinedStep: TypeAlias = "Aten | Alloc | _Kernel"


@dataclass(frozen=True)
class _Kernel:
    """A launch with its machine code, which belongs to the Program that it came from."""

    launch: Launch
    cubin: torch.Tensor


@dataclass
class _InlinedProgram:
    """A Program without nested ones. Its values are numbered: inputs, `constants`, then `steps`."""

    inputs: int
    constants: list[torch.Tensor]
    steps: list[_InlinedStep] = field(default_factory=list)
    values: int = 0
    outputs: list[int | None] = field(default_factory=list)


def compile_program(
    program: Program, device: torch.device, *, load: Load | None = None
) -> Any | Refusal:
    """A `_native.Plan` for `device`: called with a sequence of tensors, it returns a list of
    tensors and None.

    `load` makes a kernel ready (by default `driver.load_launch`). The Program must have passed
    `check_program`. Raises ProgramError and DriverError as `executor.prepare` does.
    """
    extension = native.extension()
    if extension is None:
        return Refusal(native.status()[1])
    if device.type == "cuda" and torch.cuda.is_available():
        # The tensors and kernels of all its calls are on one device.
        # "cuda" alone would mean the current device of each call, but a kernel is loaded on one
        # device.
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
    flat = _inline_calls(program, device)
    loaded = [
        (load or driver.load_launch)(s.cubin, s.launch, device) if isinstance(s, _Kernel) else None
        for s in flat.steps
    ]
    kernels = [kernel for kernel in loaded if kernel is not None]
    # Of any kernel: context and functions are the same for all of them on one device.
    launch_addresses = addresses.find_launch_addresses(kernels[0]) if kernels else None
    if isinstance(launch_addresses, Refusal):
        return launch_addresses
    steps = [
        _pack_step(step, kernel, device) for step, kernel in zip(flat.steps, loaded, strict=True)
    ]
    # Inputs belong to the caller and constants to every call, so neither dies; outputs are handed
    # out.
    dying = _find_last_uses(
        [_read_step(step) for step in flat.steps],
        live_values={*range(flat.inputs + len(flat.constants)), *flat.outputs},
    )
    plan = list(zip(steps, dying, strict=True))
    arguments = (
        flat.inputs,
        flat.values,
        tuple(flat.constants),
        tuple(flat.outputs),
        device,
        launch_addresses,
        tuple(plan),
        Value,
        addresses.raise_launch_failure,
    )
    # The extension refuses what a plan cannot hold; the interpreter runs such a Program.
    try:
        return extension.Plan(*arguments)
    except NotImplementedError as reason:
        return Refusal(str(reason))


def _inline_calls(program: Program, device: torch.device) -> _InlinedProgram:
    """`program` without nested Programs, with eager's operators and its constants on `device`."""
    # Copied once here, not at every call.
    constants = [tensor.to(device) for tensor in _iter_constants(program)]
    flat = _InlinedProgram(
        len(program.inputs), constants, values=len(program.inputs) + len(constants)
    )
    flat.outputs = _inline(
        program, list(range(flat.inputs)), flat, iter(range(flat.inputs, flat.values))
    )
    reads = (index for step in flat.steps for index in _read_step(step).reads)
    # After inlining: only now is it known whether any step reads a batch norm's statistics.
    flat.steps = use_eager_operators(flat.steps, [*flat.outputs, *reads])
    return flat


def _iter_constants(program: Program) -> Iterable[torch.Tensor]:
    """The constants of the Program and of every nested Program, in the order in which `_inline`
    uses them.
    """
    yield from (program.payloads[name] for name in program.constants)
    for step in program.steps:
        if isinstance(step, Call):
            yield from _iter_constants(step.program)


def _inline(
    program: Program, args: Sequence[int], flat: _InlinedProgram, constants: Any
) -> list[int | None]:
    """Append the steps of `program`, called with the values `args`, to `flat`. Returns the values
    of its outputs.
    """
    names = [*args, *(next(constants) for _ in program.constants)]
    for step in program.steps:
        if isinstance(step, Call):
            names += _inline(step.program, [names[index] for index in step.args], flat, constants)
            continue
        outs = tuple(range(flat.values, flat.values + len(step.writes)))
        flat.values += len(outs)
        flat.steps.append(_renumber(step, names, outs, program))
        names += outs
    return [None if index is None else names[index] for index in program.outputs]


def _renumber(
    step: Step, names: Sequence[int], outs: tuple[int, ...], program: Program
) -> _InlinedStep:
    if isinstance(step, Alloc):
        return replace(step, out=outs[0])
    if isinstance(step, Aten):
        return renumber_step(step, names, outs)  # type: ignore[return-value]  # an Aten as it was
    # The only kind that is left: `_inline` has replaced the calls.
    assert isinstance(step, Launch)
    args = tuple(LaunchArg(arg.kind, renumber_arg(arg.value, names)) for arg in step.args)
    return _Kernel(
        replace(step, args=args, aligned=tuple(names[index] for index in step.aligned)),
        program.payloads[step.payload],
    )


def _pack_step(
    step: _InlinedStep, kernel: driver.LoadedLaunch | None, device: torch.device
) -> tuple[Any, ...]:
    """A step as the tuple that csrc/plan_build.cpp reads."""
    if isinstance(step, Alloc):
        return ("alloc", step.out, step.spec.shape, step.spec.strides, step.spec.torch_dtype)
    if isinstance(step, Aten):
        namespace, name, overload = step.target.split(".")
        args = tuple(_fill_in_device(arg, device) for arg in step.args)
        kwargs = {key: _fill_in_device(arg, device) for key, arg in step.kwargs}
        return (
            "aten",
            f"{namespace}::{name}",
            # The C++ dispatcher names the default overload by an empty text.
            "" if overload == "default" else overload,
            args,
            kwargs,
            step.outs,
            step.many,
        )
    if kernel is None:
        raise ProgramError("launch", f"kernel {step.launch.symbol!r} was not loaded")
    return ("launch", *addresses.pack_launch(kernel))


def _fill_in_device(arg: Any, device: torch.device) -> Any:
    """`arg` with `device` in the place of a device type, and lists in the place of tuples.

    A Program names a device type only, so the ordinal is the caller's. Schemas of operators take
    lists, while a Program holds tuples, which can be hashed.
    """
    if isinstance(arg, torch.device):
        return device
    return [_fill_in_device(item, device) for item in arg] if isinstance(arg, tuple) else arg


def _read_step(step: _InlinedStep) -> Step:
    return step.launch if isinstance(step, _Kernel) else step


def _find_last_uses(steps: Sequence[Step], live_values: set[int | None]) -> list[tuple[int, ...]]:
    """For each step, the values that no later step and no output needs."""
    last = {
        index: position
        for position, step in enumerate(steps)
        for index in (*step.reads, *step.writes)
    }
    # A value is released at its last use, so that its memory serves the steps behind it.
    dying: list[list[int]] = [[] for _ in steps]
    for index, position in last.items():
        if index not in live_values:
            dying[position].append(index)
    return [tuple(sorted(dead)) for dead in dying]
