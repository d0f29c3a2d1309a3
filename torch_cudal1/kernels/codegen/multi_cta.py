"""Prints reductions over a row that a group of CTAs shares: each keeps a tile of the row in
registers, so that the row is read once.

    tile of a row ── reduced ── partials in memory ── grid barrier ── all partials combined ── the tile again, from registers

A group passes a barrier for each level of reductions. Nothing guarantees that all of a group run at
the same time (a GPU may have fewer places than the group has CTAs), so the barrier polls a bounded
number of times: a CTA that has polled often enough reduces the tiles of the others itself, to the
same bits, then its own again, and goes on. That is the same code in a loop that runs once
otherwise: a second copy of it would take registers from the first. Partials are combined in the
order of the tiles, so that a result does not depend on the order of arrival.

In the generated text a group is a `team`, and the index of a tile a `piece`.

Source: the memory model of PTX 8.x, section "Release and Acquire Patterns", for the barrier.
"""

from __future__ import annotations

from torch_cudal1.kernels.codegen import online
from torch_cudal1.kernels.codegen.loop_nest import Nest, Statement
from torch_cudal1.kernels.codegen.triton_text import (
    CtaGroup,
    Tile,
    TritonPrinter,
    neutral_element,
    reduce_text,
)
from torch_cudal1.kernels.expr.affine import next_power_of_two
from torch_cudal1.kernels.ops.handlers import DIVISION

__all__ = ["COUNTER_STRIDE", "CtaGroupPrinter", "list_partials", "max_registers"]

_EXPONENTIAL = "libdevice.exp({0})"
# Words from one count to the next: CTAs that poll counts of one cache line wait for one another.
# Counts 32 words apart were 3 to 6 % faster at rows of 65,535 than neighbours, and 64 apart no
# faster (benchmarks/LOG.md, 2026-11-26).
COUNTER_STRIDE = 32
# Polls of the count of CTAs that have arrived, about 0.7 us each. Nothing guarantees that all CTAs
# of a group run at once: without a bound a GPU that holds fewer would wait for ever.
_MAX_BARRIER_POLLS = 4096

# The polls only acquire. With a fence for each poll, exponentials computed twice and a branch for
# each division a group was slower than a loop over the row (0.57 of a copy against 0.65); without
# them it reached 0.84 (benchmarks/LOG.md, 2026-11-26).
_GRID_BARRIER = f"""
@triton.jit
def all_met(arrivals, team: tl.constexpr):
    tl.debug_barrier()  # what every thread has stored comes before the count
    met = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") + 1
    looks = 0
    while (met < team) & (looks < {_MAX_BARRIER_POLLS}):
        met = tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu")
        looks += 1
    return met >= team


@triton.jit
def alone(x):
    # the one element of x as a number
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def quotients(x, by):
    # x / by, correctly rounded without the branch that a division has for each element: one inverse, and Markstein's correction,
    # which is no number where something is infinite. A power of two keeps the inverse's bits where `by` is very large or small.
    scale = tl.where(tl.abs(by) < {2.0**-100}, {2.0**24}, tl.where(tl.abs(by) > {2.0**100}, {2.0**-24}, 1.0))
    x, by = x * scale, by * scale
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), by)
    near = x * inverse
    rest = libdevice.fma(-near, by, x)
    return tl.where(tl.abs(rest) < float("inf"), libdevice.fma(rest, inverse, near), near)
"""


def max_registers(tile: Tile, warps: int) -> int:
    """The most registers of a thread: twice what its elements take. With more registers, fewer CTAs
    would run at the same time, and a row would wait for those that do not.
    """
    # 255 is the architecture's limit for a thread.
    return min(255, max(64, 2 * tile.columns // (32 * warps)))


def list_partials(nest: Nest) -> list[tuple[Statement, str]]:
    """The partials of each reduction, in the nest's order: the reduction and the partial's name
    ("" for its value).
    """
    twins = online.pair_means(nest.statements)
    return [
        (s, word)
        for s in nest.statements
        # A mean is found with the squared deviations from it: it has no partials of its own.
        if s.kind == "reduce" and s not in twins
        for word in _partial_names(s)
    ]


def _partial_names(s: Statement) -> tuple[str, ...]:
    return online.PARTIALS.get(s.text, ("",))


class CtaGroupPrinter(TritonPrinter):
    """Prints a nest whose tile is a part of a row. In the text `member` is the program's number in
    its group, and `piece` the number of the tile that it has in registers.
    """

    def __init__(self, nest: Nest, tile: Tile) -> None:
        super().__init__(nest, tile)
        assert tile.cta_group is not None
        self.cta_group: CtaGroup = tile.cta_group
        self.folds = [
            [s for s in nest.statements if s.kind == "reduce" and s.level == level]
            for level in range(nest.levels)
        ]
        early = {s for folds in self.folds for s in self.column_statements(folds)}
        last = self.folds[-1]
        # Only the exponentials of the last level: what is in registers before is not kept over the
        # next barrier.
        self.shares = {
            division: total
            for division, total in _find_softmaxes(nest)
            if division not in early and total in last
        }
        self.partial_values = dict(
            zip(
                [(s.name, word) for s, word in list_partials(nest)],
                self.cta_group.partials,
                strict=True,
            )
        )

    @property
    def scratch(self) -> tuple[int, ...]:
        return (*self.cta_group.partials, self.cta_group.arrivals)

    def functions(self) -> str:
        return _GRID_BARRIER

    def prologue(self) -> list[str]:
        wide = ".to(tl.int64)" if self.needs_int64 else ""
        return [
            f"place = tl.program_id(0){wide} // {self.cta_group.size}",
            f"member = tl.program_id(0) % {self.cta_group.size}",
            # The row as a tile of one, so that the lines of other kernels work on it.
            "row = place + tl.arange(0, 1)[:, None]",
            *self.index_lines("row", False),
        ]

    def body(self) -> list[str]:
        of_rows = [
            s for s in self.nest.statements if not s.columns and s.kind not in ("reduce", "store")
        ]
        live, after = self._after_barrier()
        # Uniform loads are a number each: they are printed before the barrier and in flight during
        # it.
        early = [s for s in after if self.is_uniform(s)]
        lines = self.uniform_lines(f"member * {self.tile.columns} + ") + [
            line for s in early for line in self.line(s)
        ]
        for level, folds in enumerate(self.folds):
            lines += [line for s in of_rows if s.level == level for line in self.line(s)]
            lines += self._reduce_tiles(level, folds, live if level == self.nest.levels - 1 else [])
            lines += [
                line for s in folds if s not in self.twins for line in self._combine_partials(s)
            ] + self.mean_lines(folds)
        lines += [line for s in of_rows if s.level == self.nest.levels for line in self.line(s)]
        # After the barrier a CTA has its own tile again, whichever it reduced last.
        lines += self.column_lines(f"member * {self.tile.columns} + ")
        return lines + [line for s in after if s not in early for line in self.line(s)]

    def line(self, s: Statement) -> list[str]:
        # The exponentials of the tile are in registers, relative to the tile's own maximum: a
        # factor takes the place of a second exponential.
        if s in self.shares:
            return [f"{s.name} = exp_{self.shares[s].name} * share_{self.shares[s].name}"]
        if (
            s.text == DIVISION
            and s.operands[0].columns
            and s.operands[1].rows
            and not s.operands[1].columns
        ):
            return [f"{s.name} = quotients({s.operands[0].name}, {s.operands[1].name})"]
        return super().line(s)

    def store_tests(self, s: Statement) -> list[str]:
        # A value of the row is the same in all CTAs: the first one stores it.
        return [] if s.columns else ["(row * 0 + member == 0)"]

    def _after_barrier(self) -> tuple[list[tuple[str, str]], list[Statement]]:
        """Names (with types) that stay in registers over the last barrier, and the statements after
        it that vary over columns.
        """
        early = set(self.column_statements(self.folds[-1]))
        live: dict[tuple[str, str], None] = {}
        pending: set[Statement] = set()
        stack = [s for s in self.nest.statements if s.kind == "store"]
        while stack:
            s = stack.pop()
            if s in early:
                live[s.name, s.node.compute] = None
            elif s not in pending and (s.columns or s.kind == "store"):
                pending.add(s)
                if s in self.shares:
                    live[f"exp_{self.shares[s].name}", "tl.float32"] = None
                else:
                    stack += s.operands
        return list(live), [s for s in self.nest.statements if s in pending]

    def _reduce_tiles(
        self, level: int, folds: list[Statement], live: list[tuple[str, str]]
    ) -> list[str]:
        """A loop that stores the partials of the CTA's own tile and, where not all CTAs have
        arrived, those of all tiles, its own last.
        """
        size, count = (
            self.cta_group.size,
            f"p{self.cta_group.arrivals} + (place * {self.nest.levels} + {level}) * {COUNTER_STRIDE}",
        )
        shared = [s for s in folds if s in self.shares.values()]
        body = self.column_lines(f"piece * {self.tile.columns} + ")
        body += [
            line for s in self.column_statements(folds) for line in self.line(s)
        ] + self._print_partials(folds)
        body += [f"highest_{s.name} = alone(top_{s.name})" for s in shared]
        return [
            # Triton wants a variable of a loop to exist, with its type, before the loop.
            *(f"{name} = tl.full([1, {self.tile.columns}], 0, {kind})" for name, kind in live),
            *(f"highest_{s.name} = tl.full([], 0.0, tl.float32)" for s in shared),
            "piece = member",
            "step = 0",
            "last = 0",
            # The loop runs once where all CTAs arrive. As a second copy of the code the fallback
            # took 15 to 30 registers from it, and loads waited for what was spilled
            # (benchmarks/LOG.md, 2026-11-26).
            "while step <= last:",
            *("    " + line for line in body),
            "    if step == 0:",
            f"        if not all_met({count}, {size}):",
            # Its own tile comes last, so that its values are the ones in registers.
            f"            last = {size + 1}",
            f"    piece = tl.where(step < {size}, step, member)",
            "    step += 1",
            # This CTA has written all partials: raising the count by the size of the group lets all
            # others go on.
            "if last > 0:  # all words are there: nobody needs to wait",
            "    tl.debug_barrier()",
            f'    tl.atomic_add({count}, {size}, sem="acq_rel", scope="gpu")',
            "    tl.debug_barrier()",
        ]

    def _print_partials(self, folds: list[Statement]) -> list[str]:
        """Lines that compute and store the tile's partials."""
        lines = (
            [f"size = {self._piece_size()}"] if any(s.text in ("mean", "m2") for s in folds) else []
        )
        for s in (s for s in folds if s not in self.twins):
            plain = s.text not in online.KINDS
            lines += (
                [f"own_{s.name} = {self.print_tile_reduction(s)}"]
                if plain
                else online.print_tile_partials(s, self.column_mask, "size")
            )
            lines += [
                f"tl.store({self._partial_address(s, word, 'row')} + piece, {word or 'own'}_{s.name})"
                for word in _partial_names(s)
            ]
        return lines

    def _piece_size(self) -> str:
        size = self.tile.columns
        if not self.column_mask:
            return f"tl.full([], {size}.0, tl.float32)"
        return f"tl.minimum({self.nest.column_count} - piece * {size}, {size}).to(tl.float32)"

    def _combine_partials(self, s: Statement) -> list[str]:
        """Lines that load all partials of a reduction and combine them to the row's value: a
        number, which has no layout that would have to be changed.
        """
        # `tl.arange` takes powers of two only: lanes beyond the group read the neutral element.
        lanes, size = next_power_of_two(self.cta_group.size), self.tile.columns
        lines = [f"peer = tl.arange(0, {lanes})"]
        for word in _partial_names(s):
            neutral = 'float("-inf")' if word == "top" else "0.0" if word else neutral_element(s)
            mask = (
                f"mask=peer < {self.cta_group.size}, other={neutral}, "
                if lanes != self.cta_group.size
                else ""
            )
            # `peer` runs through all tiles in their order: the result does not depend on the order
            # of arrival. The load goes around the L1 cache, which knows nothing of what other SMs
            # have written.
            read = f'tl.load({self._partial_address(s, word, "place")} + peer, {mask}cache_modifier=".cg")'
            lines.append(f"{word or 'own'}_{s.name} = {read}")
        if s.text not in online.KINDS:
            return [*lines, f"{s.name} = {reduce_text(s, f'own_{s.name}', 0)}"]
        element_count = (
            f"tl.maximum(tl.minimum({self.nest.column_count} - peer * {size}, {size}), 0)"
        )
        lines += online.print_combine(
            s, self.nest.column_count, self.cta_group.size, element_count, 0
        )
        return lines + [f"share_{s.name} = {online.print_share(s, f'highest_{s.name}')}"] * (
            s in self.shares.values()
        )

    def _partial_address(self, s: Statement, word: str, row: str) -> str:
        return f"p{self.partial_values[s.name, word]} + {row} * {self.cta_group.size}"


def _find_softmaxes(nest: Nest) -> list[tuple[Statement, Statement]]:
    """Each division of `exp(x - max(x))` by the row's sum of that, and the sum."""
    softmaxes = []
    for s in nest.statements:
        if (
            s.text != DIVISION
            or s.operands[1].text != "expsum"
            or s.operands[0].text != _EXPONENTIAL
        ):
            continue
        total, shifted = s.operands[1], s.operands[0].operands[0]
        (x,) = total.operands
        if (
            shifted.text == "({0} - {1})"
            # The very nodes are compared: another expression of the same text may be of another
            # tensor.
            and shifted.operands[0] is x
            and shifted.operands[1].text == "max"
            and shifted.operands[1].operands == (x,)
        ):
            softmaxes.append((s, total))
    return softmaxes
