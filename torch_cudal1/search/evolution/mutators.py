"""Proposals made from others of their family: what a child is comes from either parent, and one
field may be moved a step.

What is no way to compute the island, or needs more than the device has, is left out before a
compiler sees it. A child has no word (a method, say) that nobody of its family has, so no right is
gained on the way. Which child is worth anything is not asked here.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.program import Program
from torch_cudal1.kernels.expr.from_program import trace
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.proposal import Proposal, shared_limit
from torch_cudal1.kernels.templates.gemm_tiles import METHODS

__all__ = ["child_of", "legal"]

Field: TypeAlias = int | str | bool

_MUTATED = 0.5  # of the children have one field moved
_ACCUMULATORS = 128  # of a thread: with twice as many nothing else fits its registers


def child_of(
    parents: Sequence[Proposal], family: Collection[Proposal], dice: random.Random
) -> Proposal:
    """A child of `parents`: each field is one's or the other's; one may become the next that
    `family` knows, half, or twice.
    """
    first = dice.choice(parents)
    mates = [one for one in parents if one.config.keys() == first.config.keys()]
    config = {name: dice.choice(mates).config[name] for name in first.config}
    if config and dice.random() < _MUTATED:
        name = dice.choice(sorted(config))
        config[name] = dice.choice(
            _steps(config[name], [one.config[name] for one in family if name in one.config])
        )
    return Proposal(first.family, config)


def _steps(value: Field, known: Sequence[Field]) -> list[Field]:
    """Values beside `value`: of words and flags any that is known."""
    if isinstance(value, (str, bool)):
        return sorted({value, *(one for one in known if type(one) is type(value))}, key=str)
    numbers = sorted({one for one in known if type(one) is int})
    below, above = (
        [one for one in numbers if one < value][-1:],
        [one for one in numbers if one > value][:1],
    )
    return sorted({value, *below, *above, *([value // 2] if value % 2 == 0 else ()), 2 * value})


def legal(program: Program, proposals: Iterable[Proposal], sm: int) -> tuple[Proposal, ...]:
    """Those of `proposals` that are ways to compute an island's `program` on `sm`, as far as can be
    told without a compiler.
    """
    try:
        traced = trace(program)
    except NotLowerableError:
        return ()
    found = []
    for one in proposals:
        try:
            lowered = lower(program, one, traced=traced)
        except (NotLowerableError, ProgramError):
            continue
        shared = max((k.cuda.shared_bytes for k in lowered.kernels if k.cuda), default=0)
        if max(shared, _ring_bytes(one)) <= shared_limit(sm) and _sums(one) <= _ACCUMULATORS:
            found.append(one)
    return tuple(found)


def _tiled(proposal: Proposal) -> bool:
    """Whether Triton cuts a product into tiles for it: what such a kernel needs is known after
    compiling only.
    """
    method = proposal.config.get("method")
    return (
        proposal.family == "gemm"
        and method in METHODS
        and method != "fold"
        and not str(method).startswith("packed")
    )


def _ring_bytes(proposal: Proposal) -> int:
    """Shared memory of the operands' pipeline."""
    if not _tiled(proposal):
        return 0
    stages, depth, rows, columns = (
        proposal.number(name, 1) for name in ("stages", "depth", "rows", "columns")
    )
    return (
        stages
        * depth
        * (rows + columns)
        * METHODS[str(proposal.config["method"])].bytes_per_element
    )


def _sums(proposal: Proposal) -> int:
    """Accumulators of a thread."""
    rows, columns, warps = (proposal.number(name, 1) for name in ("rows", "columns", "warps"))
    return rows * columns // (32 * max(1, warps)) if _tiled(proposal) else 0
