"""Makes a checked Program callable: by the C++ executor where it is built, else by the plain Python below, the readable reference.

Both resolve operators, load kernels and work out when each value dies beforehand; what they return only calls them. Neither checks
inputs (the guard in front does) or does autograd: call the result under no_grad or below AOTAutograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from torch_cudal1 import observe
from torch_cudal1.program.as_eager import as_eager
from torch_cudal1.program.aten import overload
from torch_cudal1.program.check import check_program, used_values
from torch_cudal1.program.compiled import NotCompiled, compile_program
from torch_cudal1.program.model import Alloc, Aten, Call, Launch, Program, Step, Value, step_outs
from torch_cudal1.program.once import computed_once

__all__ = ["Launcher", "Runner", "interpret", "prepare", "skip_launch"]

Runner: TypeAlias = Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]]
Values: TypeAlias = list[Any]
Launcher: TypeAlias = Callable[[torch.Tensor, Launch, torch.device], Callable[[Values], None]]
_Action: TypeAlias = Callable[[Values], None]


def prepare(program: Program, device: torch.device) -> Runner:
    """A callable from the Program's inputs to its outputs on `device`.

    Raises ProgramError if the Program breaks a rule, DriverError if a kernel cannot be loaded.
    """
    check_program(program)
    program = computed_once(program, device, interpret)
    compiled = compile_program(program, device)
    if not isinstance(compiled, NotCompiled):
        observe.count("programs_compiled")
        runner: Runner = compiled
        return runner
    observe.record("program", "interpreted", reason=compiled.reason)
    read = [*program.outputs, *(index for step in program.steps for index in used_values(step))]
    return _prepare(program, as_eager(program.steps, read), device, _driver_launcher)


def interpret(program: Program, device: torch.device, *, launcher: Launcher | None = None) -> Runner:
    """The same in plain Python, with the operators that are named. `launcher` makes a launch step a callable; by default the CUDA
    driver (`program.driver`).
    """
    check_program(program)
    return _prepare(program, program.steps, device, launcher or _driver_launcher)


def _prepare(program: Program, steps: Sequence[Step], device: torch.device, launcher: Launcher) -> Runner:
    constants = [program.payloads[name].to(device) for name in program.constants]
    actions = [_action(step, program, device, launcher) for step in steps]
    dying = _dying_values(program)
    plan = list(zip(actions, dying, strict=True))
    size, outputs = program.value_count, program.outputs

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        values: Values = [*inputs, *constants]
        values += [None] * (size - len(values))
        for action, dead in plan:
            action(values)
            for index in dead:
                values[index] = None
        return [None if index is None else values[index] for index in outputs]

    return run


def skip_launch(cubin: torch.Tensor, launch: Launch, device: torch.device) -> Callable[[Values], None]:
    """A launcher that launches nothing: with fake tensors it tells the shapes a Program yields."""
    return lambda values: None


def _driver_launcher(cubin: torch.Tensor, launch: Launch, device: torch.device) -> Callable[[Values], None]:
    from torch_cudal1.program.driver import prepare_launch  # needs libcuda: only where something is launched

    return prepare_launch(cubin, launch, device)


def _action(step: Step, program: Program, device: torch.device, launcher: Launcher) -> _Action:
    if isinstance(step, Aten):
        return _aten_action(step, device)
    if isinstance(step, Alloc):
        return _alloc_action(step, device)
    if isinstance(step, Launch):
        return launcher(program.payloads[step.payload], step, device)
    return _call_action(step, device, launcher)


def _alloc_action(step: Alloc, device: torch.device) -> _Action:
    out, shape, strides, dtype = step.out, step.spec.shape, step.spec.strides, step.spec.torch_dtype

    def run(values: Values) -> None:
        values[out] = torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return run


def _call_action(step: Call, device: torch.device, launcher: Launcher) -> _Action:
    callee, args, outs = _prepare(step.program, step.program.steps, device, launcher), step.args, step.outs

    def run(values: Values) -> None:
        for out, result in zip(outs, callee([values[index] for index in args]), strict=True):
            values[out] = result

    return run


def _aten_action(step: Aten, device: torch.device) -> _Action:
    op = overload(step.target)
    args = tuple(_filler(arg, device) for arg in step.args)
    kwargs = {name: _filler(arg, device) for name, arg in step.kwargs}
    outs = step.outs

    def run_one(values: Values) -> None:
        values[outs[0]] = op(*[fill(values) for fill in args], **{name: fill(values) for name, fill in kwargs.items()})

    def run_many(values: Values) -> None:
        results = op(*[fill(values) for fill in args], **{name: fill(values) for name, fill in kwargs.items()})
        for out, result in zip(outs, results, strict=True):
            values[out] = result

    return run_many if step.many else run_one


def _filler(arg: Any, device: torch.device) -> Callable[[Values], Any]:
    if isinstance(arg, Value):
        index = arg.index
        return lambda values: values[index]
    if isinstance(arg, torch.device):
        return lambda values: device  # the Program names a device type; the ordinal is the caller's
    if isinstance(arg, tuple) and any(True for _ in _nested_values(arg)):
        parts = [_filler(item, device) for item in arg]
        return lambda values: [part(values) for part in parts]
    constant = list(arg) if isinstance(arg, tuple) else arg
    return lambda values: constant


def _nested_values(arg: Any) -> Any:
    for item in arg:
        if isinstance(item, (Value, torch.device)):
            yield item
        elif isinstance(item, tuple):
            yield from _nested_values(item)


def _dying_values(program: Program) -> list[tuple[int, ...]]:
    """For each step, the values nobody needs after it (inputs are the caller's and stay)."""
    last: dict[int, int] = {}
    for position, step in enumerate(program.steps):
        for index in (*used_values(step), *step_outs(step)):
            last[index] = position
    kept = {out for out in program.outputs if out is not None} | set(range(len(program.inputs) + len(program.constants)))
    dying: list[list[int]] = [[] for _ in program.steps]
    for index, position in last.items():
        if index not in kept:
            dying[position].append(index)
    return [tuple(sorted(dead)) for dead in dying]
