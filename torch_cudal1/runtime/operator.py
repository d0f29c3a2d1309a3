"""`cudal1::run`: a nested Program as one opaque PyTorch operator, so that Inductor and CUDA graphs
see a single node.

The operator is functional: tensors in, fresh tensors out, shapes from the fake implementation. It
has no autograd: it stands only below AOTAutograd or under no_grad, and refuses inputs that require
gradients. An id is the Program's digest; the Program must have been registered in this process.
"""

from __future__ import annotations

import threading
from functools import cache

import torch

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.ir.value_specs import output_specs
from torch_cudal1.runtime.executor import prepare

__all__ = ["get_program", "register", "run_operator"]

_lock = threading.Lock()
# By digest, so that the same Program from several graphs is one entry, and Inductor's caches see
# the same text in every process.
_programs: dict[str, Program] = {}
_runners: dict[tuple[str, torch.device], Runner] = {}


def register(program: Program) -> str:
    """Make `program` callable through the operator; returns its id (the digest)."""
    digest = program.digest
    with _lock:
        _programs[digest] = program
    return digest


def run_operator() -> torch._ops.OpOverload:
    """The operator `cudal1::run(Tensor[] inputs, str program) -> Tensor[]`, defined at first use."""
    _define()
    operator: torch._ops.OpOverload = torch.ops.cudal1.run.default
    return operator


def get_program(digest: str) -> Program:
    """The Program of an id. Raises ProgramError if this process does not have it."""
    with _lock:
        program = _programs.get(digest)
    if program is None:
        raise ProgramError("operator", f"program {digest[:12]} is not registered in this process")
    return program


def _run(inputs: list[torch.Tensor], program: str) -> list[torch.Tensor]:
    # The operator has no autograd formula: its results would be cut off from the graph silently.
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        raise ProgramError(
            "autograd", "cudal1::run has no gradient; call it under no_grad or below AOTAutograd"
        )
    registered_program = get_program(program)
    device = next(
        (t.device for t in inputs if t.device.type == registered_program.device),
        torch.device(registered_program.device),
    )
    # Without the lock: two threads at a first call may both prepare the Program, and either runner
    # serves.
    runner = _runners.get((program, device))
    if runner is None:
        runner = _runners[program, device] = prepare(registered_program, device)
    # The schema yields Tensor[], which holds no None; `check_program` refuses absent outputs of a
    # nested Program.
    return [out for out in runner(inputs) if out is not None]


def _fake(inputs: list[torch.Tensor], program: str) -> list[torch.Tensor]:
    registered_program = get_program(program)
    device = inputs[0].device if inputs else torch.device(registered_program.device)
    return [
        torch.empty_strided(s.shape, s.strides, dtype=s.torch_dtype, device=device)
        for s in _cache_output_specs(program)
        if s is not None
    ]


# The fake implementation runs at every trace, and shapes of a Program do not change.
@cache
def _cache_output_specs(digest: str) -> tuple[TensorSpec | None, ...]:
    return tuple(output_specs(get_program(digest)))


@cache
def _define() -> torch.library.Library:
    # FRAGMENT: other modules define operators in the same namespace.
    library = torch.library.Library("cudal1", "FRAGMENT")
    library.define("run(Tensor[] inputs, str program) -> Tensor[]")
    library.impl("run", _run, "CPU")
    library.impl("run", _run, "CUDA")
    torch.library.register_fake("cudal1::run", _fake, lib=library)
    return library
