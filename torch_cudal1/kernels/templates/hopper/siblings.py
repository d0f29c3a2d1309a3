"""The template of products that share their left operand, each with steps and a result of its own:
query, key and value of attention, or the halves of a gated layer, in one launch (`wgmma.cu`).

Right operands are read where they lie, so nothing is copied together, and a weight that changes is
never stale.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.codegen.loop_nest import build_epilogue_nest
from torch_cudal1.kernels.expr.from_program import Output, TracedProgram
from torch_cudal1.kernels.expr.nodes import Dot, Node, find_nodes
from torch_cudal1.kernels.ops.matmul import make_product
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.kernels.template import (
    FusionRules,
    LoweredKernels,
    ProposalRequest,
    Template,
    TemplateInput,
    keep_lowerable,
)
from torch_cudal1.kernels.templates.gemm_tiled import GemmParts
from torch_cudal1.kernels.templates.gemm_tiles import (
    choose_wgmma_tiles,
    order_by_bound,
    read_schedule,
)
from torch_cudal1.kernels.templates.hopper.half_precision import lower_siblings

__all__ = ["TEMPLATE"]

_FAMILY = "sibling_gemm"


def _matches(families: Collection[str], nodes: tuple[Node, ...]) -> bool:
    """Several products, of which each output is made of one."""
    if "gemm" not in families or len(find_nodes(Dot, nodes)) < 2:
        return False
    return all(len(find_nodes(Dot, (node,))) == 1 for node in nodes)


def _read_siblings(traced: TracedProgram) -> list[GemmParts]:
    """The products in the order of their outputs. Raises NotLowerableError for one that is not in
    memory as it is read.
    """
    outputs_of_dot: dict[int, list[Output]] = {}
    dots: dict[int, Dot] = {}
    for output in traced.outputs:
        (dot,) = find_nodes(Dot, (output.node,))
        dots[id(dot)] = dot
        outputs_of_dot.setdefault(id(dot), []).append(output)
    return [
        GemmParts(traced, dot, make_product(dot), build_epilogue_nest(tuple(outputs), dot))
        for dot, outputs in zip(dots.values(), outputs_of_dot.values(), strict=True)
    ]


def _propose(workload: TemplateInput, request: ProposalRequest) -> tuple[Proposal, ...]:
    # wgmma is in sm_90a only.
    if request.sm != 90:
        return ()
    products = [parts.product for parts in _read_siblings(workload.trace)]
    # As one product of all columns, which is what a wave of blocks sees.
    whole = replace(products[0], n=sum(product.n for product in products))
    tiles = choose_wgmma_tiles(whole, min(product.n for product in products))
    schedules = order_by_bound(whole, [tile for tile in tiles if tile.split == 1])
    proposals = [Proposal(_FAMILY, asdict(schedule)) for schedule in schedules]
    return keep_lowerable(_lower, workload, proposals)[: request.limit]


def _lower(workload: TemplateInput, proposal: Proposal) -> LoweredKernels:
    schedule = read_schedule(replace(proposal, family="gemm"))
    if schedule.method != "wgmma" or schedule.split > 1:
        raise NotLowerableError(f"siblings by method {schedule.method}, split {schedule.split}")
    kernel = lower_siblings(_read_siblings(workload.trace), schedule)
    return LoweredKernels((kernel,), workload.output_specs)


TEMPLATE = Template(
    family=_FAMILY,
    summary="Several matrix products of one left operand, each with the element-wise steps after "
    "it, in one launch.",
    architectures="sm_90",
    dtypes="fp16, bf16",
    propose=_propose,
    lower=_lower,
    fusion=FusionRules("product"),
    matches_expressions=_matches,
    is_shortlisted=True,
)
