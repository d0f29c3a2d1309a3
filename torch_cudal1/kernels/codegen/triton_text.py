"""Prints a loop nest as a Triton kernel: the row in one tile, or a loop over column tiles for each
level of reductions.

Shapes and strides are literals: a kernel serves exactly one set of TensorSpecs, its only arguments
are pointers. Offsets are int32 unless an address exceeds it. The text is complete: it imports
Triton and nothing of this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from torch_cudal1.kernels.codegen import online
from torch_cudal1.kernels.codegen.loop_nest import Nest, Statement
from torch_cudal1.kernels.codegen.prelude import add_prelude
from torch_cudal1.kernels.expr.affine import AffineExpr, Atom, row_major
from torch_cudal1.kernels.expr.nodes import Scan

__all__ = ["CtaGroup", "Tile", "TritonPrinter", "neutral_element", "print_kernel", "reduce_text"]

# `-9223372036854775808` would be the negation of a literal that int64 does not hold.
_INT_MIN = {"tl.int64": "(-9223372036854775807 - 1)", "tl.int32": "(-2147483647 - 1)"}
_INT_MAX = {"tl.int64": "9223372036854775807", "tl.int32": "2147483647"}
_COMBINE = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "nan_max({0}, {1})",
    "min": "nan_min({0}, {1})",
}
# Integers have no NaN to propagate.
_COMBINE_INT = _COMBINE | {"max": "tl.maximum({0}, {1})", "min": "tl.minimum({0}, {1})"}
_FUNCTION = {"max": "nan_max", "min": "nan_min", "prod": "product"}
_INT32_REACH = 2**31 - 1
# Wider rows leave no registers for what is loaded early.
_MAX_EARLY_LOAD_COLUMNS = 8192


@dataclass(frozen=True, slots=True)
class CtaGroup:
    """The `size` programs that share a row, and their scratch values. `arrivals`: how many of them
    have arrived (int32, 0 before the launch, one count for each row and level of reductions).
    `partials`: for each partial of each reduction, in the nest's order, one element a program.
    """

    size: int
    arrivals: int
    partials: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` x `columns` elements a program, powers of two; 0 columns: element-wise. `loop`: a row
    takes several steps of `columns`. `cta_group`: the programs that share a row, a tile for each.
    """

    rows: int
    columns: int = 0
    loop: bool = False
    cta_group: CtaGroup | None = None


def print_kernel(printer: TritonPrinter, family: str) -> tuple[str, str, tuple[int, ...]]:
    """Symbol, complete text, and the Program values of its pointer arguments in order."""
    statements, scratch = printer.nest.statements, printer.scratch
    values = dict.fromkeys(
        [*(s.value for s in statements if s.kind in ("load", "store")), *scratch]
    )
    # Inputs before outputs, each by number: the order is part of the text and of its hash.
    stored = {s.value for s in statements if s.kind == "store"} | set(scratch)
    ordered = tuple(sorted(values, key=lambda v: (v in stored, v)))
    arguments = ", ".join(f"p{value}" for value in ordered)
    body = "\n".join("    " + line for line in [*printer.prologue(), *printer.body()])
    text = add_prelude(f"{arguments}):\n{body}\n", printer.functions())
    # Equal texts have equal names, so that a name stands for one machine code.
    symbol = f"{family}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return symbol, text.replace("SYMBOL", symbol), ordered


class TritonPrinter:
    """Text of statements for one tile choice."""

    def __init__(self, nest: Nest, tile: Tile) -> None:
        self.nest, self.tile = nest, tile
        self.flat = tile.columns == 0
        self.row_mask = nest.row_count % tile.rows != 0
        self.column_mask = not self.flat and nest.column_count % tile.columns != 0
        self.names: dict[int, str] = {}
        for column, base in ((False, "row"), (True, "column")):
            atoms = [a for a in nest.atoms if a.column is column]
            self.names |= {
                a.id: base if len(atoms) == 1 else f"{base}{i}" for i, a in enumerate(atoms)
            }
        self.twins = online.pair_means(nest.statements)
        self.uniform = self._find_uniform()

    def prologue(self) -> list[str]:
        """Row indices, and column indices when they do not change."""
        nest, tile = self.nest, self.tile
        wide = ".to(tl.int64)" if self.needs_int64 else ""
        spread = "" if self.flat else "[:, None]"
        lines = [f"row = tl.program_id(0){wide} * {tile.rows} + tl.arange(0, {tile.rows}){spread}"]
        if self.row_mask:
            lines.append(f"row_ok = row < {nest.row_count}")
        lines += self.index_lines("row", False)
        # In a loop column indices change from tile to tile: they are part of its body.
        return lines if self.flat or tile.loop else lines + self.column_lines("")

    @property
    def needs_int64(self) -> bool:
        """Whether offsets need 64 bits."""
        accesses = max((s.access.largest for s in self.nest.statements), default=0)
        # Indices are computed for the whole last tile, masked or not.
        padded = (self.nest.row_count + self.tile.rows) * (self.flat or 1)
        return max(accesses, padded, self.nest.column_count + self.tile.columns) > _INT32_REACH

    def column_lines(self, start: str) -> list[str]:
        """Column indices of the tile that begins at `start` ("" or a multiple of its size, and a
        plus).
        """
        wide = ".to(tl.int64)" if self.needs_int64 else ""
        lines = [f"column = {start}tl.arange(0, {self.tile.columns}){wide}[None, :]"]
        if self.column_mask:
            lines.append(f"column_ok = column < {self.nest.column_count}")
        return lines + self.index_lines("column", True) + self.uniform_lines(start)

    def _find_uniform(self) -> frozenset[Atom]:
        """The loop variables of columns that have a single value in each tile, such as the channel
        of pixels, where a load is addressed by them.
        """
        atoms = self.nest.columns
        if self.flat or self.tile.columns >= self.nest.column_count:
            return frozenset()
        strides = row_major(tuple(a.extent for a in atoms))
        # A tile lies within one value of a variable where its size divides the variable's stride: a
        # channel's weight is read once a tile instead of once an element (3 to 5 % of a kernel that
        # shares rows, benchmarks/LOG.md, 2026-11-26).
        uniform = {
            atom
            for atom, stride in zip(atoms, strides, strict=True)
            if stride % self.tile.columns == 0
        }
        used = {
            atom
            for s in self.nest.statements
            if s.kind == "load" and _varies_only_over(s, uniform)
            for atom, _ in s.access.terms
        }
        return frozenset(uniform & used)

    def is_uniform(self, s: Statement) -> bool:
        """Whether a load reads one element for each row of a tile, though it varies over columns."""
        return s.kind == "load" and _varies_only_over(s, self.uniform)

    def uniform_lines(self, start: str) -> list[str]:
        """Lines that define the uniform loop variables as numbers, in the tile that begins at
        `start`.
        """
        # A plain number may be 32-bit: the offset that is made of it must not overflow.
        begin = (
            f"({start}tl.full([], 0, tl.int64))" if self.needs_int64 else start.removesuffix(" + ")
        )
        return self.index_lines(begin, True, self.uniform, "at_") if self.uniform else []

    def index_lines(
        self, base: str, column: bool, selected: Collection[Atom] | None = None, before: str = ""
    ) -> list[str]:
        """`row0 = row // 12`, `row1 = row // 4 % 3`, ...: nothing when there is only one loop
        variable.

        `selected`: of these alone (None: of all); `before` is put before their names.
        """
        atoms = self.nest.columns if column else self.nest.rows
        if len(atoms) < 2:
            return []
        strides = row_major(tuple(a.extent for a in atoms))
        lines = []
        for i, (atom, stride) in enumerate(zip(atoms, strides, strict=True)):
            if selected is None or atom in selected:
                text = (
                    base
                    + (f" // {stride}" if stride > 1 else "")
                    + (f" % {atom.extent}" if i else "")
                )
                lines.append(f"{before}{self.names[atom.id]} = {text}")
        return lines

    @property
    def scratch(self) -> tuple[int, ...]:
        """Program values that the kernel takes besides those of the nest."""
        return ()

    def functions(self) -> str:
        """Text of functions that the lines call."""
        return ""

    def body(self) -> list[str]:
        """The lines after the prologue."""
        return self.print_loops() if self.tile.loop else self.print_tile()

    def print_tile(self) -> list[str]:
        """Every statement once: the whole row is in the tile.

        Loads come first: in a reduction warps wait for one another, and no compiler moves a load
        ahead of that. The weights of a norm would be waited for when all else is done.
        """
        statements = self.nest.statements
        if self.nest.levels and self.tile.columns <= _MAX_EARLY_LOAD_COLUMNS:
            statements = tuple(sorted(statements, key=lambda s: s.kind != "load"))
        return [line for s in statements for line in self.line(s)]

    def print_loops(self) -> list[str]:
        """A loop over column tiles for each level of reductions. Each loop computes again what it
        needs of the values of earlier loops.
        """
        lines: list[str] = []
        printed: set[str] = set()
        # A reduction of the next level needs the whole row of this one: the row is read again for
        # it.
        for level in range(self.nest.levels + 1):
            for s in self.nest.statements:
                if (
                    not s.columns
                    and s.kind not in ("reduce", "store")
                    and s.level <= level
                    and s.name not in printed
                ):
                    printed.add(s.name)
                    lines += self.line(s)
            folds = [s for s in self.nest.statements if s.kind == "reduce" and s.level == level]
            stores = [
                s
                for s in self.nest.statements
                if s.kind == "store" and s.columns and s.level == level
            ]
            if folds or stores:
                lines += self._loop(folds, stores)
        return lines + [
            line
            for s in self.nest.statements
            if s.kind == "store" and not s.columns
            for line in self.line(s)
        ]

    def _loop(self, folds: list[Statement], stores: list[Statement]) -> list[str]:
        shape = f"[{self.tile.rows}, {self.tile.columns}]"
        plain = [s for s in folds if s.text not in online.KINDS]
        streamed = [s for s in folds if s.text in online.KINDS and s not in self.twins]
        inside = self.column_statements([*folds, *stores])
        lines = [
            f"acc_{s.name} = tl.full({shape}, {neutral_element(s)}, {s.node.compute})"
            for s in plain
        ]
        lines += [line for s in streamed for line in online.print_init(s, shape)]
        lines += [self._carry(s) for s in inside if s.kind == "scan"]
        body = self.column_lines("start + ")
        lines.append(f"for start in range(0, {self.nest.column_count}, {self.tile.columns}):")
        # A scan from the end takes its tiles from the end, since it carries the total from one to
        # the next.
        if any(isinstance(s.node, Scan) and s.node.reverse for s in inside):
            last = (self.nest.column_count - 1) // self.tile.columns * self.tile.columns
            body = self.column_lines(f"({last} - start) + ")
        for s in inside:
            body += self.line(s)
        for s in streamed:
            body += online.print_step(s, self.tile.columns, self.column_mask)
        for s in plain:
            step = _combine_template(s).format(f"acc_{s.name}", s.operands[0].name)
            # Columns beyond the end must not count: the lane keeps what it has.
            body.append(
                f"acc_{s.name} = "
                + (f"tl.where(column_ok, {step}, acc_{s.name})" if self.column_mask else step)
            )
        for s in stores:
            body += self.line(s)
        lines += ["    " + line for line in body]
        lines += [f"{s.name} = {reduce_text(s, f'acc_{s.name}')}" for s in plain]
        lines += [
            line
            for s in streamed
            for line in online.print_finish(s, self.nest.column_count, self.tile.columns)
        ]
        return lines + self.mean_lines(folds)

    def mean_lines(self, folds: list[Statement]) -> list[str]:
        """After all else of `folds`: the means that have a twin among them."""
        return [
            line for s in folds if s in self.twins for line in online.print_mean(s, self.twins[s])
        ]

    def _carry(self, s: Statement) -> str:
        return f"carry_{s.name} = tl.full([{self.tile.rows}, 1], {neutral_element(s)}, {s.node.compute})"

    def _scan_lines(self, s: Statement) -> list[str]:
        """The running sums or products within a tile, on top of those of the tiles before it."""
        assert isinstance(s.node, Scan)
        text, tests = s.operands[0].name, ["column_ok"] * (self.column_mask and s.node.reverse)
        tests += ["(column > 0)"] * s.node.exclusive
        # What must not count is the neutral element. In a reversed scan columns beyond the end come
        # first.
        if tests:
            text = f"tl.where({' & '.join(tests)}, {text}, {neutral_element(s)})"
        if not (s.operands[0].rows and s.operands[0].columns):
            text = f"tl.broadcast_to({text}, [{self.tile.rows}, {self.tile.columns}])"
        lines = [f"in_{s.name} = {text}"]
        scan = f"tl.cum{s.text}(in_{s.name}, axis=1, reverse={s.node.reverse})"
        if not self.tile.loop:
            return [*lines, f"{s.name} = {scan}"]
        sign = "+" if s.text == "sum" else "*"
        lines.append(f"{s.name} = carry_{s.name} {sign} {scan}")
        return [*lines, f"carry_{s.name} = carry_{s.name} {sign} {reduce_text(s, f'in_{s.name}')}"]

    def column_statements(self, users: Iterable[Statement]) -> list[Statement]:
        """The statements that vary over columns and that `users` need, in order."""
        needed: set[str] = set()
        stack = [n for user in users for n in user.operands]
        while stack:
            s = stack.pop()
            if s.columns and s.name not in needed:
                needed.add(s.name)
                stack += s.operands
        return [s for s in self.nest.statements if s.name in needed]

    def line(self, s: Statement) -> list[str]:
        """The Triton text of one statement."""
        names = [n.name for n in s.operands]
        if s.kind == "map":
            return [f"{s.name} = {s.text.format(*names)}"]
        if s.kind == "constant":
            return [f"{s.name} = {s.text}"]
        if s.kind == "position":
            return [
                f"{s.name} = ({self.offset(s.access) or '0'}).to(tl.int64)"
                if s.access.terms
                else self._print_constant_position(s)
            ]
        if s.kind == "load":
            return [f"{s.name} = " + self._load(s)]
        if s.kind == "store":
            return [self._store(s)]
        if s.kind == "scan":
            return self._scan_lines(s)
        return self._reduce_lines(s)

    def _print_constant_position(self, s: Statement) -> str:
        return f"{s.name} = tl.full([], {s.access.offset}, tl.int64)"

    def _reduce_lines(self, s: Statement) -> list[str]:
        return [f"{s.name} = {self.print_tile_reduction(s)}"]

    def print_tile_reduction(self, s: Statement) -> str:
        """The reduction of the tile's columns."""
        source = s.operands[0]
        text = source.name
        if self.column_mask:
            text = f"tl.where(column_ok, {text}, {neutral_element(s)})"
        # A value without rows or columns is no tile: `tl` would not reduce it along the axis.
        if not (source.rows and source.columns):
            text = f"tl.broadcast_to({text}, [{self.tile.rows}, {self.tile.columns}])"
        return reduce_text(s, text)

    def offset(self, form: AffineExpr, before_column: str = "") -> str:
        """Text of an address: empty for 0. `before_column` is put before the names of columns.

        An access that runs through all rows or columns in their order is addressed by their number,
        which the compiler knows to be contiguous.
        """
        parts: list[tuple[str, int]] = []
        for base, atoms in (("row", self.nest.rows), ("column", self.nest.columns)):
            terms = [(atom, c) for atom, c in form.terms if atom in atoms]
            step = _find_common_stride(terms, atoms)
            names = [(before_column * atom.column + self.names[atom.id], c) for atom, c in terms]
            parts += [(base, step)] if step and not (before_column and base == "column") else names
        texts = [name if c == 1 else f"{c} * {name}" for name, c in parts]
        return " + ".join(texts + ([str(form.offset)] if form.offset else []))

    def _mask(self, rows: bool, columns: bool, *also: str) -> str:
        parts = (
            ["row_ok"] * (rows and self.row_mask)
            + ["column_ok"] * (columns and self.column_mask)
            + list(also)
        )
        return f", mask={' & '.join(parts)}" if parts else ""

    def _load(self, s: Statement) -> str:
        steady = self.is_uniform(s)
        offset = self.offset(s.access, "at_" * steady)
        # An exclusive scan reads one place earlier: its first element has none before it.
        before = ["(column > 0)"] * (s.access.offset < 0 and not s.limits)
        mask = self._mask(s.rows, s.columns and not steady, *before, *self._inside_of(s))
        # Triton takes no whole number as the default of an 8-bit float's load.
        eight_bits = s.node.dtype.is_floating_point and s.node.dtype.itemsize == 1
        fill = s.text if s.limits else "0.0" if eight_bits else "0"
        text = f"tl.load(p{s.value}{' + ' + offset if offset else ''}{mask}{', other=' + fill if mask else ''})"
        # Narrow types are computed in wider ones, as eager's kernels do.
        narrow = s.node.dtype is not torch.bool and s.node.dtype.itemsize < 4
        text += f".to({s.node.compute})" if narrow else ""
        return (
            f"tl.broadcast_to({text}, [{self.tile.rows}, {self.tile.columns}])" if steady else text
        )

    def _inside_of(self, s: Statement) -> list[str]:
        """Tests that the load of a padded tensor is inside of it."""
        tests = []
        for form, size in s.limits:
            place = self.offset(form) or "0"
            tests += [f"({place} >= 0)"] * (form.offset < 0) + [f"({place} < {size})"] * (
                form.largest >= size
            )
        return tests

    def _store(self, s: Statement) -> str:
        offset = self.offset(s.access)
        # a dimension of size 1 has no loop variable: the pointers must still have the shape of the
        # tile
        offset += "" if s.access.rows else (" + " if offset else "") + "row * 0"
        offset += "" if s.access.columns or not s.columns else " + column * 0"
        return f"tl.store(p{s.value} + {offset}, {s.operands[0].name}{self._mask(True, s.columns, *self.store_tests(s))})"

    def store_tests(self, s: Statement) -> list[str]:
        """Further tests for the mask of a store, as text."""
        return []


def _find_common_stride(terms: Sequence[tuple[Atom, int]], atoms: Sequence[Atom]) -> int:
    """The stride from one number of the row-major order over `atoms` to the next; 0 if it varies,
    or if there are fewer than two atoms.
    """
    strides = row_major(tuple(a.extent for a in atoms))
    steps = dict(terms)
    quotients = {
        divmod(steps.get(atom, 0), stride) for atom, stride in zip(atoms, strides, strict=True)
    }
    if len(atoms) < 2 or len(quotients) != 1:
        return 0
    ((step, remainder),) = quotients
    return 0 if remainder else step


def _varies_only_over(s: Statement, atoms: Collection[Atom]) -> bool:
    """Whether of all columns a load varies over these alone, and is inside of its tensor there."""
    columns = [atom for atom, _ in s.access.terms if atom.column]
    return (
        bool(columns)
        and all(atom in atoms for atom in columns)
        and s.access.offset >= 0
        and not s.limits
    )


def neutral_element(s: Statement) -> str:
    """The literal that changes nothing in the reduction or scan, such as 0 in a sum."""
    compute = s.node.compute
    if s.text in ("sum", "prod"):
        return "0" if s.text == "sum" else "1"
    if compute == "tl.float32":
        return 'float("-inf")' if s.text == "max" else 'float("inf")'
    return (_INT_MIN if s.text == "max" else _INT_MAX)[compute]


def _combine_template(s: Statement) -> str:
    return (_COMBINE if s.node.compute == "tl.float32" else _COMBINE_INT)[s.text]


def reduce_text(s: Statement, text: str, axis: int = 1) -> str:
    """A reduction of `text` along `axis`, of a kind that `online` does not print. `axis` 0: of one
    dimension, to a number.
    """
    keep = ", keep_dims=True" * axis
    # `tl.max` and `tl.min` drop NaN, and Triton has no product: those go through a function of the
    # prelude.
    plain = s.text == "sum" or (s.text != "prod" and s.node.compute != "tl.float32")
    if plain:
        return f"tl.{s.text}({text}, axis={axis}{keep})"
    return f"tl.reduce({text}, {axis}, {_FUNCTION[s.text]}{keep})"
