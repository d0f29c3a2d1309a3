"""Templates that are a loop nest: element-wise steps around at most one level of row operations,
in one launch or several.

A family of these differs from another by its operators alone: `make_template` takes their handlers
and makes the Template. Tiles come from `codegen.tiles`, launches from `codegen.multi_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.codegen.multi_cta import CtaGroupPrinter, max_registers
from torch_cudal1.kernels.codegen.multi_kernel import Stage, find_first_nest, plan_stages
from torch_cudal1.kernels.codegen.prelude import POINTERS
from torch_cudal1.kernels.codegen.tiles import choose_tiles
from torch_cudal1.kernels.codegen.triton_text import TritonPrinter, print_kernel
from torch_cudal1.kernels.expr.nodes import Node
from torch_cudal1.kernels.ops.handlers import Handler
from torch_cudal1.kernels.proposal import KernelSource, Proposal
from torch_cudal1.kernels.template import (
    FusionRules,
    LoweredKernels,
    ProposalRequest,
    Template,
    TemplateInput,
    keep_lowerable,
)

__all__ = ["lower_loop_nest", "lower_stages", "make_template"]

# Of CUDA's first grid dimension.
_MAX_GRID_PROGRAMS = 2**31 - 1
_WARPS = (1, 2, 4, 8, 16, 32)
_ARCHITECTURES = "sm_80 and newer"
_DTYPES = "fp32, fp16, bf16"


def make_template(
    family: str,
    handlers: Mapping[str, Handler],
    fusion: FusionRules,
    *,
    summary: str,
    dtypes: str = _DTYPES,
    is_shortlisted: bool = False,
    matches_expressions: Callable[[Collection[str], tuple[Node, ...]], bool] | None = None,
) -> Template:
    """The template of a family of loop nests, whose operators are those of `handlers`."""
    return Template(
        family=family,
        summary=summary,
        architectures=_ARCHITECTURES,
        dtypes=dtypes,
        propose=_propose,
        lower=lower_loop_nest,
        fusion=fusion,
        handlers=handlers,
        matches_expressions=matches_expressions,
        is_shortlisted=is_shortlisted,
    )


def _propose(workload: TemplateInput, request: ProposalRequest) -> tuple[Proposal, ...]:
    """Of the numbers of programs that may share a row, only the first that fits its dimensions."""
    traced = workload.trace
    configs = choose_tiles(find_first_nest(traced.outputs))
    proposals = keep_lowerable(
        lower_loop_nest, workload, (Proposal(traced.family, config) for config in configs)
    )
    # `choose_tiles` lists many numbers of programs a row, since not every number fits a row's
    # dimensions.
    later_splits = [proposal for proposal in proposals if proposal.number("split", 1) != 1][1:]
    return tuple(proposal for proposal in proposals if proposal not in later_splits)[
        : request.limit
    ]


def lower_loop_nest(workload: TemplateInput, proposal: Proposal) -> LoweredKernels:
    """The kernels of a tile. Raises NotLowerableError when the expressions do not fit loop nests,
    ProgramError when the proposal is nonsense for them.
    """
    traced = workload.trace
    specs = dict(traced.leaves) | workload.output_specs
    stages = plan_stages(traced.outputs, proposal, specs, workload.program.value_count)
    return lower_stages(stages, traced.family, specs)


def lower_stages(
    stages: tuple[Stage, ...], family: str, specs: Mapping[int, TensorSpec]
) -> LoweredKernels:
    """One kernel a stage; its symbol begins with `family`."""
    kernels = []
    written: dict[int, TensorSpec] = {}
    for nest, tile, warps in stages:
        # Triton takes powers of two only, and a block has at most 1024 threads.
        if warps not in _WARPS:
            raise ProgramError("proposal", f"{warps} warps; expected a power of two up to 32")
        group = tile.cta_group
        printer = CtaGroupPrinter(nest, tile) if group else TritonPrinter(nest, tile)
        symbol, text, values = print_kernel(printer, family)
        grid = -(-nest.row_count // tile.rows) * (group.size if group else 1)
        if grid > _MAX_GRID_PROGRAMS:
            raise NotLowerableError(f"a grid of {grid} programs")
        arguments = tuple((value, POINTERS[specs[value].torch_dtype]) for value in values)
        # CTAs wait for one another, so as many as possible must run at the same time: their
        # registers are limited. Other kernels leave the choice to the compiler.
        registers = max_registers(tile, warps) if group else None
        kernels.append(KernelSource(symbol, text, arguments, grid, warps, registers=registers))
        # Scratch values are written too: each needs memory in the emitted Program.
        stores = (s.value for s in nest.statements if s.kind == "store")
        written |= {value: specs[value] for value in (*stores, *printer.scratch)}
    return LoweredKernels(tuple(kernels), written)
