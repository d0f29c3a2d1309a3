"""Plans a fusion group's expressions as loop nests in launch order: one where that is enough, several
where programs must wait for others.

    split      few long rows: for each level of reductions, partial results of `split` pieces of each
               row, then their combination; the outputs last
    team       long rows, many or few: CTAs of one launch share a row (`multi_cta`); a launch before
               it clears the counters of its barriers
    nested     a reduction of what other reductions yield, row by row (the mean of losses): the rows'
               results go to memory first

Partial results go through scratch values, and are put together in a fixed order. Text and machine
code are made elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.codegen.loop_nest import Nest, build_nest, find_reductions
from torch_cudal1.kernels.codegen.multi_cta import COUNTER_STRIDE, list_partials
from torch_cudal1.kernels.codegen.tiles import choose_tiles
from torch_cudal1.kernels.codegen.triton_text import CtaGroup, Tile
from torch_cudal1.kernels.expr.affine import next_power_of_two, row_major
from torch_cudal1.kernels.expr.from_program import Output
from torch_cudal1.kernels.expr.nodes import (
    Leaf,
    Node,
    Reduce,
    broadcast,
    choose_variants,
    constant,
    pointwise,
    reduce,
    reshape,
    substitute,
)
from torch_cudal1.kernels.expr.views import permute
from torch_cudal1.kernels.ops.handlers import div
from torch_cudal1.kernels.proposal import Proposal

__all__ = ["Stage", "add_scratch", "find_first_nest", "plan_stages", "read_tile"]

# A nest, its tile, and the warps of a program.
Stage = tuple[Nest, Tile, int]
# A larger tile never fits the registers and takes the compiler minutes.
_MAX_TILE_ELEMENTS = 65536
_F32 = torch.float32


def find_first_nest(outputs: tuple[Output, ...]) -> Nest:
    """The nest that a proposal's tile is for. Raises NotLowerableError when there is none."""
    outputs = _choose_outputs(outputs, online=False)
    return build_nest(_find_row_results(outputs, {}, 1 + max(o.value for o in outputs)) or outputs)


def plan_stages(
    outputs: tuple[Output, ...], proposal: Proposal, specs: dict[int, TensorSpec], first: int
) -> tuple[Stage, ...]:
    """The nests of a proposal. Scratch values, numbered from `first` on, are added to `specs`.

    Raises NotLowerableError when the expressions do not fit nests, ProgramError when the proposal
    is nonsense for them.
    """
    split = proposal.number("split", 1)
    team = bool(proposal.config.get("team", False))
    # Where a row is read again for each reduction, one pass is cheaper than two. In registers the
    # corrected two-pass form costs no memory.
    outputs = _choose_outputs(
        outputs, online=split > 1 or team or bool(proposal.config.get("loop", False))
    )
    rows = _find_row_results(outputs, specs, first)
    # What other reductions read must be in memory first; then the rest is planned as if it were an
    # input.
    if rows:
        stages = plan_stages(rows, proposal, specs, first + len(rows))
        substitutes = {o.node: _make_leaf(o) for o in rows}
        remaining = tuple(replace(o, node=substitute(o.node, substitutes)) for o in outputs)
        # The proposal's tile is for the first nest only.
        next_proposal = Proposal(proposal.family, choose_tiles(build_nest(remaining))[0])
        return (*stages, *plan_stages(remaining, next_proposal, specs, max(first, *specs) + 1))
    if split > 1:
        return _plan_split(outputs, proposal, specs, first)
    nest = build_nest(outputs)
    if team:
        return _plan_cta_group(nest, proposal, specs, first)
    return ((nest, read_tile(nest, proposal), proposal.number("warps", 4)),)


def read_tile(nest: Nest, proposal: Proposal) -> Tile:
    """The proposal's tile. Raises ProgramError when the nest cannot be computed in such tiles."""
    rows, columns = proposal.number("rows", 1), proposal.number("columns", 0)
    loop = bool(proposal.config.get("loop", False))
    # `tl.arange` takes powers of two only.
    for size in (rows, columns or 1):
        if size < 1 or size & (size - 1):
            raise ProgramError(
                "proposal", f"tile of {rows} x {columns}; sizes must be powers of two"
            )
    if (columns > 0) != nest.reduces or rows * max(1, columns) > _MAX_TILE_ELEMENTS:
        raise ProgramError(
            "proposal",
            f"tile of {rows} x {columns} for {'a reduction' if nest.reduces else 'an element-wise fusion group'}",
        )
    # Without a loop a tile must hold the whole row, or part of it would be left out.
    if columns and not (loop or proposal.config.get("team", False)) and columns < nest.column_count:
        raise ProgramError(
            "proposal", f"rows of {nest.column_count} do not fit {columns} columns without a loop"
        )
    return Tile(rows, columns, loop)


def add_scratch(node: Node, number: int, specs: dict[int, TensorSpec]) -> Output:
    """A scratch value for `node`, in its compute type: a half-typed partial sum is kept in fp32."""
    specs[number] = _make_dense_spec(node.compute, node.shape)
    return Output(number, node, specs[number])


def _make_dense_spec(compute: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(compute.removeprefix("tl."), shape, row_major(shape), "cuda")


def _choose_outputs(outputs: tuple[Output, ...], *, online: bool) -> tuple[Output, ...]:
    nodes = choose_variants(tuple(o.node for o in outputs), online=online)
    return tuple(replace(o, node=node) for o, node in zip(outputs, nodes, strict=True))


def _find_row_results(
    outputs: tuple[Output, ...], specs: dict[int, TensorSpec], first: int
) -> tuple[Output, ...]:
    """The results of rows that another reduction reads: they must be in memory before it starts."""
    sources: dict[Node, None] = {}
    for outer in find_reductions(tuple(o.node for o in outputs)):
        inner = find_reductions((outer.source,))
        # Only sources that are not larger than the inner results: a larger one is a normalised row,
        # which one nest computes on the way.
        if inner and math.prod(outer.source.shape) <= max(
            math.prod(reduction.shape) for reduction in inner
        ):
            sources[outer.source] = None
    nested = {
        node
        for node in sources
        for candidate in sources
        if candidate is not node and node in _find_reduction_sources(candidate)
    }
    # A source below another source is planned with it: `plan_stages` calls itself for these rows.
    outermost = [node for node in sources if node not in nested]
    return tuple(
        add_scratch(node, first + position, specs) for position, node in enumerate(outermost)
    )


def _find_reduction_sources(node: Node) -> set[Node]:
    return {reduction.source for reduction in find_reductions((node,))}


def _plan_split(
    outputs: tuple[Output, ...], proposal: Proposal, specs: dict[int, TensorSpec], first: int
) -> tuple[Stage, ...]:
    split, warps, number = proposal.number("split", 1), proposal.number("warps", 8), first
    tile = Tile(proposal.number("rows", 1), proposal.number("columns", 2048), True)
    nodes, substitutes = tuple(o.node for o in outputs), dict[Node, Node]()
    stages: list[Stage] = []
    # Reductions that wait for no other one are folded together: a launch for each level.
    while ready := _find_ready(nodes, substitutes):
        partials = [
            add_scratch(
                _reduce_pieces(substitute(fold.source, substitutes), fold, split), number + i, specs
            )
            for i, fold in enumerate(ready)
        ]
        number += len(partials)
        stages.append(_make_stage(partials, tile, warps))
        partial = {fold: _make_leaf(output) for fold, output in zip(ready, partials, strict=True)}
        merged = {fold: _combine_pieces(fold, partial) for fold in ready}
        final = [replace(o, node=substitute(o.node, substitutes | merged)) for o in outputs]
        rows = math.prod(ready[0].shape)
        if not _find_ready(nodes, substitutes | merged) and all(
            o.spec.numel == rows for o in final
        ):
            # The outputs have one value a row, so that they are combined on the way: no scratch, no
            # launch of their own.
            return (
                *stages,
                _make_stage(final, tile, 4),
            )
        combined = [add_scratch(merged[fold], number + i, specs) for i, fold in enumerate(ready)]
        number += len(combined)
        substitutes |= {
            fold: _make_leaf(output) for fold, output in zip(ready, combined, strict=True)
        }
        stages.append(_make_stage(combined, tile, 4))
    return (
        *stages,
        *_plan_outputs([replace(o, node=substitute(o.node, substitutes)) for o in outputs]),
    )


def _plan_cta_group(
    nest: Nest, proposal: Proposal, specs: dict[int, TensorSpec], first: int
) -> tuple[Stage, ...]:
    tile = read_tile(nest, proposal)
    size = -(-nest.column_count // max(1, tile.columns))
    # A scan carries a total from tile to tile, which a barrier does not order.
    if tile.rows != 1 or size < 2 or any(s.kind == "scan" for s in nest.statements):
        raise ProgramError(
            "proposal",
            f"a team of {size} for tiles of {tile.rows} rows; expected two or more for one, and no scan",
        )
    partials = list_partials(nest)
    for number, (fold, _) in enumerate(partials, first):
        specs[number] = _make_dense_spec(fold.node.compute, (nest.row_count, size))
    # Every row and level has a count of its own, on a line of the cache of its own.
    counts = (nest.row_count * nest.levels * COUNTER_STRIDE,)
    arrivals = add_scratch(
        broadcast(constant(0, torch.int32), counts), first + len(partials), specs
    )
    # The counts must be 0 before any CTA arrives. Programs of the same launch cannot clear them:
    # nothing orders programs of one launch.
    cleared = build_nest((arrivals,))
    group = CtaGroup(size, arrivals.value, tuple(range(first, first + len(partials))))
    shared = (nest, replace(tile, cta_group=group), proposal.number("warps", 4))
    return ((cleared, Tile(min(1024, next_power_of_two(cleared.row_count))), 4), shared)


def _plan_outputs(outputs: Sequence[Output]) -> list[Stage]:
    """Element-wise nests, one for each size of output."""
    stages = []
    for numel in dict.fromkeys(o.spec.numel for o in outputs):
        nest = build_nest(tuple(o for o in outputs if o.spec.numel == numel))
        stages.append((nest, Tile(min(1024, next_power_of_two(nest.row_count))), 4))
    return stages


def _find_ready(nodes: tuple[Node, ...], substitutes: Mapping[Node, Node]) -> list[Reduce]:
    """The reductions that wait for no other one."""
    stop = frozenset(substitutes)
    return [r for r in find_reductions(nodes, stop) if not find_reductions((r.source,), stop)]


def _make_stage(outputs: Sequence[Output], tile: Tile, warps: int) -> Stage:
    nest = build_nest(_choose_outputs(tuple(outputs), online=True))
    return (
        nest,
        replace(tile, columns=min(tile.columns, next_power_of_two(nest.column_count))),
        warps,
    )


def _make_leaf(output: Output) -> Leaf:
    return Leaf(output.spec.shape, output.spec.torch_dtype, output.value, output.spec.strides)


def _reduce_pieces(source: Node, fold: Reduce, split: int) -> Node:
    """The reduction of each of `split` pieces of a row: shape (rows..., split)."""
    row_dims = tuple(d for d in range(len(source.shape)) if d not in fold.dims)
    columns = math.prod(source.shape[d] for d in fold.dims)
    # Pieces are combined as equals: the mean of means is the mean only for pieces of one length.
    if columns % split:
        raise ProgramError("proposal", f"{columns} columns in {split} pieces")
    outer = tuple(source.shape[d] for d in row_dims)
    pieces = reshape(permute(source, row_dims + fold.dims), (*outer, split, columns // split))
    folded = Reduce((*outer, split, 1), fold.dtype, fold.kind, pieces, (len(outer) + 1,))
    return reshape(folded, (*outer, split))


def _combine_pieces(fold: Reduce, partial: Mapping[Reduce, Leaf]) -> Node:
    """The value of a whole row from the values of its pieces, which have equal lengths."""
    pieces = partial[fold]
    last = (len(pieces.shape) - 1,)
    if fold.kind == "mean":
        combined = div(reduce("sum", pieces, last), constant(pieces.shape[-1], _F32))
    elif fold.kind == "m2":
        centers = _find_companion(fold, "mean", partial)
        middle = div(reduce("sum", centers, last), constant(pieces.shape[-1], _F32))
        columns = math.prod(fold.source.shape[d] for d in fold.dims) // pieces.shape[-1]
        # Squared deviations are of a piece's own mean: moving them to the row's mean adds the
        # square of the distance for each element (Chan, Golub, LeVeque 1983).
        off = pointwise("({0} - {1})", centers, middle, dtype=_F32)
        combined = reduce(
            "sum",
            pointwise("({0} + {1} * {1} * {2})", pieces, off, constant(columns, _F32), dtype=_F32),
            last,
        )
    elif fold.kind == "expsum":
        tops = _find_companion(fold, "max", partial)
        # The maximum of a row of minus infinities is minus infinity, and the difference of two
        # infinities would be NaN.
        top = pointwise(
            'tl.where({0} == float("-inf"), 0.0, {0})', reduce("max", tops, last), dtype=_F32
        )
        combined = reduce(
            "sum",
            pointwise("({0} * libdevice.exp({1} - {2}))", pieces, tops, top, dtype=_F32),
            last,
        )
    else:
        combined = Reduce((*pieces.shape[:-1], 1), fold.dtype, fold.kind, pieces, last)
    return reshape(combined, fold.shape)


def _find_companion(fold: Reduce, kind: str, partial: Mapping[Reduce, Leaf]) -> Leaf:
    """The partial results of another kind over the same elements."""
    return next(
        leaf
        for reduction, leaf in partial.items()
        if reduction.kind == kind
        and reduction.source is fold.source
        and reduction.dims == fold.dims
    )
