"""Which KernelBench-style files the language has words for: what they compute and at which sizes,
read from their text alone.

A file is recognised where its forward returns an expression of `ops` in any spelling known here, on
dense inputs whose sizes are constants, and its constructor takes nothing. Everything else is
unsupported, with the reason, and counts as a failure in any figure over a set of tasks. Nothing of
a file is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.ksl.ops import DIMS, OPS, Op

__all__ = ["Recognised", "recognise", "recognise_all"]

_DRAWS = ("rand", "randn")
_NAMES = {
    "F": "torch.nn.functional",
    "nn.functional": "torch.nn.functional",
    "torch.mm": "torch.matmul",
}


@dataclass(frozen=True)
class Recognised:
    """Tasks that the language can write about, and why it cannot about the others, by their ids."""

    tasks: tuple[TrainingTask, ...]
    unsupported: Mapping[str, str]


def recognise_all(tasks: Sequence[TrainingTask]) -> Recognised:
    """Each task with its family and shape, or the reason it has none."""
    found = {task.id: recognise(task) for task in tasks}
    supported = tuple(one for one in found.values() if isinstance(one, TrainingTask))
    return Recognised(supported, {name: one for name, one in found.items() if isinstance(one, str)})


def recognise(task: TrainingTask) -> TrainingTask | str:
    """The task with the family and shape that its reference has, or why it is unsupported."""
    try:
        tree = ast.parse(task.reference)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it does not parse: {error}"
    forward, inputs, init = (
        _function(tree, name) for name in ("forward", "get_inputs", "get_init_inputs")
    )
    if forward is None or inputs is None or init is None:
        return "it has no forward, get_inputs or get_init_inputs"
    if _returned(init) is None or ast.unparse(_returned(init) or init) != "[]":
        return "its constructor takes arguments"
    constants = _constants([*tree.body, *inputs.body])
    shapes = _shapes(_returned(inputs), constants)
    result = _returned(forward)
    if shapes is None or result is None:
        return "its inputs are no constant sizes, or its forward is more than one expression"
    names = [argument.arg for argument in forward.args.args[1:]]
    return _matched(task, _spelling(result, names, len(shapes[0]) if shapes else 0), shapes)


def _matched(
    task: TrainingTask, spelt: str, shapes: Sequence[tuple[int, ...]]
) -> TrainingTask | str:
    for op in OPS.values():
        if (
            _spelling(
                ast.parse(op.expression, mode="eval").body,
                list(op.names),
                len(op.arguments[0].sizes),
            )
            != spelt
        ):
            continue
        sizes = _sizes(op, shapes)
        return (
            sizes
            if isinstance(sizes, str)
            else replace(task, family=op.name, shape=tuple(sizes[name] for name in DIMS[op.kind]))
        )
    return f"no operation of the language computes {spelt[:120]}"


def _sizes(op: Op, shapes: Sequence[tuple[int, ...]]) -> dict[str, int] | str:
    """The sizes by name, if the inputs agree on them."""
    sizes: dict[str, int] = {}
    for argument, shape in zip(op.arguments, shapes, strict=False):
        if len(shape) != len(argument.sizes) or any(
            sizes.setdefault(*pair) != pair[1] for pair in zip(argument.sizes, shape, strict=True)
        ):
            return f"{op.name} with inputs of shapes {list(shapes)}"
    return sizes if len(shapes) == len(op.arguments) else f"{op.name} with {len(shapes)} inputs"


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    return next(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == name
        ),
        None,
    )


def _returned(function: ast.FunctionDef) -> ast.expr | None:
    """What a function returns that otherwise only assigns, or documents itself; None for any other."""
    *others, last = function.body
    said = [node for node in others if not isinstance(node, ast.Pass)]
    plain = all(isinstance(node, ast.Assign) or _is_docstring(node) for node in said)
    if not isinstance(last, ast.Return) or not plain:
        return None
    assigned = {
        node.targets[0].id: node.value
        for node in others
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return _filled(last.value, assigned) if last.value else None


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _filled(value: ast.expr, assigned: Mapping[str, ast.expr]) -> ast.expr:
    """An expression with the names that were just assigned in it."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return assigned.get(node.id, node)

    filled: ast.expr = Fill().visit(value)
    return filled


def _constants(body: Sequence[ast.stmt]) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and (value := _number(node.value, found)) is not None
        ):
            found[node.targets[0].id] = value
    return found


def _number(node: ast.expr, known: Mapping[str, int]) -> int | None:
    """An integer made of literals, names of constants, products, sums and powers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left, known), _number(node.right, known)
        if left is not None and right is not None and max(abs(left), abs(right)) < 1 << 40:
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Pow) and 0 <= right < 40:
                return int(left**right)
    return None


def _shapes(value: ast.expr | None, constants: Mapping[str, int]) -> list[tuple[int, ...]] | None:
    """The shapes of a list of `torch.rand(...)` and `torch.randn(...)`."""
    if not isinstance(value, ast.List):
        return None
    shapes = []
    for item in value.elts:
        if not (
            isinstance(item, ast.Call)
            and isinstance(item.func, ast.Attribute)
            and item.func.attr in _DRAWS
            and not item.keywords
        ):
            return None
        given = (
            item.args[0].elts
            if len(item.args) == 1 and isinstance(item.args[0], (ast.Tuple, ast.List))
            else item.args
        )
        sizes = [_number(one, constants) for one in given]
        if not sizes or any(size is None or size < 1 for size in sizes):
            return None
        shapes.append(tuple(size for size in sizes if size is not None))
    return shapes


def _spelling(value: ast.expr, names: Sequence[str], dims: int) -> str:
    """One spelling for expressions that mean the same: positional names, products as calls, the
    last dimension as -1.
    """
    renamed = {name: f"input_{place}" for place, name in enumerate(names)}

    class Spell(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.Name(renamed.get(node.id, _NAMES.get(node.id, node.id)))

        def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
            self.generic_visit(node)
            if isinstance(node.op, ast.MatMult):
                return ast.Call(ast.Name("torch.matmul"), [node.left, node.right], [])
            return node

        def visit_Call(self, node: ast.Call) -> ast.expr:
            self.generic_visit(node)
            name = ast.unparse(node.func)
            keywords = sorted(
                _dimensions(node.keywords, dims), key=lambda keyword: keyword.arg or ""
            )
            return ast.Call(ast.Name(_NAMES.get(name, name)), node.args, keywords)

    return ast.unparse(Spell().visit(ast.parse(ast.unparse(value), mode="eval").body))


def _dimensions(keywords: Sequence[ast.keyword], dims: int) -> Iterator[ast.keyword]:
    for keyword in keywords:
        last = (
            keyword.arg == "dim"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value == dims - 1
        )
        yield ast.keyword("dim", ast.parse("-1", mode="eval").body) if last else keyword
