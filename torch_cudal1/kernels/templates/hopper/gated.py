"""The template of a gate times what it opens: two products of one left operand, and element-wise
steps that make one result of both, as the feed-forward layers of Llama, Qwen, Gemma and T5 have
them (`wgmma.cu`).

A tile has the same columns of both right operands, so neither product goes through memory. Right
operands are read where they lie, and a weight that changes is never stale.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.codegen.loop_nest import build_epilogue_nest
from torch_cudal1.kernels.expr.affine import row_major
from torch_cudal1.kernels.expr.from_program import TracedProgram
from torch_cudal1.kernels.expr.nodes import Dot, Leaf, Node, find_nodes, substitute
from torch_cudal1.kernels.ops.matmul import Product, make_product
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
from torch_cudal1.kernels.templates.hopper.half_precision import lower_gated

__all__ = ["TEMPLATE"]

_FAMILY = "gated_gemm"
# The value that stands for the result of the second product, which is in no memory.
_SECOND_RESULT = -2


def _matches(families: Collection[str], nodes: tuple[Node, ...]) -> bool:
    """One output that is made of two products, of which neither is made of the other."""
    if "gemm" not in families or len(nodes) != 1:
        return False
    dots = find_nodes(Dot, nodes)
    return len(dots) == 2 and not any(find_nodes(Dot, (dot.left, dot.right)) for dot in dots)


def _read_pair(traced: TracedProgram) -> tuple[GemmParts, Product]:
    """The first product with the steps after both, and the second product. Raises
    NotLowerableError for one that is not in memory as it is read.
    """
    first, second = find_nodes(Dot, tuple(output.node for output in traced.outputs))
    result = Leaf(second.shape, second.dtype, _SECOND_RESULT, row_major(second.shape))
    outputs = tuple(
        replace(output, node=substitute(output.node, {second: result})) for output in traced.outputs
    )
    nest = build_epilogue_nest(outputs, first)
    return GemmParts(traced, first, make_product(first), nest), make_product(second)


def _propose(workload: TemplateInput, request: ProposalRequest) -> tuple[Proposal, ...]:
    # wgmma is in sm_90a only.
    if request.sm != 90:
        return ()
    parts, second = _read_pair(workload.trace)
    # As one product of the columns of both, which is what a wave of blocks sees.
    whole = replace(parts.product, n=parts.product.n + second.n)
    schedules = order_by_bound(
        whole, [tile for tile in choose_wgmma_tiles(whole) if tile.split == 1]
    )
    proposals = [Proposal(_FAMILY, asdict(schedule)) for schedule in schedules]
    return keep_lowerable(_lower, workload, proposals)[: request.limit]


def _lower(workload: TemplateInput, proposal: Proposal) -> LoweredKernels:
    schedule = read_schedule(replace(proposal, family="gemm"))
    if schedule.method != "wgmma" or schedule.split > 1:
        raise NotLowerableError(f"a gate by method {schedule.method}, split {schedule.split}")
    parts, second = _read_pair(workload.trace)
    kernel = lower_gated(parts, second, _SECOND_RESULT, schedule)
    return LoweredKernels((kernel,), workload.output_specs)


TEMPLATE = Template(
    family=_FAMILY,
    summary="Two matrix products of one left operand and the element-wise steps that make one "
    "result of them, as a gate times what it opens.",
    architectures="sm_90",
    dtypes="fp16, bf16",
    propose=_propose,
    lower=_lower,
    fusion=FusionRules("product"),
    matches_expressions=_matches,
    is_shortlisted=True,
)
