"""A row shared by a team of programs: each keeps its piece in registers and is told what the others
have, so it is read once.

    piece of a row ── reduced ── words in memory ── meet ── all words ── the row's reduction ── the piece again, from registers

A team meets once for each level of reductions. Nobody can be sure that all of a team run at the
same time (a GPU may have fewer places than the team has programs), so nobody waits for ever: who
has looked often enough reduces the pieces of the others itself, to the same bits, then its own
again, and goes on. That is the same code in a loop that runs once otherwise: a second copy of it
would take registers from the first. Words are put together in the order of the pieces, so that a
result does not depend on who came when.

Source: the memory model of PTX 8.x, section "Release and Acquire Patterns", for the meeting.
"""

from __future__ import annotations

from torch_cudal1.kernels.codegen import online
from torch_cudal1.kernels.codegen.loop_nest import Nest, Statement
from torch_cudal1.kernels.codegen.triton_text import Printer, Team, Tile, neutral, of_row
from torch_cudal1.kernels.expr.affine import power_of_two
from torch_cudal1.kernels.ops.pointwise import DIVISION

__all__ = ["APART", "TeamPrinter", "registers_of", "words_of"]

_EXPONENTIAL = "libdevice.exp({0})"
# from one count to the next: programs that look at counts of one line of the cache wait for one
# another
APART = 32
_LOOKS = 4096  # at the count of those that have come, about 0.7 us each

_MEET = f"""
@triton.jit
def all_met(arrivals, team: tl.constexpr):
    tl.debug_barrier()  # what every thread has stored comes before the count
    met = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") + 1
    looks = 0
    while (met < team) & (looks < {_LOOKS}):
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


def registers_of(tile: Tile, warps: int) -> int:
    """Of a thread, at most: as many again as its elements take. With more, fewer programs run, and
    a row waits for them.
    """
    return min(255, max(64, 2 * tile.columns // (32 * warps)))


def words_of(nest: Nest) -> list[tuple[Statement, str]]:
    """What a piece tells of each reduction, in the nest's order: the reduction and the word's name
    ("" for its value).
    """
    twins = online.twins(nest.statements)
    return [
        (s, word)
        for s in nest.statements
        if s.kind == "reduce" and s not in twins
        for word in _words(s)
    ]


def _words(s: Statement) -> tuple[str, ...]:
    return online.WORDS.get(s.text, ("",))


class TeamPrinter(Printer):
    """Prints a nest whose tile is a piece of a row. `member` of the team is the program, `piece`
    what it has in registers.
    """

    def __init__(self, nest: Nest, tile: Tile) -> None:
        super().__init__(nest, tile)
        assert tile.team is not None
        self.team: Team = tile.team
        self.folds = [
            [s for s in nest.statements if s.kind == "reduce" and s.level == level]
            for level in range(nest.levels)
        ]
        early = {s for folds in self.folds for s in self.inside(folds)}
        last = self.folds[
            -1
        ]  # what earlier meetings leave in registers is not kept over the next one
        self.shares = {
            division: total
            for division, total in _softmaxes(nest)
            if division not in early and total in last
        }
        self.places = dict(
            zip([(s.name, word) for s, word in words_of(nest)], self.team.words, strict=True)
        )

    @property
    def scratch(self) -> tuple[int, ...]:
        return (*self.team.words, self.team.arrivals)

    def functions(self) -> str:
        return _MEET

    def prologue(self) -> list[str]:
        wide = ".to(tl.int64)" if self.wide else ""
        return [
            f"place = tl.program_id(0){wide} // {self.team.size}",
            f"member = tl.program_id(0) % {self.team.size}",
            "row = place + tl.arange(0, 1)[:, None]",
            *self.digits("row", False),
        ]

    def body(self) -> list[str]:
        of_rows = [
            s for s in self.nest.statements if not s.columns and s.kind not in ("reduce", "store")
        ]
        kept, rest = self._after()
        early = [
            s for s in rest if self.is_steady(s)
        ]  # a number each: they are on their way while the team meets
        lines = self.steady_lines(f"member * {self.tile.columns} + ") + [
            line for s in early for line in self.line(s)
        ]
        for level, folds in enumerate(self.folds):
            lines += [line for s in of_rows if s.level == level for line in self.line(s)]
            lines += self._pieces(level, folds, kept if level == self.nest.levels - 1 else [])
            lines += [
                line for s in folds if s not in self.twins for line in self._heard(s)
            ] + self.means_told(folds)
        lines += [line for s in of_rows if s.level == self.nest.levels for line in self.line(s)]
        lines += self.column_lines(f"member * {self.tile.columns} + ")
        return lines + [line for s in rest if s not in early for line in self.line(s)]

    def line(self, s: Statement) -> list[str]:
        if s in self.shares:  # the piece's exponentials are there already, of its own maximum
            return [f"{s.name} = exp_{self.shares[s].name} * share_{self.shares[s].name}"]
        if s.text == DIVISION and s.needs[0].columns and s.needs[1].rows and not s.needs[1].columns:
            return [f"{s.name} = quotients({s.needs[0].name}, {s.needs[1].name})"]
        return super().line(s)

    def store_tests(self, s: Statement) -> list[str]:
        return [] if s.columns else ["(row * 0 + member == 0)"]

    def _after(self) -> tuple[list[tuple[str, str]], list[Statement]]:
        """Names (with types) that stay in registers over the last meeting, and the statements after
        it that vary over columns.
        """
        early = set(self.inside(self.folds[-1]))
        kept: dict[tuple[str, str], None] = {}
        found: set[Statement] = set()
        stack = [s for s in self.nest.statements if s.kind == "store"]
        while stack:
            s = stack.pop()
            if s in early:
                kept[s.name, s.node.compute] = None
            elif s not in found and (s.columns or s.kind == "store"):
                found.add(s)
                if s in self.shares:
                    kept[f"exp_{self.shares[s].name}", "tl.float32"] = None
                else:
                    stack += s.needs
        return list(kept), [s for s in self.nest.statements if s in found]

    def _pieces(self, level: int, folds: list[Statement], kept: list[tuple[str, str]]) -> list[str]:
        """A loop that tells the own piece's words and, where not all have come, those of all
        pieces, the own one last.
        """
        size, count = (
            self.team.size,
            f"p{self.team.arrivals} + (place * {self.nest.levels} + {level}) * {APART}",
        )
        shared = [s for s in folds if s in self.shares.values()]
        body = self.column_lines(f"piece * {self.tile.columns} + ")
        body += [line for s in self.inside(folds) for line in self.line(s)] + self._told(folds)
        body += [f"highest_{s.name} = alone(top_{s.name})" for s in shared]
        return [
            *(f"{name} = tl.full([1, {self.tile.columns}], 0, {kind})" for name, kind in kept),
            *(f"highest_{s.name} = tl.full([], 0.0, tl.float32)" for s in shared),
            "piece = member",
            "step = 0",
            "last = 0",
            "while step <= last:",
            *("    " + line for line in body),
            "    if step == 0:",
            f"        if not all_met({count}, {size}):",
            f"            last = {size + 1}",
            f"    piece = tl.where(step < {size}, step, member)",
            "    step += 1",
            "if last > 0:  # all words are there: nobody needs to wait",
            "    tl.debug_barrier()",
            f'    tl.atomic_add({count}, {size}, sem="acq_rel", scope="gpu")',
            "    tl.debug_barrier()",
        ]

    def _told(self, folds: list[Statement]) -> list[str]:
        """The piece's words, computed and stored."""
        lines = (
            [f"size = {self._piece_size()}"] if any(s.text in ("mean", "m2") for s in folds) else []
        )
        for s in (s for s in folds if s not in self.twins):
            plain = s.text not in online.KINDS
            lines += (
                [f"own_{s.name} = {self.of_tile(s)}"]
                if plain
                else online.of_piece(s, self.column_mask, "size")
            )
            lines += [
                f"tl.store({self._place(s, word, 'row')} + piece, {word or 'own'}_{s.name})"
                for word in _words(s)
            ]
        return lines

    def _piece_size(self) -> str:
        size = self.tile.columns
        if not self.column_mask:
            return f"tl.full([], {size}.0, tl.float32)"
        return f"tl.minimum({self.nest.column_count} - piece * {size}, {size}).to(tl.float32)"

    def _heard(self, s: Statement) -> list[str]:
        """All words of a reduction, and the row's value of them: a number, which has no layout that
        would have to be changed.
        """
        lanes, size = power_of_two(self.team.size), self.tile.columns
        lines = [f"peer = tl.arange(0, {lanes})"]
        for word in _words(s):
            nothing = 'float("-inf")' if word == "top" else "0.0" if word else neutral(s)
            mask = (
                f"mask=peer < {self.team.size}, other={nothing}, "
                if lanes != self.team.size
                else ""
            )
            # around the L1 cache, which knows nothing of what other SMs have written
            read = f'tl.load({self._place(s, word, "place")} + peer, {mask}cache_modifier=".cg")'
            lines.append(f"{word or 'own'}_{s.name} = {read}")
        if s.text not in online.KINDS:
            return [*lines, f"{s.name} = {of_row(s, f'own_{s.name}', 0)}"]
        seen = f"tl.maximum(tl.minimum({self.nest.column_count} - peer * {size}, {size}), 0)"
        lines += online.joined(s, self.nest.column_count, self.team.size, seen, 0)
        return lines + [f"share_{s.name} = {online.share_of_piece(s, f'highest_{s.name}')}"] * (
            s in self.shares.values()
        )

    def _place(self, s: Statement, word: str, row: str) -> str:
        return f"p{self.places[s.name, word]} + {row} * {self.team.size}"


def _softmaxes(nest: Nest) -> list[tuple[Statement, Statement]]:
    """Each division of `exp(x - max(x))` by the row's sum of that, and the sum."""
    found = []
    for s in nest.statements:
        if s.text != DIVISION or s.needs[1].text != "expsum" or s.needs[0].text != _EXPONENTIAL:
            continue
        total, away = s.needs[1], s.needs[0].needs[0]
        (x,) = total.needs
        if (
            away.text == "({0} - {1})"
            and away.needs[0] is x
            and away.needs[1].text == "max"
            and away.needs[1].needs == (x,)
        ):
            found.append((s, total))
    return found
