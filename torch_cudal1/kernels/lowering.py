"""From a reference Program to proposals, from a proposal to kernel sources, and from compiled
kernels to the emitted Program: all steps of `codegen.compile.build` but the compiler.

The templates of `registry` do the work; nothing here names a family.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.program import Alloc, Launch, LaunchArg, Program, Value
from torch_cudal1.kernels.expr.from_program import TracedProgram
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.kernels.registry import find_template, match_template, trace
from torch_cudal1.kernels.template import LoweredKernels, ProposalRequest, TemplateInput

__all__ = ["CompiledKernel", "LoweredKernels", "assemble", "lower", "propose"]

# Every Triton kernel takes two pointers to scratch memory behind its own arguments. Kernels that
# need scratch are refused, so null serves.
_HIDDEN = (LaunchArg("null"), LaunchArg("null"))
# Older GPUs have no bfloat16 and no maximum that propagates NaN.
_MIN_SM = 80


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel: machine code, warps (the compiler may raise them), and dynamic shared
    memory in bytes.
    """

    payload: str
    body: torch.Tensor
    warps: int
    shared_bytes: int


def propose(
    program: Program, sm: int, tf32_ops: Collection[str] = (), *, most: int = 8
) -> tuple[Proposal, ...]:
    """At most `most` ways to lower a fusion group's reference Program, best guess first; () when no
    template covers it.

    `sm` is the compute capability (90 for sm_90). `tf32_ops` are the op classes that may use TF32:
    "matmul" admits products that are no more exact than that, "conv" convolutions.
    """
    if sm < _MIN_SM:
        return ()
    try:
        template, workload = match_template(program)
        return template.propose(workload, ProposalRequest(sm, tf32_ops, most))
    except NotLowerableError:
        # That no template covers a group is an ordinary answer: `build` gives the reason.
        return ()


def lower(
    program: Program, proposal: Proposal, *, traced: TracedProgram | None = None
) -> LoweredKernels:
    """The kernels of a proposal; `traced`: the expressions of `program`, where a caller has them.

    Raises NotLowerableError (no template covers the fusion group) or ProgramError (the proposal is
    nonsense for it).
    """
    template = find_template(proposal.family)
    if traced is None:
        # A template of whole Programs reads the step itself: its operators have no expressions.
        if template is not None and template.matches_program is not None:
            return template.lower(TemplateInput(program), proposal)
        traced = trace(program)
    # A proposal may come from a cache or another process: it is nonsense for a group of another
    # family.
    if template is None or proposal.family != traced.family:
        raise ProgramError(
            "proposal", f"family {proposal.family!r} for a fusion group of {traced.family!r}"
        )
    return template.lower(TemplateInput(program, traced), proposal)


def assemble(
    program: Program, lowered: LoweredKernels, cubins: Mapping[str, CompiledKernel]
) -> Program:
    """The emitted Program: inputs and constants of the reference, one Alloc a written value, one
    Launch a kernel.
    """
    # The emitted Program numbers its values anew: inputs and constants, then what its kernels
    # write.
    count = len(program.inputs) + len(program.constants)
    numbers = {value: value for value in range(count)} | {
        value: count + i for i, value in enumerate(lowered.written)
    }
    steps: list[Alloc | Launch] = [
        Alloc(numbers[value], spec) for value, spec in lowered.written.items()
    ]
    for kernel in lowered.kernels:
        cubin = cubins[kernel.symbol]
        pointers = tuple(numbers[value] for value, _ in kernel.arguments)
        # A launch counts clusters, a kernel its blocks: with blocks twice the tiles ran, beyond all
        # operands.
        cluster = 1 if kernel.cuda is None else kernel.cuda.cluster
        launch = Launch(
            payload=cubin.payload,
            symbol=kernel.symbol,
            grid=(kernel.grid // cluster, 1, 1),
            # The compiler may raise the warps of a kernel: what it made is launched.
            block=32 * cubin.warps,
            shared_bytes=cubin.shared_bytes,
            args=tuple(LaunchArg("ptr", Value(p)) for p in pointers)
            + _HIDDEN * (kernel.cuda is None),
            aligned=pointers,
            cluster=cluster,
        )
        steps.append(launch)
    payloads = {name: program.payloads[name] for name in program.constants} | {
        c.payload: c.body for c in cubins.values()
    }
    outputs = tuple(None if value is None else numbers[value] for value in program.outputs)
    return Program(program.inputs, tuple(steps), outputs, program.constants, payloads)
