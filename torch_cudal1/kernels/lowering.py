"""Island Program and Proposal in, kernels and finally the emitted Program out: everything of
`build` but the compiler.

One kernel when a row belongs to one program; `staged` cuts what needs several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.program import Alloc, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.kernels.codegen.loop_nest import Nest, schedule
from torch_cudal1.kernels.codegen.multi_cta import TeamPrinter, registers_of
from torch_cudal1.kernels.codegen.multi_kernel import first_nest, staged, tile_of
from torch_cudal1.kernels.codegen.prelude import POINTERS
from torch_cudal1.kernels.codegen.tiles import tiles
from torch_cudal1.kernels.codegen.triton_text import Printer, Tile, text_of
from torch_cudal1.kernels.expr.from_program import Output, Trace, trace
from torch_cudal1.kernels.ops.matmul import Product
from torch_cudal1.kernels.proposal import Kernel, Proposal
from torch_cudal1.kernels.templates.attention import attended, attentions
from torch_cudal1.kernels.templates.attention_backward import FAMILY, gradients, gradients_of
from torch_cudal1.kernels.templates.attention_step import is_backward
from torch_cudal1.kernels.templates.conv import convolved, proposals
from torch_cudal1.kernels.templates.gemm import (
    Parts,
    folded,
    parts_of,
    split_as_batch,
    split_outputs,
    tiled,
)
from torch_cudal1.kernels.templates.gemm_tiles import TILED, Schedule, read, schedules
from torch_cudal1.kernels.templates.recurrent import is_recurrent, recurred, recurrences
from torch_cudal1.kernels.templates.split_precision import packed

__all__ = ["Cubin", "Lowered", "assemble", "lower", "propose"]

_HIDDEN = (LaunchArg("null"), LaunchArg("null"))  # Triton's scratch pointers
_MAX_GRID = 2**31 - 1
_FOLDS = 2  # tiles tried for a product with few columns
_FOLDED_ROWS, _FOLDS_FIRST = 16, 4  # of the other operand, where the weight is made from few bits


@dataclass(frozen=True)
class Lowered:
    """The kernels in launch order, and the spec of every value they write (outputs and scratch) by
    value number.
    """

    kernels: tuple[Kernel, ...]
    written: Mapping[int, TensorSpec]


@dataclass(frozen=True)
class Cubin:
    """What the compiler made of a kernel: machine code, warps (the compiler may raise them),
    dynamic shared memory in bytes.
    """

    payload: str
    body: torch.Tensor
    warps: int
    shared_bytes: int


def propose(
    program: Program, sm: int, rights: Collection[str] = (), *, most: int = 8
) -> tuple[Proposal, ...]:
    """At most `most` ways to lower an island's reference Program, best guess first; () when these
    kernels do not cover it.

    `sm` is the compute capability (90 for sm_90); below 80 there is nothing, for lack of bfloat16
    and NaN-propagating max. `rights` are the op classes that may use TF32: "matmul" admits products
    that are no more exact than that, "conv" convolutions.
    """
    if sm < 80:
        return ()
    try:
        if is_recurrent(program):
            return recurrences(program, sm)
        if is_backward(program):
            return gradients(program, sm, rights, most)
        traced = trace(program)
        if traced.family == "conv":
            return _that_lower(program, traced, proposals(traced, sm, rights, most))
        if traced.family == "attention":
            return _that_lower(program, traced, attentions(traced, rights, most))
        if traced.family == "gemm":
            return _products(program, parts_of(traced), sm, rights, most)
        found = _that_lower(
            program,
            traced,
            (Proposal(traced.family, config) for config in tiles(first_nest(traced.outputs))),
        )
        later_splits = [proposal for proposal in found if proposal.number("split", 1) != 1][1:]
        return tuple(proposal for proposal in found if proposal not in later_splits)[:most]
    except NotLowerableError:
        # not ours: "nothing matches" is an ordinary answer, and `build` tells the reason to who
        # asks
        return ()


def lower(program: Program, proposal: Proposal, *, traced: Trace | None = None) -> Lowered:
    """The kernels of a proposal. Raises NotLowerableError (the island is not ours) or ProgramError
    (the proposal is nonsense).
    """
    if traced is None and proposal.family == "recurrent":
        return Lowered(*recurred(program, proposal))
    if traced is None and is_backward(program) and proposal.family == FAMILY:
        return Lowered(*gradients_of(program, proposal))
    traced = trace(program) if traced is None else traced
    if proposal.family != traced.family:
        raise ProgramError(
            "proposal", f"family {proposal.family!r} for an island of family {traced.family!r}"
        )
    if traced.family == "conv":
        kernels, scratch = convolved(traced, proposal, program.value_count)
        return Lowered(kernels, {o.value: o.spec for o in traced.outputs} | scratch)
    if traced.family == "gemm":
        return _lower_product(program, proposal, traced)
    if traced.family == "attention":
        specs = dict(traced.leaves) | {o.value: o.spec for o in traced.outputs}
        return Lowered(
            (attended(traced, proposal, specs, program.value_count),),
            {o.value: o.spec for o in traced.outputs},
        )
    specs = dict(traced.leaves) | {o.value: o.spec for o in traced.outputs}
    return _lowered(staged(traced.outputs, proposal, specs, program.value_count), traced, specs)


def assemble(program: Program, lowered: Lowered, cubins: Mapping[str, Cubin]) -> Program:
    """The emitted Program: inputs and constants of the reference, one Alloc a written value, one
    Launch a kernel.
    """
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
        cluster = 1 if kernel.cuda is None else kernel.cuda.cluster
        launch = Launch(
            payload=cubin.payload,
            symbol=kernel.symbol,
            grid=(kernel.grid // cluster, 1, 1),  # a launch counts clusters, a kernel its blocks
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


def _products(
    program: Program, parts: Parts, sm: int, rights: Collection[str], most: int
) -> tuple[Proposal, ...]:
    chosen = (
        schedules(parts.product, sm, rights, most)
        if parts.weight is None
        else _of_few_bits(parts.product, sm, rights, most)
    )
    found: list[Proposal] = []
    for one in chosen:
        found += [one.proposal()] if one.method != "fold" else _folds(folded(parts))
    return _that_lower(program, parts.traced, found)


def _of_few_bits(product: Product, sm: int, rights: Collection[str], most: int) -> list[Schedule]:
    """Folds read the weight once for each row of the other operand, tiles make it once for each
    band of rows.
    """
    tiled_ones, fold = schedules(product, sm, rights, most, TILED), Schedule("fold", warps=4)
    if product.m > _FOLDED_ROWS:
        return list(tiled_ones)
    few = tiled_ones[: most - _FOLDS]
    return [fold, *few] if product.m <= _FOLDS_FIRST else [*few, fold]


def _folds(outputs: tuple[Output, ...]) -> list[Proposal]:
    return [
        Proposal("gemm", {"method": "fold", **config})
        for config in tiles(schedule(outputs))[:_FOLDS]
    ]


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
    one, parts, first = read(proposal), parts_of(traced), program.value_count
    if one.method == "fold":
        rest = {name: value for name, value in proposal.config.items() if name != "method"}
        return lower(
            program,
            Proposal("reduction", rest),
            traced=Trace(folded(parts), traced.leaves, "reduction"),
        )
    specs = dict(traced.leaves) | {o.value: o.spec for o in traced.outputs}
    outputs = {o.value: o.spec for o in traced.outputs}
    in_pieces = one.method.startswith("packed")
    if one.split == 1:
        kernels, scratch = (
            packed(parts, proposal, first) if in_pieces else ((tiled(parts, proposal, specs),), {})
        )
        return Lowered(kernels, outputs | scratch)
    alone, made, spec = (split_as_batch if in_pieces else split_outputs)(parts, one.split, first)
    specs[first] = spec
    tail = schedule(made)
    config = Proposal("elementwise", tiles(tail)[0])
    combined = _lowered(((tail, tile_of(tail, config), config.number("warps", 4)),), traced, specs)
    kernels, scratch = (
        packed(alone, proposal, first + 1) if in_pieces else ((tiled(alone, proposal, specs),), {})
    )
    return Lowered((*kernels, *combined.kernels), {first: spec} | scratch | dict(combined.written))


def _lowered(
    stages: tuple[tuple[Nest, Tile, int], ...], traced: Trace, specs: Mapping[int, TensorSpec]
) -> Lowered:
    kernels = []
    written: dict[int, TensorSpec] = {}
    for nest, tile, warps in stages:
        if warps not in (1, 2, 4, 8, 16, 32):
            raise ProgramError("proposal", f"{warps} warps; expected a power of two up to 32")
        printer = TeamPrinter(nest, tile) if tile.team else Printer(nest, tile)
        symbol, text, values = text_of(printer, traced.family)
        grid = -(-nest.row_count // tile.rows) * (tile.team.size if tile.team else 1)
        if grid > _MAX_GRID:
            raise NotLowerableError(f"a grid of {grid} programs")
        arguments = tuple((value, POINTERS[specs[value].torch_dtype]) for value in values)
        kernels.append(
            Kernel(
                symbol,
                text,
                arguments,
                grid,
                warps,
                registers=registers_of(tile, warps) if tile.team else None,
            )
        )
        written |= {
            value: specs[value]
            for value in (
                *(s.value for s in nest.statements if s.kind == "store"),
                *printer.scratch,
            )
        }
    return Lowered(tuple(kernels), written)
