"""Interprets a checked Program in plain Python, step by step: the readable reference of what a
Program means.

Operators are resolved, kernels made ready and the last use of each value worked out beforehand; a
call only calls. The caller passes how to launch a kernel (`Launcher`). Inputs are not
checked here, and there is no autograd: call the result under no_grad or below AOTAutograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, Program, Step, Value

__all__ = ["Launcher", "Runner", "interpret", "interpret_steps", "refuse_launch", "skip_launch"]

Runner: TypeAlias = Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]]
Values: TypeAlias = list[Any]
Launcher: TypeAlias = Callable[[torch.Tensor, Launch, torch.device], Callable[[Values], None]]
_Action: TypeAlias = Callable[[Values], None]


def refuse_launch(
    cubin: torch.Tensor, launch: Launch, device: torch.device
) -> Callable[[Values], None]:
    """The launcher of a Program that has no kernel. Raises ProgramError."""
    raise ProgramError(
        "launch",
        f"kernel {launch.symbol!r} in a Program that is interpreted without a launcher; pass `launcher`",
    )


def interpret(
    program: Program, device: torch.device, *, launcher: Launcher = refuse_launch
) -> Runner:
    """A callable from the Program's inputs to its outputs on `device`. It calls the operators that
    the Program names.

    `launcher` makes a launch step a callable, such as `executor.launch_through_driver`. Raises
    ProgramError if the Program breaks a rule.
    """
    check_program(program)
    return interpret_steps(program, program.steps, device, launcher)


def interpret_steps(
    program: Program, steps: Sequence[Step], device: torch.device, launcher: Launcher
) -> Runner:
    """As `interpret`, for a checked Program with `steps` in place of its own."""
    # Moved once, not at every call.
    constants = [program.payloads[name].to(device) for name in program.constants]
    actions = [_make_action(step, program, device, launcher) for step in steps]
    dying = _find_last_uses(program)
    plan = list(zip(actions, dying, strict=True))
    size, outputs = program.value_count, program.outputs

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        values: Values = [*inputs, *constants]
        # One slot for each value: numbers of values are positions in this list.
        values += [None] * (size - len(values))
        for action, dead in plan:
            action(values)
            # Released at the last use, so that PyTorch's allocator can give the memory to the next
            # steps.
            for index in dead:
                values[index] = None
        return [None if index is None else values[index] for index in outputs]

    return run


def skip_launch(
    cubin: torch.Tensor, launch: Launch, device: torch.device
) -> Callable[[Values], None]:
    """A launcher that launches nothing. With fake tensors a Program then yields its shapes."""
    return lambda values: None


def _make_action(step: Step, program: Program, device: torch.device, launcher: Launcher) -> _Action:
    if isinstance(step, Aten):
        return _make_aten_action(step, device)
    if isinstance(step, Alloc):
        return _make_alloc_action(step, device)
    if isinstance(step, Launch):
        return launcher(program.payloads[step.payload], step, device)
    return _call_action(step, device, launcher)


def _make_alloc_action(step: Alloc, device: torch.device) -> _Action:
    out, shape, strides, dtype = step.out, step.spec.shape, step.spec.strides, step.spec.torch_dtype

    def run(values: Values) -> None:
        values[out] = torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return run


def _call_action(step: Call, device: torch.device, launcher: Launcher) -> _Action:
    callee, args, outs = (
        interpret_steps(step.program, step.program.steps, device, launcher),
        step.args,
        step.outs,
    )

    def run(values: Values) -> None:
        for out, result in zip(outs, callee([values[index] for index in args]), strict=True):
            values[out] = result

    return run


def _make_aten_action(step: Aten, device: torch.device) -> _Action:
    op = overload(step.target)
    args = tuple(_make_filler(arg, device) for arg in step.args)
    kwargs = {name: _make_filler(arg, device) for name, arg in step.kwargs}
    outs = step.outs

    def run_one(values: Values) -> None:
        values[outs[0]] = op(
            *[fill(values) for fill in args],
            **{name: fill(values) for name, fill in kwargs.items()},
        )

    def run_many(values: Values) -> None:
        results = op(
            *[fill(values) for fill in args],
            **{name: fill(values) for name, fill in kwargs.items()},
        )
        for out, result in zip(outs, results, strict=True):
            values[out] = result

    return run_many if step.many else run_one


def _make_filler(arg: Any, device: torch.device) -> Callable[[Values], Any]:
    if isinstance(arg, Value):
        index = arg.index
        return lambda values: values[index]
    if isinstance(arg, torch.device):
        # The Program names a device type; the ordinal is the caller's.
        return lambda values: device
    if isinstance(arg, tuple) and any(True for _ in _iter_nested_values(arg)):
        parts = [_make_filler(item, device) for item in arg]
        return lambda values: [part(values) for part in parts]
    # Schemas of operators take lists; a Program holds tuples, which can be hashed.
    constant = list(arg) if isinstance(arg, tuple) else arg
    return lambda values: constant


def _iter_nested_values(arg: Any) -> Any:
    for item in arg:
        if isinstance(item, (Value, torch.device)):
            yield item
        elif isinstance(item, tuple):
            yield from _iter_nested_values(item)


def _find_last_uses(program: Program) -> list[tuple[int, ...]]:
    """For each step, the values that no later step and no output needs (inputs stay: they are the
    caller's).
    """
    last: dict[int, int] = {}
    for position, step in enumerate(program.steps):
        for index in (*step.reads, *step.writes):
            last[index] = position
    # Inputs are the caller's, and constants serve every later call.
    live_values = {out for out in program.outputs if out is not None} | set(
        range(len(program.inputs) + len(program.constants))
    )
    # A value that no step reads dies in the step that makes it.
    dying: list[list[int]] = [[] for _ in program.steps]
    for index, position in last.items():
        if index not in live_values:
            dying[position].append(index)
    return [tuple(sorted(dead)) for dead in dying]
