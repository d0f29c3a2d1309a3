"""Makes a checked Program callable: by the C++ executor where it is built, else by the interpreter.

Neither of them checks inputs (the guard in front does) or computes gradients: call the result under
no_grad or below AOTAutograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.constant_folding import fold_constants
from torch_cudal1.ir.eager_operators import use_eager_operators
from torch_cudal1.ir.interpreter import Runner, interpret, interpret_steps
from torch_cudal1.ir.program import Launch, Program
from torch_cudal1.runtime.compiled import compile_program

__all__ = ["launch_through_driver", "prepare"]


def prepare(program: Program, device: torch.device) -> Runner:
    """A callable from the Program's inputs to its outputs on `device`.

    Raises ProgramError if the Program breaks a rule, DriverError if a kernel cannot be loaded.
    """
    check_program(program)
    # Before compiling, so that both the C++ executor and the interpreter run fewer steps.
    program = fold_constants(program, device, interpret)
    compiled = compile_program(program, device)
    if not isinstance(compiled, Refusal):
        telemetry.count("programs_compiled")
        runner: Runner = compiled
        return runner
    # A user has to be able to see why a Program is slower than it could be.
    telemetry.record("program", "interpreted", reason=compiled.reason)
    # Every value that a step reads: a batch norm whose statistics are read stays as it was traced.
    read = [*program.outputs, *(index for step in program.steps for index in step.reads)]
    return interpret_steps(
        program, use_eager_operators(program.steps, read), device, launch_through_driver
    )


def launch_through_driver(
    cubin: torch.Tensor, launch: Launch, device: torch.device
) -> Callable[[list[Any]], None]:
    """The launcher of Programs with kernels, through the CUDA driver."""
    # The driver's functions need libcuda, so they are imported only where something is launched.
    from torch_cudal1.device.cuda.driver import prepare_launch

    return prepare_launch(cubin, launch, device)
