"""Turns output expressions into one loop nest: statements over rows (programs) and columns (inside
a reduction).

The iteration space is the source of the fusion group's first reduction, or the output of an
element-wise fusion group. Every other reduction must fold as many columns. A reshape that cuts a
loop variable refines the space, and scheduling starts over. Expressions that do not fit one nest
raise NotLowerableError. `triton_text` prints the nest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.affine import (
    AffineExpr,
    Atom,
    AtomSplit,
    Index,
    flatten,
    linear_index,
    row_major,
    unflatten,
)
from torch_cudal1.kernels.expr.element_order import follow_product_order
from torch_cudal1.kernels.expr.from_program import Output
from torch_cudal1.kernels.expr.nodes import (
    Constant,
    Conv,
    Dot,
    Leaf,
    LinearIndex,
    Map,
    Node,
    Padded,
    Reduce,
    Scan,
    View,
    sources,
)

__all__ = [
    "Nest",
    "Statement",
    "build_epilogue_nest",
    "build_nest",
    "build_operand_nest",
    "find_reductions",
    "find_scans",
]

_MAX_STATEMENTS = 256
_MAX_ATOM_SPLITS = 16


@dataclass(frozen=True, eq=False)
class Statement:
    """One assignment (or store) of the kernel.

    `kind`: "load", "store", "position", "constant", "map", "reduce", "scan" or "product" (the
    element of a Dot at its own place). `text`: the template over `operands`, the literal, or the
    kind of the reduction or scan. `level`: how many reductions must be finished before it. `rows`,
    `columns`: whether it varies over rows and over columns.
    """

    name: str
    kind: str
    node: Node
    level: int = 0
    rows: bool = False
    columns: bool = False
    text: str = ""
    operands: tuple[Statement, ...] = ()
    access: AffineExpr = field(default_factory=AffineExpr)
    value: int = -1
    # Of a load that may leave its tensor: each form must be in 0 .. limit.
    limits: tuple[tuple[AffineExpr, int], ...] = ()
    # Of a store: the tensor's, which may be wider than its node's.
    tensor_dtype: torch.dtype | None = None

    @property
    def ready_level(self) -> int:
        """The level at which its value may be used."""
        return self.level + (self.kind == "reduce")


@dataclass(frozen=True)
class Nest:
    """Statements in order, over `rows` and `columns` (atoms, outermost first; no columns:
    element-wise).
    """

    statements: tuple[Statement, ...]
    atoms: tuple[Atom, ...]

    @property
    def rows(self) -> tuple[Atom, ...]:
        """Atoms spread over programs."""
        return tuple(a for a in self.atoms if not a.column)

    @property
    def columns(self) -> tuple[Atom, ...]:
        """Atoms folded by reductions."""
        return tuple(a for a in self.atoms if a.column)

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return math.prod(a.extent for a in self.rows)

    @property
    def column_count(self) -> int:
        """Number of columns."""
        return math.prod(a.extent for a in self.columns)

    @property
    def reduces(self) -> bool:
        """Whether there is any reduction or scan, which needs whole rows."""
        return any(s.kind in ("reduce", "scan") for s in self.statements)

    @property
    def levels(self) -> int:
        """The number of reductions in the longest chain where each needs the result of another."""
        return max((s.ready_level for s in self.statements), default=0)


def find_reductions(
    nodes: tuple[Node, ...], stop: frozenset[Node] = frozenset()
) -> tuple[Reduce, ...]:
    """Every reduction below `nodes`, sources before users. The nodes in `stop`, and what is below
    them, are left out.
    """
    visited: set[Node] = set(stop)
    reductions: list[Reduce] = []

    def visit(node: Node) -> None:
        if node in visited:
            return
        visited.add(node)
        for source in sources(node):
            visit(source)
        if isinstance(node, Reduce):
            reductions.append(node)

    for node in nodes:
        visit(node)
    return tuple(reductions)


def find_scans(nodes: tuple[Node, ...]) -> tuple[Scan, ...]:
    """Every scan below `nodes`."""
    visited: dict[Node, None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in visited:
            visited[node] = None
            waiting += sources(node)
    return tuple(node for node in visited if isinstance(node, Scan))


def build_nest(outputs: tuple[Output, ...]) -> Nest:
    """One loop nest that computes all outputs. Raises NotLowerableError when they need more than
    one.
    """
    nodes = tuple(o.node for o in outputs)
    folds, scans = find_reductions(nodes), find_scans(nodes)
    if scans:
        # The first scan or reduction gives the rows and columns; the others must fit it.
        sizes = [(size, dim == scans[0].dim) for dim, size in enumerate(scans[0].shape)]
    elif folds:
        sizes = [(size, dim in folds[0].dims) for dim, size in enumerate(folds[0].source.shape)]
    else:
        sizes = [(size, False) for size in max((o.node.shape for o in outputs), key=math.prod)]
    # Fewer loop variables are fewer divisions for addresses, and neighbours that stay together are
    # wide loads.
    nest = _merge_loops(_build_with_splits(outputs, sizes))
    # `tl.cumsum` runs over one axis of a tile, so a row must be one loop variable.
    if scans and len(nest.columns) > 1:
        raise NotLowerableError("a scan whose elements have no single stride")
    return nest


def build_epilogue_nest(outputs: tuple[Output, ...], dot: Dot) -> Nest:
    """The nest of the element-wise steps after a product. Its rows are the product's batch and rows
    in order, its columns the product's columns; no loop variables are merged.

    Of a convolution the columns are the channels, and the rows everything else.

    Raises NotLowerableError when an output needs the product at another place than its own, or has
    another number of elements.
    """
    if find_reductions(tuple(o.node for o in outputs)):
        raise NotLowerableError(
            "a reduction of a product needs whole rows, a tile has parts of them"
        )
    column = 1 if isinstance(dot, Conv) else len(dot.shape) - 1
    sizes = [(size, dim == column) for dim, size in enumerate(dot.shape)]
    # A tile's `row` and `column` are counted by the product's kernel: merging or sorting loop
    # variables here would give them another meaning.
    return _build_with_splits(tuple(follow_product_order(output, dot) for output in outputs), sizes)


def build_operand_nest(operand: Output) -> Nest:
    """The nest of a matrix that is computed for each tile of a product. Its rows are k, its columns
    the product's columns; no loop variables are merged.

    Raises NotLowerableError where making it takes a reduction or a scan.
    """
    if find_reductions((operand.node,)) or find_scans((operand.node,)):
        raise NotLowerableError(
            "an operand made by a reduction or a scan: a product would repeat it for every tile"
        )
    rows, columns = operand.node.shape
    return _build_with_splits((operand,), [(rows, False), (columns, True)])


def _build_with_splits(outputs: tuple[Output, ...], sizes: list[tuple[int, bool]]) -> Nest:
    for _ in range(_MAX_ATOM_SPLITS):
        atoms = tuple(Atom(i, size, column) for i, (size, column) in enumerate(sizes))
        try:
            return _Builder(atoms).build(outputs)
        # The nest is built anew over the finer space: an index that was made before the cut is not
        # valid in it.
        except AtomSplit as cut:
            at, (size, column) = cut.atom.id, sizes[cut.atom.id]
            sizes[at : at + 1] = [(size // cut.inner, column), (cut.inner, column)]
    raise NotLowerableError(f"reshapes cut the loops more than {_MAX_ATOM_SPLITS} times")


class _Builder:
    """Emits statements for nodes at indices, each pair once."""

    def __init__(self, atoms: tuple[Atom, ...]) -> None:
        self.atoms = atoms
        self.full = linear_index(atoms)
        self.row = linear_index(tuple(a for a in atoms if not a.column))
        self.column = linear_index(tuple(a for a in atoms if a.column))
        self.statements: list[Statement] = []
        # A node at one index is computed once, whatever reads it.
        self.memo: dict[tuple[int, Index], Statement] = {}
        # Nodes that are made on the way stay alive here: `memo` is by id, and the id of a node that
        # is gone may be given to another.
        self.two_pass: list[Node] = []

    def build(self, outputs: tuple[Output, ...]) -> Nest:
        total = math.prod(a.extent for a in self.atoms)
        rows = math.prod(a.extent for a in self.atoms if not a.column)
        for output in outputs:
            numel = output.spec.numel
            if numel not in (total, rows):
                raise NotLowerableError(
                    f"output {output.value} has {numel} elements; the loops have {total} over {rows} rows"
                )
            index = unflatten(self.full if numel == total else self.row, output.spec.shape)
            source = self.emit(output.node, index)
            access = flatten(index, output.spec.strides)
            full = numel == total and any(a.column for a in self.atoms)
            store = Statement(
                "",
                "store",
                output.node,
                source.ready_level,
                True,
                full,
                operands=(source,),
                access=access,
                value=output.value,
                tensor_dtype=output.spec.torch_dtype,
            )
            self.statements.append(store)
        return Nest(tuple(self.statements), self.atoms)

    def emit(self, node: Node, index: Index) -> Statement:
        while isinstance(node, View):
            index, node = node.remap(index), node.source
        # A constant is the same at every index, so that it is one statement.
        if isinstance(node, Constant):
            index = ()
        key = (id(node), index)
        if key not in self.memo:
            self.two_pass.append(node)
            self.memo[key] = statement = self._make(node, index)
            self.statements.append(statement)
            if len(self.statements) > _MAX_STATEMENTS:
                raise NotLowerableError(f"more than {_MAX_STATEMENTS} statements")
        return self.memo[key]

    def _make(self, node: Node, index: Index) -> Statement:
        if isinstance(node, (Leaf, LinearIndex)):
            return self._access(node, flatten(index, node.strides))
        if isinstance(node, Padded):
            return self._load_padded(node, node.remap(index))
        if isinstance(node, Dot):
            return self._product(node, flatten(index, row_major(node.shape)))
        if isinstance(node, Reduce):
            return self._reduce(node, index)
        if isinstance(node, Scan):
            return self._scan(node, index)
        if not isinstance(node, (Map, Constant)):
            raise NotLowerableError(f"a {type(node).__name__} has no kernel of its own")
        needs = tuple(self.emit(arg, index) for arg in node.args) if isinstance(node, Map) else ()
        text = (
            node.template
            if isinstance(node, Map)
            else node.text
            if isinstance(node, Constant)
            else ""
        )
        kind = "map" if isinstance(node, Map) else "constant"
        level = max((n.ready_level for n in needs), default=0)
        rows, columns = any(n.rows for n in needs), any(n.columns for n in needs)
        return Statement(self._name(), kind, node, level, rows, columns, text, needs)

    def _name(self) -> str:
        return f"t{len(self.statements)}"

    def _access(self, node: Leaf | LinearIndex, form: AffineExpr) -> Statement:
        kind, value = ("load", node.value) if isinstance(node, Leaf) else ("position", -1)
        return Statement(
            self._name(), kind, node, 0, form.rows, form.columns, access=form, value=value
        )

    def _load_padded(self, node: Padded, index: Index) -> Statement:
        source = node.source
        if not isinstance(source, Leaf):
            raise NotLowerableError(
                "a window over what is computed in the fusion group: it would be computed once for every tap"
            )
        limits = tuple(
            (form, size)
            for form, size in zip(index, source.shape, strict=True)
            if form.offset or form.largest >= size
        )
        load = self._access(source, flatten(index, source.strides))
        return replace(load, node=replace(source), text=node.fill, limits=limits)

    def _product(self, node: Dot, form: AffineExpr) -> Statement:
        if form != self.full:
            raise NotLowerableError(
                "an element is made of another element of the product than its own"
            )
        return Statement(self._name(), "product", node, 0, True, True)

    def _reduce(self, node: Reduce, index: Index) -> Statement:
        if any(form.columns for form in index):
            raise NotLowerableError("a reduction is needed at every column of another one")
        sizes = tuple(node.source.shape[d] for d in node.dims)
        # Reductions of a nest share its loop over columns.
        if math.prod(sizes) != math.prod(a.extent for a in self.atoms if a.column):
            raise NotLowerableError(f"reductions over different numbers of columns: {sizes}")
        inner = dict(zip(node.dims, unflatten(self.column, sizes), strict=True))
        source = self.emit(node.source, tuple(inner.get(d, form) for d, form in enumerate(index)))
        return Statement(
            self._name(), "reduce", node, source.ready_level, True, False, node.kind, (source,)
        )

    def _scan(self, node: Scan, index: Index) -> Statement:
        other_indices = [form for d, form in enumerate(index) if d != node.dim]
        if index[node.dim] != self.column or any(form.columns for form in other_indices):
            raise NotLowerableError(
                "a scan is needed at another place than its own, or along another dimension"
            )
        # An exclusive scan at an element is the sum up to the one before: it reads one place
        # earlier, and the printer masks the first.
        place = index[node.dim].shift(-1) if node.exclusive else index[node.dim]
        source = self.emit(
            node.source, tuple(place if d == node.dim else form for d, form in enumerate(index))
        )
        return Statement(self._name(), "scan", node, source.level, True, True, node.kind, (source,))


def _merge_loops(nest: Nest) -> Nest:
    """Loop variables in memory order, and neighbours that are always walked together merged into
    one.
    """
    accesses = [s.access for s in nest.statements if s.kind in ("load", "store", "position")]
    # Tests of padding are forms over the loop variables too: they must survive the merge.
    accesses += [form for s in nest.statements for form, _ in s.limits]
    # The access with most variables and the longest reach is that of the largest tensor: its memory
    # order decides.
    main = max(accesses, key=lambda form: (len(form.terms), form.largest))
    groups: list[list[list[Atom]]] = []
    for column in (False, True):
        atoms = [a for a in nest.atoms if a.column is column and a.extent > 1]
        # Largest stride outermost: neighbouring threads then read neighbouring elements.
        atoms.sort(key=lambda a: main.coefficient(a), reverse=True)
        merged: list[list[Atom]] = []
        for atom in atoms:
            last = merged[-1][-1] if merged else None
            # Two variables are one where every access steps through them as through one.
            if last and all(
                form.coefficient(last) == form.coefficient(atom) * atom.extent for form in accesses
            ):
                merged[-1].append(atom)
            else:
                merged.append([atom])
        groups.append(merged)
    return _renumber_atoms(nest, [group for part in groups for group in part])


def _renumber_atoms(nest: Nest, groups: list[list[Atom]]) -> Nest:
    new_atoms = {
        g[-1]: Atom(i, math.prod(a.extent for a in g), g[0].column) for i, g in enumerate(groups)
    }
    renumbered: dict[Statement, Statement] = {}
    for old in nest.statements:
        limits = tuple((_rewrite_over(form, new_atoms), size) for form, size in old.limits)
        renumbered[old] = replace(
            old,
            access=_rewrite_over(old.access, new_atoms),
            limits=limits,
            operands=tuple(renumbered[n] for n in old.operands),
        )
    return Nest(tuple(renumbered.values()), tuple(new_atoms.values()))


def _rewrite_over(form: AffineExpr, new_atoms: Mapping[Atom, Atom]) -> AffineExpr:
    """The form over other atoms: each steps as the last of the old atoms that it replaces."""
    return AffineExpr(
        form.offset,
        tuple(
            (new, form.coefficient(old)) for old, new in new_atoms.items() if form.coefficient(old)
        ),
    )
