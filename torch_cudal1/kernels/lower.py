"""Island Program and Proposal in, kernels and finally the emitted Program out: everything of `build` but the compiler.

One kernel when a row belongs to one program. With `split` > 1 each level of reductions becomes two small kernels (partial results
into a scratch tensor, then their combination) and the outputs a last one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from torch_cudal1.errors import NotLowerableError, ProgramError
from torch_cudal1.kernels.conv import convolved, proposals
from torch_cudal1.kernels.gemm import folded, parts_of, split_as_batch, split_outputs, tiled
from torch_cudal1.kernels.gemm_schedules import Schedule, read, schedules
from torch_cudal1.kernels.index import row_major
from torch_cudal1.kernels.nodes import Leaf, Node, Reduce, replaced, reshape
from torch_cudal1.kernels.packed import packed
from torch_cudal1.kernels.plan import Kernel, Proposal
from torch_cudal1.kernels.schedule import Nest, reductions_of, schedule
from torch_cudal1.kernels.source import Tile, kernel_source
from torch_cudal1.kernels.tiles import tiles
from torch_cudal1.kernels.trace import Output, Trace, trace
from torch_cudal1.kernels.views import permuted
from torch_cudal1.program.model import Alloc, Launch, LaunchArg, Program, TensorSpec, Value

__all__ = ["Cubin", "Lowered", "assemble", "lower", "propose"]

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}
_HIDDEN = (LaunchArg("null"), LaunchArg("null"))  # Triton's scratch pointers
_MAX_GRID = 2**31 - 1
_FOLDS = 2  # tiles tried for a product with few columns
_MAX_TILE = 65536  # elements; more never fits registers and takes the compiler minutes


@dataclass(frozen=True)
class Lowered:
    """The kernels in launch order, and the spec of every value they write (outputs and scratch) by value number."""

    kernels: tuple[Kernel, ...]
    written: Mapping[int, TensorSpec]


@dataclass(frozen=True)
class Cubin:
    """What the compiler made of a kernel: machine code, warps (the compiler may raise them), dynamic shared memory in bytes."""

    payload: str
    body: torch.Tensor
    warps: int
    shared_bytes: int


def propose(program: Program, sm: int, rights: Collection[str] = (), *, most: int = 8) -> tuple[Proposal, ...]:
    """At most `most` ways to lower an island's reference Program, best guess first; () when these kernels do not cover it.

    `sm` is the compute capability (90 for sm_90); below 80 there is nothing, for lack of bfloat16 and NaN-propagating max. `rights`
    are the op classes that may use TF32: "matmul" admits products that are no more exact than that, "conv" convolutions.
    """
    if sm < 80:
        return ()
    try:
        traced = trace(program)
        if traced.family == "conv":
            return _that_lower(program, traced, proposals(traced, sm, rights, most))
        if traced.family == "gemm":
            return _products(program, traced, schedules(parts_of(traced).product, sm, rights, most))
        nest = schedule(traced.outputs)
        found = []
        for config in tiles(nest):
            proposal = Proposal(traced.family, config)
            lower(program, proposal, traced=traced)
            found.append(proposal)
        return tuple(found)
    except NotLowerableError:
        return ()  # not ours: "nothing matches" is an ordinary answer, and `build` tells the reason to who asks


def lower(program: Program, proposal: Proposal, *, traced: Trace | None = None) -> Lowered:
    """The kernels of a proposal. Raises NotLowerableError (the island is not ours) or ProgramError (the proposal is nonsense)."""
    traced = trace(program) if traced is None else traced
    if proposal.family != traced.family:
        raise ProgramError("proposal", f"family {proposal.family!r} for an island of family {traced.family!r}")
    if traced.family == "conv":
        kernels, scratch = convolved(traced, proposal, program.value_count)
        return Lowered(kernels, {o.value: o.spec for o in traced.outputs} | scratch)
    if traced.family == "gemm":
        return _lower_product(program, proposal, traced)
    split = proposal.number("split", 1)
    specs = dict(traced.leaves) | {o.value: o.spec for o in traced.outputs}
    if split > 1:
        return _split(traced, proposal, split, specs, program.value_count)
    nest = schedule(traced.outputs)
    return _lowered(((nest, _tile(nest, proposal), proposal.number("warps", 4)),), traced, specs)


def assemble(program: Program, lowered: Lowered, cubins: Mapping[str, Cubin]) -> Program:
    """The emitted Program: inputs and constants of the reference, one Alloc a written value, one Launch a kernel."""
    count = len(program.inputs) + len(program.constants)
    numbers = {value: value for value in range(count)} | {value: count + i for i, value in enumerate(lowered.written)}
    steps: list[Alloc | Launch] = [Alloc(numbers[value], spec) for value, spec in lowered.written.items()]
    for kernel in lowered.kernels:
        cubin = cubins[kernel.symbol]
        pointers = tuple(numbers[value] for value, _ in kernel.arguments)
        cluster = 1 if kernel.cuda is None else kernel.cuda.cluster
        launch = Launch(
            payload=cubin.payload,
            symbol=kernel.symbol,
            grid=(kernel.grid // cluster, 1, 1),  # a launch counts clusters, a kernel its blocks
            block=32 * cubin.warps,
            shared_bytes=cubin.shared_bytes,
            args=tuple(LaunchArg("ptr", Value(p)) for p in pointers) + _HIDDEN * (kernel.cuda is None),
            aligned=pointers,
            cluster=cluster,
        )
        steps.append(launch)
    payloads = {name: program.payloads[name] for name in program.constants} | {c.payload: c.body for c in cubins.values()}
    outputs = tuple(None if value is None else numbers[value] for value in program.outputs)
    return Program(program.inputs, tuple(steps), outputs, program.constants, payloads)


def _products(program: Program, traced: Trace, chosen: Iterable[Schedule]) -> tuple[Proposal, ...]:
    parts = parts_of(traced)
    found: list[Proposal] = []
    for one in chosen:
        if one.method != "fold":
            found.append(one.proposal())
        else:
            folds = tiles(schedule(folded(parts)))[:_FOLDS]
            found += [Proposal("gemm", {"method": "fold", **config}) for config in folds]
    return _that_lower(program, traced, found)


def _that_lower(program: Program, traced: Trace, found: Iterable[Proposal]) -> tuple[Proposal, ...]:
    return tuple(p for p in found if _lowers(program, p, traced))


def _lowers(program: Program, proposal: Proposal, traced: Trace) -> bool:
    """Whether a method takes this island: some need fp32 outputs, or operators with a C++ form."""
    try:
        lower(program, proposal, traced=traced)
    except NotLowerableError:
        return False
    return True


def _lower_product(program: Program, proposal: Proposal, traced: Trace) -> Lowered:
    parts, first = parts_of(traced), program.value_count
    specs = dict(traced.leaves) | {o.value: o.spec for o in traced.outputs}
    outputs = {o.value: o.spec for o in traced.outputs}
    one = read(proposal)
    in_pieces = one.method.startswith("packed")
    if one.method == "fold":
        rest = {name: value for name, value in proposal.config.items() if name != "method"}
        return lower(program, Proposal("reduction", rest), traced=Trace(folded(parts), traced.leaves, "reduction"))
    if one.split == 1:
        kernels, scratch = packed(parts, proposal, first) if in_pieces else ((tiled(parts, proposal, specs),), {})
        return Lowered(kernels, outputs | scratch)
    alone, made, spec = (split_as_batch if in_pieces else split_outputs)(parts, one.split, first)
    specs[first] = spec
    tail = schedule(made)
    config = Proposal("elementwise", tiles(tail)[0])
    combined = _lowered(((tail, _tile(tail, config), config.number("warps", 4)),), traced, specs)
    kernels, scratch = packed(alone, proposal, first + 1) if in_pieces else ((tiled(alone, proposal, specs),), {})
    return Lowered((*kernels, *combined.kernels), {first: spec} | scratch | dict(combined.written))


def _tile(nest: Nest, proposal: Proposal) -> Tile:
    rows, columns = proposal.number("rows", 1), proposal.number("columns", 0)
    loop = bool(proposal.config.get("loop", False))
    for size in (rows, columns or 1):
        if size < 1 or size & (size - 1):
            raise ProgramError("proposal", f"tile of {rows} x {columns}; sizes must be powers of two")
    if (columns > 0) != nest.reduces or rows * max(1, columns) > _MAX_TILE:
        raise ProgramError(
            "proposal", f"tile of {rows} x {columns} for {'a reduction' if nest.reduces else 'an element-wise island'}"
        )
    if columns and not loop and columns < nest.column_count:
        raise ProgramError("proposal", f"rows of {nest.column_count} do not fit {columns} columns without a loop")
    return Tile(rows, columns, loop)


def _lowered(stages: tuple[tuple[Nest, Tile, int], ...], traced: Trace, specs: Mapping[int, TensorSpec]) -> Lowered:
    kernels = []
    written: dict[int, TensorSpec] = {}
    for nest, tile, warps in stages:
        if warps not in (1, 2, 4, 8, 16, 32):
            raise ProgramError("proposal", f"{warps} warps; expected a power of two up to 32")
        symbol, text, values = kernel_source(nest, tile, traced.family)
        grid = -(-nest.row_count // tile.rows)
        if grid > _MAX_GRID:
            raise NotLowerableError(f"a grid of {grid} programs")
        arguments = tuple((value, _POINTERS[specs[value].torch_dtype]) for value in values)
        kernels.append(Kernel(symbol, text, arguments, grid, warps))
        written |= {s.value: specs[s.value] for s in nest.statements if s.kind == "store"}
    return Lowered(tuple(kernels), written)


def _split(traced: Trace, proposal: Proposal, split: int, specs: dict[int, TensorSpec], first: int) -> Lowered:
    """Per level of reductions: partial results of `split` pieces of each row, then their combination; last, the outputs."""
    done: dict[Node, Node] = {}
    stages: list[tuple[Nest, Tile, int]] = []
    outputs = tuple(o.node for o in traced.outputs)
    tile = Tile(proposal.number("rows", 1), proposal.number("columns", 2048), True)
    warps, number = proposal.number("warps", 8), first
    while ready := _ready(outputs, done):
        made = []
        for fold in ready:
            node = _partial(replaced(fold.source, done), fold, split)
            made.append(_scratch(node, number, specs))
            done[fold], number = _leaf(made[-1]), number + 1
        stages.append(_stage(made, tile, warps))
        final = [replace(o, node=replaced(o.node, _merging(ready, done))) for o in traced.outputs]
        if not _ready(outputs, done) and all(o.spec.numel == math.prod(ready[0].shape) for o in final):
            return _lowered((*stages, _stage(final, tile, 4)), traced, specs)  # the outputs are rows: combined on the way
        combined = []
        for fold in ready:
            combined.append(_scratch(_combined(fold, done[fold]), number, specs))
            done[fold], number = _leaf(combined[-1]), number + 1
        stages.append(_stage(combined, tile, 4))
    last = schedule(tuple(replace(o, node=replaced(o.node, done)) for o in traced.outputs))
    return _lowered((*stages, (last, Tile(min(1024, _power(last.row_count))), 4)), traced, specs)


def _ready(outputs: tuple[Node, ...], done: Mapping[Node, Node]) -> list[Reduce]:
    """The reductions that wait for no other one."""
    stop = frozenset(done)
    return [r for r in reductions_of(outputs, stop) if not reductions_of((r.source,), stop)]


def _merging(ready: list[Reduce], done: Mapping[Node, Node]) -> Mapping[Node, Node]:
    return {**done, **{fold: _combined(fold, done[fold]) for fold in ready}}


def _stage(outputs: list[Output], tile: Tile, warps: int) -> tuple[Nest, Tile, int]:
    nest = schedule(tuple(outputs))
    return nest, replace(tile, columns=min(tile.columns, _power(nest.column_count))), warps


def _scratch(node: Node, number: int, specs: dict[int, TensorSpec]) -> Output:
    """A scratch value for `node`, in its compute type: a half-typed partial sum is kept in fp32."""
    dtype = node.compute.removeprefix("tl.")
    specs[number] = TensorSpec(dtype, node.shape, row_major(node.shape), "cuda")
    return Output(number, node, specs[number])


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


def _combined(fold: Reduce, partial: Node) -> Node:
    last = len(partial.shape) - 1
    folded = Reduce((*partial.shape[:-1], 1), fold.dtype, fold.kind, partial, (last,))
    return reshape(folded, fold.shape)


def _power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
