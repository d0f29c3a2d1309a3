"""An island's expressions as loop nests in launch order: one where that is enough, several where
programs must wait for others.

    split      few long rows: per level of reductions, partial results of `split` pieces of each row, then their combination; the
               outputs last
    team       long rows, many or few: programs of one launch share a row and meet (`team`); their count is set to zero before
    nested     a reduction of what other reductions yield, row by row (the mean of losses): the rows' results first, in memory

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
from torch_cudal1.kernels.codegen.loop_nest import Nest, reductions_of, schedule
from torch_cudal1.kernels.codegen.multi_cta import APART, words_of
from torch_cudal1.kernels.codegen.tiles import tiles
from torch_cudal1.kernels.codegen.triton_text import Team, Tile
from torch_cudal1.kernels.expr.affine import power_of_two, row_major
from torch_cudal1.kernels.expr.from_program import Output
from torch_cudal1.kernels.expr.nodes import (
    Leaf,
    Node,
    Reduce,
    broadcast,
    constant,
    pointwise,
    reduced,
    replaced,
    reshape,
    resolved,
)
from torch_cudal1.kernels.expr.views import permuted
from torch_cudal1.kernels.ops.pointwise import div
from torch_cudal1.kernels.proposal import Proposal

__all__ = ["Stage", "first_nest", "scratch", "staged", "tile_of"]

Stage = tuple[Nest, Tile, int]  # with the warps of a program
_MAX_TILE = 65536  # elements; more never fits registers and takes the compiler minutes
_F32 = torch.float32


def first_nest(outputs: tuple[Output, ...]) -> Nest:
    """The nest that a proposal's tile is for. Raises NotLowerableError when there is none."""
    outputs = _chosen(outputs, streamed=False)
    return schedule(_rows_first(outputs, {}, 1 + max(o.value for o in outputs)) or outputs)


def staged(
    outputs: tuple[Output, ...], proposal: Proposal, specs: dict[int, TensorSpec], first: int
) -> tuple[Stage, ...]:
    """The nests of a proposal. `specs` learns the scratch values, numbered from `first` on.

    Raises NotLowerableError when the expressions do not fit nests, ProgramError when the proposal
    is nonsense for them.
    """
    split = proposal.number("split", 1)
    team = bool(proposal.config.get("team", False))
    outputs = _chosen(
        outputs, streamed=split > 1 or team or bool(proposal.config.get("loop", False))
    )
    rows = _rows_first(outputs, specs, first)
    if rows:
        stages = staged(rows, proposal, specs, first + len(rows))
        done = {o.node: _leaf(o) for o in rows}
        rest = tuple(replace(o, node=replaced(o.node, done)) for o in outputs)
        then = Proposal(proposal.family, tiles(schedule(rest))[0])
        return (*stages, *staged(rest, then, specs, max(first, *specs) + 1))
    if split > 1:
        return _split(outputs, proposal, specs, first)
    nest = schedule(outputs)
    if team:
        return _team(nest, proposal, specs, first)
    return ((nest, tile_of(nest, proposal), proposal.number("warps", 4)),)


def tile_of(nest: Nest, proposal: Proposal) -> Tile:
    """The proposal's tile. Raises ProgramError when it is none for this nest."""
    rows, columns = proposal.number("rows", 1), proposal.number("columns", 0)
    loop = bool(proposal.config.get("loop", False))
    for size in (rows, columns or 1):
        if size < 1 or size & (size - 1):
            raise ProgramError(
                "proposal", f"tile of {rows} x {columns}; sizes must be powers of two"
            )
    if (columns > 0) != nest.reduces or rows * max(1, columns) > _MAX_TILE:
        raise ProgramError(
            "proposal",
            f"tile of {rows} x {columns} for {'a reduction' if nest.reduces else 'an element-wise island'}",
        )
    if columns and not (loop or proposal.config.get("team", False)) and columns < nest.column_count:
        raise ProgramError(
            "proposal", f"rows of {nest.column_count} do not fit {columns} columns without a loop"
        )
    return Tile(rows, columns, loop)


def scratch(node: Node, number: int, specs: dict[int, TensorSpec]) -> Output:
    """A scratch value for `node`, in its compute type: a half-typed partial sum is kept in fp32."""
    specs[number] = _dense(node.compute, node.shape)
    return Output(number, node, specs[number])


def _dense(compute: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(compute.removeprefix("tl."), shape, row_major(shape), "cuda")


def _chosen(outputs: tuple[Output, ...], *, streamed: bool) -> tuple[Output, ...]:
    nodes = resolved(tuple(o.node for o in outputs), streamed=streamed)
    return tuple(replace(o, node=node) for o, node in zip(outputs, nodes, strict=True))


def _rows_first(
    outputs: tuple[Output, ...], specs: dict[int, TensorSpec], first: int
) -> tuple[Output, ...]:
    """What must be in memory before anything is folded over it: results of rows that another
    reduction reads.
    """
    found: dict[Node, None] = {}
    for outer in reductions_of(tuple(o.node for o in outputs)):
        inner = reductions_of((outer.source,))
        if inner and math.prod(outer.source.shape) <= max(math.prod(one.shape) for one in inner):
            found[outer.source] = None
    inside = {
        node for node in found for other in found if other is not node and node in _below(other)
    }
    kept = [node for node in found if node not in inside]
    return tuple(scratch(node, first + position, specs) for position, node in enumerate(kept))


def _below(node: Node) -> set[Node]:
    return {one.source for one in reductions_of((node,))}


def _split(
    outputs: tuple[Output, ...], proposal: Proposal, specs: dict[int, TensorSpec], first: int
) -> tuple[Stage, ...]:
    split, warps, number = proposal.number("split", 1), proposal.number("warps", 8), first
    tile = Tile(proposal.number("rows", 1), proposal.number("columns", 2048), True)
    nodes, done = tuple(o.node for o in outputs), dict[Node, Node]()
    stages: list[Stage] = []
    while ready := _ready(nodes, done):
        made = [
            scratch(_partial(replaced(fold.source, done), fold, split), number + i, specs)
            for i, fold in enumerate(ready)
        ]
        number += len(made)
        stages.append(_stage(made, tile, warps))
        partial = {fold: _leaf(one) for fold, one in zip(ready, made, strict=True)}
        merged = {fold: _combined(fold, partial) for fold in ready}
        final = [replace(o, node=replaced(o.node, done | merged)) for o in outputs]
        rows = math.prod(ready[0].shape)
        if not _ready(nodes, done | merged) and all(o.spec.numel == rows for o in final):
            return (*stages, _stage(final, tile, 4))  # the outputs are rows: combined on the way
        combined = [scratch(merged[fold], number + i, specs) for i, fold in enumerate(ready)]
        number += len(combined)
        done |= {fold: _leaf(one) for fold, one in zip(ready, combined, strict=True)}
        stages.append(_stage(combined, tile, 4))
    return (*stages, *_lasts([replace(o, node=replaced(o.node, done)) for o in outputs]))


def _team(
    nest: Nest, proposal: Proposal, specs: dict[int, TensorSpec], first: int
) -> tuple[Stage, ...]:
    tile = tile_of(nest, proposal)
    size = -(-nest.column_count // max(1, tile.columns))
    if tile.rows != 1 or size < 2 or any(s.kind == "scan" for s in nest.statements):
        raise ProgramError(
            "proposal",
            f"a team of {size} for tiles of {tile.rows} rows; expected two or more for one, and no scan",
        )
    words = words_of(nest)
    for number, (fold, _) in enumerate(words, first):
        specs[number] = _dense(fold.node.compute, (nest.row_count, size))
    counts = (nest.row_count * nest.levels * APART,)
    arrivals = scratch(broadcast(constant(0, torch.int32), counts), first + len(words), specs)
    cleared = schedule((arrivals,))
    team = Team(size, arrivals.value, tuple(range(first, first + len(words))))
    meeting = (nest, replace(tile, team=team), proposal.number("warps", 4))
    return ((cleared, Tile(min(1024, power_of_two(cleared.row_count))), 4), meeting)


def _lasts(outputs: Sequence[Output]) -> list[Stage]:
    """Element-wise nests, one for each size of output."""
    found = []
    for numel in dict.fromkeys(o.spec.numel for o in outputs):
        nest = schedule(tuple(o for o in outputs if o.spec.numel == numel))
        found.append((nest, Tile(min(1024, power_of_two(nest.row_count))), 4))
    return found


def _ready(nodes: tuple[Node, ...], done: Mapping[Node, Node]) -> list[Reduce]:
    """The reductions that wait for no other one."""
    stop = frozenset(done)
    return [r for r in reductions_of(nodes, stop) if not reductions_of((r.source,), stop)]


def _stage(outputs: Sequence[Output], tile: Tile, warps: int) -> Stage:
    nest = schedule(_chosen(tuple(outputs), streamed=True))
    return nest, replace(tile, columns=min(tile.columns, power_of_two(nest.column_count))), warps


def _leaf(output: Output) -> Leaf:
    return Leaf(output.spec.shape, output.spec.torch_dtype, output.value, output.spec.strides)


def _partial(source: Node, fold: Reduce, split: int) -> Node:
    """The reduction of each of `split` pieces of a row: shape (rows..., split)."""
    kept = tuple(d for d in range(len(source.shape)) if d not in fold.dims)
    columns = math.prod(source.shape[d] for d in fold.dims)
    if columns % split:
        raise ProgramError("proposal", f"{columns} columns in {split} pieces")
    outer = tuple(source.shape[d] for d in kept)
    pieces = reshape(permuted(source, kept + fold.dims), (*outer, split, columns // split))
    folded = Reduce((*outer, split, 1), fold.dtype, fold.kind, pieces, (len(outer) + 1,))
    return reshape(folded, (*outer, split))


def _combined(fold: Reduce, partial: Mapping[Reduce, Leaf]) -> Node:
    """The whole row's value from those of its pieces, which are as long as one another."""
    own = partial[fold]
    last = (len(own.shape) - 1,)
    if fold.kind == "mean":
        made = div(reduced("sum", own, last), constant(own.shape[-1], _F32))
    elif fold.kind == "m2":
        centers = _twin(fold, "mean", partial)
        middle = div(reduced("sum", centers, last), constant(own.shape[-1], _F32))
        columns = math.prod(fold.source.shape[d] for d in fold.dims) // own.shape[-1]
        off = pointwise("({0} - {1})", centers, middle, dtype=_F32)
        made = reduced(
            "sum",
            pointwise("({0} + {1} * {1} * {2})", own, off, constant(columns, _F32), dtype=_F32),
            last,
        )
    elif fold.kind == "expsum":
        tops = _twin(fold, "max", partial)
        top = pointwise(
            'tl.where({0} == float("-inf"), 0.0, {0})', reduced("max", tops, last), dtype=_F32
        )
        made = reduced(
            "sum", pointwise("({0} * libdevice.exp({1} - {2}))", own, tops, top, dtype=_F32), last
        )
    else:
        made = Reduce((*own.shape[:-1], 1), fold.dtype, fold.kind, own, last)
    return reshape(made, fold.shape)


def _twin(fold: Reduce, kind: str, partial: Mapping[Reduce, Leaf]) -> Leaf:
    """The partial results of another kind over the same elements."""
    return next(
        leaf
        for one, leaf in partial.items()
        if one.kind == kind and one.source is fold.source and one.dims == fold.dims
    )
