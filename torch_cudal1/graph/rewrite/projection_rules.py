"""Rules around the projections of attention: the copies that PyTorch's modules make there become
views of what is there already.

`nn.MultiheadAttention` puts time before batch, for which it copies before, between and after its
products. But the rows of a product may be in any order, and attention reads its operands where they
lie. Merging products is `gemm_rules`' subject.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.alias import VIEWS, find_base, reaches_output
from torch_cudal1.graph.rewrite.layout import Cut, emit, find_cut, permute, takes_strides
from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    emit_strided_copy,
    fake_mode,
    is_op,
    is_output,
    is_tensor,
    iter_calls,
    replace,
    shape,
    strides,
    uses_once,
    val,
)
from torch_cudal1.graph.rewrite.pushed_reductions import FLOATS
from torch_cudal1.graph.rewrite.rule import Rule
from torch_cudal1.ir.ops.attention_names import FORWARDS, FORWARDS_ELSEWHERE

__all__ = ["PROJECTION_RULES"]

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_ATTENTION = tuple(getattr(aten, name).default for name in (*FORWARDS, *FORWARDS_ELSEWHERE))
# of one instruction; PyTorch's kernels refuse operands that lie at odder places than they were
# chosen for
_LOAD_BYTES = 16


def one_factor_for_all(gm: fx.GraphModule) -> int:
    """`bmm(x, expand(w))` -> `view(mm(view(x), w))`, where x is contiguous but for the order of its
    rows.

    Before: a product for each batch, w read for each; after: one. PyTorch makes the former of a
    linear layer over a transposed x if w needs no gradient. Other rows are put in order by a copy,
    which `rows_in_order` then takes away.
    """
    sites = 0
    for node in iter_calls(gm, aten.bmm.default):
        lhs, rhs = node.args
        if (
            not (is_tensor(lhs) and is_tensor(rhs))
            or 0 in (*shape(lhs), *shape(node))
            or dtype(node) not in FLOATS
        ):
            continue
        (batch, rows, inner), width = shape(lhs), shape(node)[2]
        # Only then is (batch * rows, inner) a view.
        in_order = val(lhs).is_contiguous()
        # Stride 0 along the batch: every batch has the same factor.
        if batch < 2 or strides(rhs)[0] != 0 or not (in_order or _is_turned(lhs, node)):
            continue
        with gm.graph.inserting_before(node):
            matrix = call(gm.graph, aten.select.int, rhs, 0, 0)
            flat = (
                lhs
                if in_order
                else call(gm.graph, aten.clone.default, lhs, memory_format=torch.contiguous_format)
            )
            new = call(
                gm.graph,
                aten.mm.default,
                call(gm.graph, aten.view.default, flat, [batch * rows, inner]),
                matrix,
            )
            replace(node, call(gm.graph, aten.view.default, new, [batch, rows, width]))
        sites += 1
    return sites


def _is_turned(lhs: fx.Node, product: fx.Node) -> bool:
    """Whether the rows lie one after another once batches and rows change places, and the product
    may follow them.
    """
    return val(lhs).transpose(0, 1).is_contiguous() and not reaches_output(product)


def bias_in_matmul(gm: fx.GraphModule) -> int:
    """`view(x @ w) + b` -> `view(addmm(b, x, w))` for a vector b.

    Before: a pass over the result (read and write M N elements); after: none, the library adds b as
    it writes the product. Valid for one floating dtype, a vector along the last dim, a product that
    nothing else uses. Rounding: once instead of twice.
    """
    sites = 0
    for node in iter_calls(gm, aten.add.Tensor):
        bound_args = arguments(node)
        for operand, bias in (
            (bound_args["self"], bound_args["other"]),
            (bound_args["other"], bound_args["self"]),
        ):
            product = _find_product(operand)
            if (
                product is None
                or bound_args["alpha"] != 1
                # The bias must not broadcast the product.
                or shape(node) != shape(operand)
                or not _is_bias_of(bias, product)
            ):
                continue
            with gm.graph.inserting_before(node):
                width = shape(product)[1]
                vector = (
                    bias
                    # `addmm` broadcasts a vector over the rows.
                    if shape(bias) == (width,)
                    else call(gm.graph, aten.view.default, bias, [width])
                )
                new = call(gm.graph, aten.addmm.default, vector, *product.args)
                replace(
                    node,
                    new
                    if operand is product
                    else call(gm.graph, aten.view.default, new, list(shape(node))),
                )
            sites += 1
            # The node is gone, so its operands must not be tried the other way round.
            break
    return sites


def _find_product(node: object) -> fx.Node | None:
    """The product that `node` is, or reshapes with the last dim as it was, if nothing else reads
    it.
    """
    while (
        is_op(node, *_RESHAPES) and uses_once(node) and shape(node)[-1:] == shape(node.args[0])[-1:]
    ):
        node = node.args[0]
    return node if is_op(node, aten.mm.default) and uses_once(node) else None


def _is_bias_of(bias: object, product: fx.Node) -> bool:
    if (
        not is_tensor(bias)
        # `x @ w + (x @ w)[0]`: the bias would be needed before the product that it is a view of.
        or find_base(bias) is product
        or dtype(bias) != dtype(product)
        or dtype(bias) not in FLOATS
    ):
        # Any other reader would see the rows in their new order.
        return False
    *lead, last = shape(bias) or (0,)
    return (
        val(bias).device == val(product).device
        and math.prod(lead) == 1
        and last == shape(product)[1]
    )


@dataclass(frozen=True)
class _Rows:
    """A product's left operand, a copy of `source` with rows in another order: those of `source` in
    `order` lie one after another.

    `lead` are the sizes of the dims of rows, as the copy has them.
    """

    source: fx.Node
    lead: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def back(self) -> list[int]:
        """The order that brings the dims of rows, and columns after them, to where the copy has
        them.
        """
        return [*(self.order.index(dim) for dim in range(len(self.lead))), len(self.lead)]


def rows_in_order(gm: fx.GraphModule) -> int:
    """`view(copy(permute(x))) @ w` -> `permute(view(x) @ w)` where only rows change places. `addmm`
    likewise.

    Before: the copy (read and write M K elements); after: none. Rows do not meet in a product, so
    the numbers are the same. Valid for rows that lie one after another in x, with a bias vector,
    and where what reads the result can read it in x's order.
    """
    sites = 0
    for node in iter_calls(gm, aten.mm.default, aten.addmm.default):
        bound_args = arguments(node)
        lhs = bound_args.get("mat1", bound_args["self"])
        bias_is_vector = "mat1" not in bound_args or len(shape(bound_args["self"])) < 2
        rows = _find_moved_rows(lhs)
        # A bias matrix would have to be put into the new order of rows.
        if rows is None or not bias_is_vector or not _replace_in_place(gm.graph, node, rows):
            continue
        with gm.graph.inserting_before(node):
            order = [*rows.order, *range(len(rows.lead), len(shape(rows.source)))]
            laid = call(
                gm.graph,
                aten.view.default,
                permute(gm.graph, rows.source, order),
                list(shape(lhs)),
            )
            args = [laid if arg is lhs else arg for arg in node.args[:-1]]
            new = call(gm.graph, node.target, *args, node.args[-1], **node.kwargs)
            split = call(
                gm.graph,
                aten.view.default,
                new,
                [*(rows.lead[dim] for dim in rows.order), shape(node)[1]],
            )
            moved = permute(gm.graph, split, rows.back)
        # Each reader had a reshape of the product; it gets one of the permuted result.
        for view in list(node.users):
            with gm.graph.inserting_before(view):
                same = shape(view) == shape(moved)
                replace(
                    view,
                    moved if same else call(gm.graph, aten.view.default, moved, list(shape(view))),
                )
        sites += 1
    return sites


def _find_moved_rows(lhs: fx.Node) -> _Rows | None:
    copy = find_base(lhs)
    if (
        not is_op(copy, aten.clone.default)
        or not is_tensor(copy.args[0])
        or 0 in shape(copy)
        # Another reader keeps the copy, and then nothing is saved.
        or not _is_only_multiplied(copy)
    ):
        return None
    reads_all = val(lhs).numel() == val(copy).numel()
    # The left operand has to be the whole copy in another shape.
    if not (reads_all and val(lhs).is_contiguous() and val(copy).is_contiguous()):
        return None
    source, depth = copy.args[0], len(shape(copy))
    # Where the copy's dims of rows end: the rest of its dims are the product's inner size.
    leads = (lead for lead in range(depth) if math.prod(shape(copy)[lead:]) == shape(lhs)[1])
    lead = next(leads, 0)
    order = tuple(
        sorted(
            # Largest stride first: the order in which the rows lie in memory.
            range(lead),
            key=lambda dim: (strides(source)[dim], shape(source)[dim]),
            reverse=True,
        )
    )
    if (
        # Rows that lie in order are the copy's own layout: nothing would change.
        order == tuple(range(lead))
        or not val(source).permute(*order, *range(lead, depth)).is_contiguous()
    ):
        return None
    return _Rows(source, shape(source)[:lead], order)


def _is_only_multiplied(node: fx.Node) -> bool:
    """Whether products read a copy and its views as left operands, and nothing else reads them.
    Otherwise the copy would stay, and the rule would gain nothing.
    """
    products = aten.mm.default, aten.addmm.default
    return all(
        (is_op(user, *VIEWS) and _is_only_multiplied(user))
        or (
            is_op(user, *products)
            and user.args[-2] is node
            and user.all_input_nodes.count(node) == 1
        )
        for user in node.users
    )


def _replace_in_place(graph: fx.Graph, product: fx.Node, rows: _Rows) -> bool:
    """Whether the graph works with the product's rows in the order of `rows`; nodes that change
    their strides know them then.
    """
    mode = fake_mode(graph)
    if mode is None or not all(is_op(view, *_RESHAPES) for view in product.users):
        return False
    width, strided_values = shape(product)[1], {}
    with mode, torch.no_grad():
        laid = (
            val(product)
            .new_empty([*(rows.lead[dim] for dim in rows.order), width])
            .permute(rows.back)
        )
        for view in product.users:
            try:
                strided_values[view] = laid.view(shape(view))
            except (RuntimeError, ValueError):  # as in `layout`: there is no such view
                return False
        # An output's strides are part of the call's result.
        if not takes_strides(graph, strided_values) or any(map(is_output, strided_values)):
            return False
    for node, moved in strided_values.items():
        node.meta["val"] = moved
    return True


def heads_in_one_view(gm: fx.GraphModule) -> int:
    """`attention(view(transpose(view(x))), ...)` -> `attention(permute(view(x)), ...)`: operands by
    the fewest views of x.

    No copy goes by itself, but views that join heads and batches only exist while rows lie in one
    order (`rows_in_order`).
    """
    sites = 0
    for node in iter_calls(gm, *_ATTENTION):
        # Query, key and value may be one tensor.
        for operand in dict.fromkeys(node.args[:3]):
            root = find_base(operand) if is_tensor(operand) else None
            if not is_tensor(operand) or not is_tensor(root) or not val(root).is_contiguous():
                continue
            cut = find_cut(
                shape(root), val(operand), _read_offset(val(operand)) - _read_offset(val(root))
            )
            # Strictly fewer views, or the rule would replace its own result forever.
            if cut is not None and cut.steps < _count_views_between(operand, root):
                with gm.graph.inserting_before(node):
                    node.replace_input_with(operand, emit(gm.graph, root, cut))
                sites += 1
    return sites


def _count_views_between(node: fx.Node, root: fx.Node) -> int:
    return 0 if node is root else 1 + _count_views_between(node.args[0], root)  # type: ignore[arg-type]


def attention_without_copy(gm: fx.GraphModule) -> int:
    """`attention(views of copy(x), ...)` -> `attention(views of x, ...)`.

    Before: the copy (read and write its elements), made so that each of query, key and value is
    contiguous; after: attention reads them out of the packed product, of which each head's elements
    are neighbours too. Valid where nothing but attention reads the copy, and rows stay as aligned
    as they were. The result keeps its strides, by a copy that has to be smaller; none on most
    paths.
    """
    sites = 0
    for copy in iter_calls(gm, aten.clone.default):
        cuts = _find_cuts(copy)
        if not cuts:
            continue
        moved = {node: cut.apply_to(val(find_base(copy.args[0]))) for node, cut in cuts.items()}  # type: ignore[arg-type]
        # PyTorch's kernels refuse operands that are less aligned than those they were chosen for.
        if not all(_is_as_aligned(moved[node], val(node)) for node in cuts):
            continue
        results = dict(_iter_results(gm.graph, moved))
        # Some results change their strides with those of the operands.
        again = [node for node, result in results.items() if _has_other_strides(result, val(node))]
        dense = all(torch.empty_like(val(node)).stride() == strides(node) for node in again)
        # Copying as much as was saved gains nothing.
        if not dense or sum(val(node).numel() for node in again) >= val(copy).numel():
            continue
        for node, cut in cuts.items():
            with gm.graph.inserting_before(node):
                replace(node, emit(gm.graph, find_base(copy.args[0]), cut))  # type: ignore[arg-type]
        for node in again:
            _keep_strides(gm.graph, node, results[node])
        sites += 1
    return sites


def _find_cuts(copy: fx.Node) -> dict[fx.Node, Cut]:
    """The views of a copy that attention reads, each as a cut of the tensor that was copied. Empty
    if another node reads the copy, or if a view is no such cut.
    """
    source = copy.args[0]
    root = find_base(source) if is_tensor(source) else copy
    if (
        not is_tensor(source)
        or root.op != "call_function"
        or not (val(root).is_contiguous() and val(copy).is_contiguous())
    ):
        return {}
    cuts: dict[fx.Node, Cut] = {}
    for node in _find_attention_readers(copy):
        of_copy = find_cut(shape(copy), val(node), _read_offset(val(node)))
        view = None if of_copy is None else of_copy.apply_to(val(source))
        of_root = (
            None
            if view is None
            else find_cut(shape(root), view, _read_offset(view) - _read_offset(val(root)))
        )
        if of_root is None:
            return {}
        cuts[node] = of_root
    return cuts


def _read_offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _find_attention_readers(copy: fx.Node) -> list[fx.Node]:
    """The copy and views of it that are queries, keys or values; empty where anything else is read."""
    readers: list[fx.Node] = []
    waiting = [copy]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if is_op(user, *VIEWS):
                waiting.append(user)
            elif (
                not is_op(user, *_ATTENTION)
                or node in user.args[3:]
                or node in user.kwargs.values()
            ):
                return []
        if any(is_op(user, *_ATTENTION) for user in node.users):
            readers.append(node)
    return readers


def _is_as_aligned(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether the rows of `new` are at least as aligned as those of `old`, and their elements as
    close.
    """

    def places(tensor: torch.Tensor) -> list[int]:
        return [
            _read_offset(tensor),
            *(tensor.stride(dim) for dim in range(tensor.dim() - 1) if tensor.shape[dim] > 1),
        ]

    # How many elements the old places are multiples of, up to one load.
    even = math.gcd(_LOAD_BYTES // new.element_size(), *places(old))
    neighbours = new.shape[-1] == 1 or new.stride(-1) == old.stride(-1)
    return neighbours and all(place % even == 0 for place in places(new))


def _iter_results(
    graph: fx.Graph, moved: Mapping[fx.Node, torch.Tensor]
) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """The results of attention that something reads, with the strides they have once the `moved`
    operands have theirs.
    """
    mode = fake_mode(graph)
    assert mode is not None  # `rewrite` starts with one
    readers = (user for operand in moved for user in operand.users if is_op(user, *_ATTENTION))
    for node in dict.fromkeys(readers):
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs),
            lambda item: moved[item] if item in moved else item.meta["val"],
        )
        with mode, torch.no_grad():
            after = node.target(*args, **kwargs)  # type: ignore[operator]
        for item in node.users:
            if item.target is operator.getitem and item.users and is_tensor(item):
                yield item, after[item.args[1]]


def _has_other_strides(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether strides differ, other than those of dims of size 1."""
    return any(new.stride(dim) != old.stride(dim) for dim in range(old.dim()) if old.shape[dim] > 1)


def _keep_strides(graph: fx.Graph, node: fx.Node, result: torch.Tensor) -> None:
    """`node`, which now holds `result`, gives its users the strides it had."""
    users, wanted_strides = list(node.users), strides(node)
    node.meta["val"] = result
    with graph.inserting_before(node.next):
        laid = emit_strided_copy(graph, node, shape(node), wanted_strides)
    assert laid is not None  # dense: asked for before
    for user in users:
        user.replace_input_with(node, laid)


PROJECTION_RULES = (
    Rule("one_factor_for_all", one_factor_for_all),
    Rule("bias_in_matmul", bias_in_matmul),
    Rule("heads_in_one_view", heads_in_one_view),
    Rule("rows_in_order", rows_in_order),
    Rule("attention_without_copy", attention_without_copy),
)
