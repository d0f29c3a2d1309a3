"""The template of matrix products: which methods and schedules to propose, and how each is lowered.

    tile methods      `gemm_tiled`: Triton kernels that read their operands as they go
    packed methods    `split_precision`: CUDA C++ for sm_90 that lays pieces of fp32 out in memory first
    wgmma             `half_precision`: CUDA C++ for sm_90 that reads half types as they lie
    fold              the product as a sum of element-wise products, row by row: a loop nest

With `split` > 1 programs share a tile's k: partial sums go through a scratch tensor and are added in
order, so results repeat bit for bit. `gemm_tiles` orders the schedules by a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.codegen.loop_nest import build_nest
from torch_cudal1.kernels.codegen.multi_kernel import read_tile
from torch_cudal1.kernels.codegen.tiles import choose_tiles
from torch_cudal1.kernels.expr.from_program import Output, TracedProgram
from torch_cudal1.kernels.ops.matmul import HANDLERS, Product
from torch_cudal1.kernels.proposal import KernelSource, Proposal
from torch_cudal1.kernels.template import (
    FusionRules,
    KernelResources,
    LoweredKernels,
    ProblemModel,
    ProposalRequest,
    Template,
    TemplateInput,
    keep_lowerable,
    target_names,
)
from torch_cudal1.kernels.templates.gemm_tiled import (
    GemmParts,
    fold_product,
    lower_tiled,
    read_parts,
    split_k,
    split_k_as_batch,
)
from torch_cudal1.kernels.templates.gemm_tiles import (
    METHODS,
    TILED,
    GemmSchedule,
    choose_schedules,
    estimate_s,
    read_schedule,
)
from torch_cudal1.kernels.templates.hopper.half_precision import lower_half_precision
from torch_cudal1.kernels.templates.hopper.split_precision import lower_split_precision
from torch_cudal1.kernels.templates.loop_nest_template import lower_loop_nest, lower_stages

__all__ = ["TEMPLATE"]

# Tiles of a fold that are tried for a product with few columns.
_MAX_FOLD_TILES = 2
# rows of the other operand, where the weight is made from few bits: a fold reads it again for each
_MAX_FOLDED_ROWS, _MAX_ROWS_FOLD_FIRST = 16, 4


def _propose(workload: TemplateInput, request: ProposalRequest) -> tuple[Proposal, ...]:
    parts = read_parts(workload.trace)
    if parts.weight is None:
        schedules = list(
            choose_schedules(parts.product, request.sm, request.tf32_ops, request.limit)
        )
    else:
        # The methods in CUDA C++ read operands from memory, so they serve no weight that is made on
        # the way.
        schedules = _choose_for_made_weight(parts.product, request)
    proposals: list[Proposal] = []
    for schedule in schedules:
        if schedule.method == "fold":
            proposals += _propose_folds(fold_product(parts))
        else:
            proposals.append(schedule.proposal())
    # Methods in CUDA C++ need an epilogue with a C++ form, which the schedules know nothing of.
    return keep_lowerable(_lower, workload, proposals)


def _choose_for_made_weight(product: Product, request: ProposalRequest) -> list[GemmSchedule]:
    """Folds read the weight once for each row of the other operand, tiles make it once for each
    band of rows.
    """
    tiled = choose_schedules(product, request.sm, request.tf32_ops, request.limit, TILED)
    fold = GemmSchedule("fold", warps=4)
    if product.m > _MAX_FOLDED_ROWS:
        return list(tiled)
    # Leaves room in the limit for the proposals of the fold.
    few = tiled[: request.limit - _MAX_FOLD_TILES]
    return [fold, *few] if product.m <= _MAX_ROWS_FOLD_FIRST else [*few, fold]


def _propose_folds(outputs: tuple[Output, ...]) -> list[Proposal]:
    configs = choose_tiles(build_nest(outputs))[:_MAX_FOLD_TILES]
    return [Proposal("gemm", {"method": "fold", **config}) for config in configs]


def _lower(workload: TemplateInput, proposal: Proposal) -> LoweredKernels:
    # The first value number that the Program does not use.
    traced, scratch_value = workload.trace, workload.program.value_count
    schedule, parts = read_schedule(proposal), read_parts(traced)
    if schedule.method == "fold":
        return _lower_fold(workload, proposal, parts)
    specs = dict(traced.leaves) | workload.output_specs
    if schedule.split == 1:
        kernels, scratch = _lower_product(parts, proposal, specs, scratch_value)
        return LoweredKernels(kernels, workload.output_specs | scratch)
    # The kernels in CUDA C++ walk pieces of k as a batch; tiles have the piece in their grid.
    split = split_k if schedule.method in TILED else split_k_as_batch
    planes, outputs, spec = split(parts, schedule.split, scratch_value)
    specs[scratch_value] = spec
    kernels, scratch = _lower_product(planes, proposal, specs, scratch_value + 1)
    # The pieces are added, in order, by a launch of its own: only then all of them are in memory.
    # The epilogue is there too, since no piece alone has the sum that it needs.
    nest = build_nest(outputs)
    config = Proposal("elementwise", choose_tiles(nest)[0])
    stage = (nest, read_tile(nest, config), config.number("warps", 4))
    sums = lower_stages((stage,), traced.family, specs)
    written = {scratch_value: spec} | scratch | dict(sums.written)
    return LoweredKernels((*kernels, *sums.kernels), written)


def _lower_fold(workload: TemplateInput, proposal: Proposal, parts: GemmParts) -> LoweredKernels:
    config = {name: value for name, value in proposal.config.items() if name != "method"}
    # A fold is a reduction over k: it takes the tiles and loops that reductions have.
    folded = TracedProgram(fold_product(parts), workload.trace.leaves, "reduction")
    return lower_loop_nest(replace(workload, expressions=folded), Proposal("reduction", config))


def _lower_product(
    parts: GemmParts, proposal: Proposal, specs: Mapping[int, TensorSpec], scratch_value: int
) -> tuple[tuple[KernelSource, ...], dict[int, TensorSpec]]:
    method = proposal.config.get("method")
    if method in TILED:
        return (lower_tiled(parts, proposal, specs),), {}
    if method == "wgmma":
        return (lower_half_precision(parts, proposal),), {}
    return lower_split_precision(parts, proposal, scratch_value)


def _describe(product: Product) -> dict[str, int]:
    # The cost model cannot see strides: whether k lies along the memory decides what loads cost.
    layout = {
        "left_along_k": int(product.left.depth == 1),
        "right_along_k": int(product.right.depth == 1),
    }
    return {name: getattr(product, name) for name in ("batch", "m", "n", "k")} | layout


def _bound_s(product: Product, proposal: Proposal) -> float:
    return estimate_s(product, read_schedule(proposal))


def _estimate_resources(proposal: Proposal) -> KernelResources:
    """The resources of a tiled method; those of the other methods are known from their lowered
    kernels.
    """
    method = proposal.config.get("method")
    if method not in TILED:
        return KernelResources()
    stages, depth, rows, columns, warps = (
        proposal.number(name, 1) for name in ("stages", "depth", "rows", "columns", "warps")
    )
    # What Triton's pipeline keeps in shared memory: `stages` tiles of both operands.
    pipeline_bytes = stages * depth * (rows + columns) * METHODS[str(method)].bytes_per_element
    return KernelResources(pipeline_bytes, rows * columns // (32 * max(1, warps)))


TEMPLATE = Template(
    family="gemm",
    summary="Matrix products and batches of them, with the element-wise steps after them; a weight "
    "of few bits is made on the way.",
    architectures="sm_80 and newer; `packed` methods and `wgmma` on sm_90",
    dtypes="fp32, fp16, bf16; weights in int8, uint8 and fp8",
    propose=_propose,
    lower=_lower,
    fusion=FusionRules("product", target_names(HANDLERS)),
    handlers=HANDLERS,
    problem=ProblemModel(lambda traced: read_parts(traced).product, _describe, _bound_s),
    estimate_resources=_estimate_resources,
    is_shortlisted=True,
)
