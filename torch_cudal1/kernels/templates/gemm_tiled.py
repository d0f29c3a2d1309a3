"""Triton kernels of matrix products with their epilogues, in tiles.

    method        inputs  arithmetic                                                        may be used
    bf16x6        fp32    three bf16 pieces, six products, summed to fp32 every `depth` of k     always: at most cuBLAS fp32's error
    tf32x3        fp32    two tf32 pieces, three products, summed likewise                    always
    tf32          fp32    one tf32 product                                                  where the user allows TF32
    half          16 bit  tensor cores, fp32 sums                                           always
    fold          any     fp32 products and sums, row by row: matrix times few vectors       always
    packed-*      fp32    `packed`: pieces laid out in memory first, sm_90                    see there

The kernels move every operand tile once per tile of C; B is read from the L2 by a band of `group`
rows of tiles. With `split` > 1 programs share a tile's k: partial sums go through a scratch tensor
and are added in order, so results repeat bit for bit. NaN and infinity go through all of them as
through fp32 products: the pieces of an infinity are not finite, so the split methods take small
products that are NaN for 0, and the main product decides. Their pieces end at 2^-134: of inputs
below 2^-110 fewer bits than fp32's 24 remain, where the packed methods keep them all. Nothing here
decides which is fastest: the judge measures.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.codegen.epilogue import list_values, print_triton_epilogue
from torch_cudal1.kernels.codegen.loop_nest import Nest, build_epilogue_nest, build_operand_nest
from torch_cudal1.kernels.codegen.prelude import POINTERS, add_prelude
from torch_cudal1.kernels.expr.affine import AffineExpr, row_major
from torch_cudal1.kernels.expr.from_program import Output, TracedProgram
from torch_cudal1.kernels.expr.nodes import (
    Dot,
    Leaf,
    Node,
    Reduce,
    View,
    broadcast,
    find_nodes,
    pointwise,
    reshape,
    substitute,
)
from torch_cudal1.kernels.ops.matmul import Operand, Product, find_product, make_product
from torch_cudal1.kernels.proposal import KernelSource, Proposal
from torch_cudal1.kernels.templates.gemm_tiles import (
    FP32_METHODS,
    METHODS,
    GemmSchedule,
    read_schedule,
)

__all__ = ["GemmParts", "fold_product", "lower_tiled", "read_parts", "split_k", "split_k_as_batch"]

_INT32_REACH = 2**31 - 1
# The number of an operand that is in no memory: it is made on the way.
_NOT_IN_MEMORY = -1
# The text of `tl.dot`'s last argument; half types have only one way.
_PRECISION = {
    "bf16x6": ', input_precision="bf16x6"',
    "tf32x3": ', input_precision="tf32x3"',
    "tf32": ', input_precision="tf32"',
    "half": "",
}
_BODY = """
    block = tl.program_id(0)
    piece = block % SPLIT
    block = block // SPLIT
    batch = block // (HIGH * WIDE)
    block = block % (HIGH * WIDE)
    band = block // (GROUP * WIDE)
    rows = min(GROUP, HIGH - band * GROUP)
    block = block % (GROUP * WIDE)
    m = (band * GROUP + block % rows)TO64 * BM + tl.arange(0, BM)
    n = (block // rows)TO64 * BN + tl.arange(0, BN)
    left = pLEFT + LEFT_OFFSET + LEFT_PLANE + (LEFT_M * LEFT_ROW)[:, None]
RIGHT_POINTER    acc = tl.zeros([BM, BN], tl.float32)
    first = piece * LENGTH
    for start in range(first, END, BK):
        k = startTO64 + tl.arange(0, BK)
        x = tl.load(left + k[None, :] * LEFT_DEPTHLEFT_MASK)
RIGHT_TILEROUNDING        acc = tl.dot(x, y, accPRECISION)
"""
_POINTER = "    right = pRIGHT + RIGHT_OFFSET + RIGHT_PLANE + (RIGHT_N * RIGHT_ROW)[None, :]\n"
_READ = "        y = tl.load(right + k[:, None] * RIGHT_DEPTHRIGHT_MASK)\n"
# Tensor cores cut fp32 operands off after TF32's 10 bits: without rounding the error was 7.8e-4
# where cuBLAS's TF32 has 2.9e-4 (benchmarks/LOG.md, 2026-11-20).
_ROUNDED = "        x = nearest_tf32(x)\n        y = nearest_tf32(y)\n"


@dataclass(frozen=True)
class GemmParts:
    """A fusion group around a product: its expressions, the product as a node and as addresses, the
    nest of its epilogue, and the nest that computes `product.right` if that is not in memory.
    """

    traced: TracedProgram
    dot: Dot
    product: Product
    epilogue: Nest
    weight: Nest | None = None


def read_parts(traced: TracedProgram) -> GemmParts:
    """Take a fusion group apart. Raises NotLowerableError when it is not one product with
    element-wise steps after it.

    The right operand may be computed in the fusion group (from few bits); any other operand that
    must be computed first is refused.
    """
    nodes = tuple(o.node for o in traced.outputs)
    dots = find_nodes(Dot, nodes)
    if (
        len(dots) == 1
        and len(dots[0].shape) == 2
        and not isinstance(_strip_views(dots[0].right), Leaf)
    ):
        dot, weight = dots[0], _build_weight_nest(dots[0].right)
        product = make_product(dot, Operand(_NOT_IN_MEMORY, 1, dot.right.shape[1]))
    else:
        (dot, product), weight = find_product(nodes), None
    return GemmParts(traced, dot, product, build_epilogue_nest(traced.outputs, dot), weight)


def _build_weight_nest(right: Node) -> Nest:
    spec = TensorSpec(
        str(right.dtype).removeprefix("torch."), right.shape, row_major(right.shape), "cuda"
    )
    return build_operand_nest(Output(_NOT_IN_MEMORY, right, spec))


def lower_tiled(
    parts: GemmParts, proposal: Proposal, specs: Mapping[int, TensorSpec]
) -> KernelSource:
    """The kernel that computes the product in tiles, with its epilogue. Raises ProgramError when the
    proposal is nonsense for it.
    """
    schedule, product = read_schedule(proposal), parts.product
    _check_method(schedule, product)
    # Loops and masks are printed only where a tile reaches over the edge: sizes are literals.
    masks = product.m % schedule.rows != 0, product.n % schedule.columns != 0
    reads, writes = list_values(parts.epilogue)
    right = list_values(parts.weight)[0] if parts.weight is not None else (product.right.value,)
    # A tensor that is read in two places is one argument.
    values = tuple(dict.fromkeys((product.left.value, *right, *reads, *writes)))
    lines = [
        line
        for line in _print_main_loop(product, schedule, parts.weight).splitlines()
        if line.strip()
    ]
    if masks[0]:
        lines.append(f"    row_ok = (m < {product.m})[:, None]")
    if masks[1]:
        # The offset of the last plane may need 64 bits though every offset within a plane fits 32.
        lines.append(f"    column_ok = (n < {product.n})[None, :]")
    # Each piece of k writes a plane of the scratch tensor; planes are added afterwards in their
    # order. Atomic additions would make the result depend on the order of arrival.
    if schedule.split > 1:
        plane = product.batch * product.m * product.n
        lines.append(
            f"    p{writes[0]} = p{writes[0]} + piece{'.to(tl.int64)' if plane * schedule.split > _INT32_REACH else ''} * {plane}"
        )
    lines += [f"    row = (batch * {product.m} + m)[:, None]", "    column = n[None, :]"]
    lines += [
        "    " + line
        for line in print_triton_epilogue(parts.epilogue, schedule.rows, schedule.columns, masks)
    ]
    text = add_prelude(
        ", ".join(f"p{value}" for value in values) + "):\n" + "\n".join(lines) + "\n"
    )
    # The name is made of the text, so that equal names stand for equal machine code.
    symbol = f"gemm_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    grid = _count_tiles(product, schedule) * schedule.split
    arguments = tuple((value, POINTERS[specs[value].torch_dtype]) for value in values)
    return KernelSource(
        symbol, text.replace("SYMBOL", symbol), arguments, grid, schedule.warps, schedule.stages
    )


def split_k(
    parts: GemmParts, split: int, scratch: int
) -> tuple[GemmParts, tuple[Output, ...], TensorSpec]:
    """The product alone, into scratch value `scratch`, a plane for each of `split` pieces; and the
    outputs made of those planes.
    """
    shape = (split, *parts.dot.shape)
    # Partial sums stay in fp32 for half types too: a rounding for each piece would cost accuracy.
    spec = TensorSpec("float32", shape, row_major(shape), "cuda")
    plane = Dot(parts.dot.shape, torch.float32, parts.dot.left, parts.dot.right)
    alone = Output(scratch, plane, replace(spec, shape=shape[1:], strides=spec.strides[1:]))
    leaf = Leaf(shape, torch.float32, scratch, spec.strides)
    # Added one after another, always in this order: results repeat bit for bit.
    total = _select_plane(leaf, 0)
    for piece in range(1, split):
        total = pointwise("({0} + {1})", total, _select_plane(leaf, piece), dtype=torch.float32)
    outputs = tuple(
        replace(o, node=substitute(o.node, {parts.dot: _cast_node(total, parts.dot.dtype)}))
        for o in parts.traced.outputs
    )
    return replace(parts, dot=plane, epilogue=build_epilogue_nest((alone,), plane)), outputs, spec


def split_k_as_batch(
    parts: GemmParts, split: int, scratch: int
) -> tuple[GemmParts, tuple[Output, ...], TensorSpec]:
    """As `split_k`, with the pieces of k as the matrices of a batch. Raises NotLowerableError
    where k has no such pieces.
    """
    # The packed kernels have no piece in their grid; a batch is walked by one stride, so pieces of
    # k must be equal and there can be no other batch.
    product = parts.product
    if product.batch > 1 or product.k % split:
        raise NotLowerableError(
            f"k = {product.k} of a batch of {product.batch} in {split} equal pieces"
        )
    _, outputs, spec = split_k(parts, split, scratch)
    length = product.k // split
    lhs, rhs = (
        replace(operand, batch=operand.depth * length) for operand in (product.left, product.right)
    )
    pieces = Dot((split, product.m, product.n), torch.float32, parts.dot.left, parts.dot.right)
    epilogue = build_epilogue_nest(
        (
            Output(
                scratch, pieces, replace(spec, shape=pieces.shape, strides=row_major(pieces.shape))
            ),
        ),
        pieces,
    )
    return (
        GemmParts(
            parts.traced,
            pieces,
            replace(product, batch=split, k=length, left=lhs, right=rhs),
            epilogue,
        ),
        outputs,
        spec,
    )


def fold_product(parts: GemmParts) -> tuple[Output, ...]:
    """The outputs with the product as a sum of element-wise products, for the kernels that fold
    rows.
    """
    dot = parts.dot
    lead, (m, k), n = dot.shape[:-2], dot.left.shape[-2:], dot.right.shape[-1]
    lhs = reshape(dot.left, (*lead, m, 1, k))
    transposed = _transpose_right(dot.right)
    shape = (*lead, m, n, k)
    products = pointwise(
        "({0} * {1})",
        broadcast(lhs, shape),
        broadcast(transposed, shape),
        dtype=dot.dtype,
        shape=shape,
    )
    total: Node = reshape(
        Reduce((*shape[:-1], 1), dot.dtype, "sum", products, (len(shape) - 1,)), dot.shape
    )
    return tuple(replace(o, node=substitute(o.node, {dot: total})) for o in parts.traced.outputs)


def _strip_views(node: Node) -> Node:
    while isinstance(node, View):
        node = node.source
    return node


def _transpose_right(right: Node) -> Node:
    """(..., k, n) as (..., 1, n, k)."""
    from torch_cudal1.kernels.expr.views import permute

    rank = len(right.shape)
    turned = permute(right, (*range(rank - 2), rank - 1, rank - 2))
    return reshape(turned, (*turned.shape[:-2], 1, *turned.shape[-2:]))


def _select_plane(leaf: Leaf, piece: int) -> Node:
    return View(leaf.shape[1:], leaf.dtype, leaf, lambda index: (AffineExpr(piece), *index))


def _cast_node(node: Node, dtype: torch.dtype) -> Node:
    return node if node.dtype == dtype else pointwise("({0})", node, dtype=dtype)


def _check_method(schedule: GemmSchedule, product: Product) -> None:
    if (
        schedule.method not in METHODS
        or schedule.method.startswith("packed")
        or schedule.method == "fold"
    ):
        raise ProgramError("proposal", f"method {schedule.method!r} is none of the tiled ones")
    if (schedule.method in FP32_METHODS) != (product.dtype is torch.float32):
        raise NotLowerableError(f"method {schedule.method} for a product of {product.dtype}")


def _count_tiles(product: Product, schedule: GemmSchedule) -> int:
    return (
        product.batch
        * math.ceil(product.m / schedule.rows)
        * math.ceil(product.n / schedule.columns)
    )


def _print_weight_tile(
    weight: Nest, product: Product, schedule: GemmSchedule, *, ragged: bool
) -> str:
    """Lines that compute a tile of the right operand. Each tile is read again for every band of
    `rows`, from the L2.
    """
    # Columns beyond the edge wrap so that their addresses stay in memory; their results are not
    # stored.
    n = f"(n % {product.n})" if product.n % schedule.columns else "n"
    lines = [
        "row = k[:, None]",
        *[f"row_ok = (k < {product.k})[:, None]"] * ragged,
        f"column = {n}[None, :]",
    ]
    # The last line is the nest's store: the tile stays in registers.
    lines += print_triton_epilogue(weight, schedule.depth, schedule.columns, (ragged, False))[:-1]
    element = weight.statements[-1].operands[0].name
    kind = str(product.dtype).removeprefix("torch.")
    lines.append(
        f"y = tl.where(row_ok, {element}, 0.0).to(tl.{kind})"
        if ragged
        else f"y = {element}.to(tl.{kind})"
    )
    return "".join(f"        {line}\n" for line in lines)


def _print_main_loop(product: Product, schedule: GemmSchedule, weight: Nest | None) -> str:
    # Pieces begin at whole depths, so that only the last one has a ragged end.
    length = math.ceil(product.k / schedule.split / schedule.depth) * schedule.depth
    ragged = product.k % schedule.depth != 0
    high, wide = math.ceil(product.m / schedule.rows), math.ceil(product.n / schedule.columns)
    left_m, left_mask = _handle_edge("m", product.m, schedule.rows, product.left)
    to64 = ".to(tl.int64)" if _needs_64_bit_addresses(product) else ""
    right_n, right_mask = _handle_edge("n", product.n, schedule.columns, product.right)
    words = {
        "SPLIT": schedule.split,
        "HIGH": high,
        "WIDE": wide,
        # A band higher than the matrix would be a division of programs that do not exist.
        "GROUP": min(schedule.group, high),
        "LENGTH": length,
        "END": product.k if schedule.split == 1 else f"min({product.k}, first + {length})",
        "BM": schedule.rows,
        "BN": schedule.columns,
        "BK": schedule.depth,
        "LEFT_M": left_m,
        "RIGHT_N": right_n,
        "LEFT_MASK": _print_mask(
            [f"(k < {product.k})[None, :]"] * ragged + [f"{test}[:, None]" for test in left_mask]
        ),
        "RIGHT_MASK": _print_mask(
            [f"(k < {product.k})[:, None]"] * ragged + [f"{test}[None, :]" for test in right_mask]
        ),
        "ROUNDING": _ROUNDED if schedule.method == "tf32" else "",
        "PRECISION": _PRECISION[schedule.method],
        "TO64": to64,
        **_fill_operand_placeholders("LEFT", product.left, to64),
        **_fill_operand_placeholders("RIGHT", product.right, to64),
    }
    text = _BODY.replace("RIGHT_POINTER", _POINTER if weight is None else "")
    text = text.replace(
        "RIGHT_TILE",
        _READ if weight is None else _print_weight_tile(weight, product, schedule, ragged=ragged),
    )
    # Longest first: LEFT_M is the beginning of LEFT_MASK.
    for word in sorted(words, key=len, reverse=True):
        text = text.replace(word, str(words[word]))
    return text


def _handle_edge(name: str, size: int, tile: int, operand: Operand) -> tuple[str, list[str]]:
    """How the addresses of rows beyond the edge stay in memory: the index as text, and the tests of
    a mask. Masked where rows are neighbours and loads stay 16 bytes wide, else wrapped.

    The results of these rows are not stored.
    """
    if size % tile == 0:
        return name, []
    # The mask then changes at multiples of 16 elements only, so that loads stay 16 bytes wide; a
    # modulo would take from the compiler that rows are neighbours.
    if operand.row == 1 and size % 16 == 0:
        return name, [f"({name} < {size})"]
    return f"({name} % {size})", []


def _print_mask(tests: list[str]) -> str:
    return f", mask={' & '.join(tests)}, other=0.0" if tests else ""


def _print_batch_offset(operand: Operand, to64: str) -> str:
    """Where the matrix of a batch begins, as text."""
    digits = [
        f"(batch // {digit.every} % {digit.extent}){to64} * {digit.stride}"
        for digit in operand.digits
    ]
    return " + ".join(digits) or f"batch{to64} * {operand.batch}"


def _fill_operand_placeholders(side: str, operand: Operand, to64: str) -> dict[str, int | str]:
    return {
        f"p{side}": f"p{operand.value}",
        f"{side}_OFFSET": operand.offset,
        f"{side}_PLANE": _print_batch_offset(operand, to64),
        f"{side}_ROW": operand.row,
        f"{side}_DEPTH": operand.depth,
    }


def _needs_64_bit_addresses(product: Product) -> bool:
    """Whether an address needs 64 bits."""
    # Addresses are computed for the whole last tile of k, masked or not: hence the 256 beyond it.
    reach = [product.batch * product.m * product.n]
    for operand, rows in ((product.left, product.m), (product.right, product.n)):
        reach.append(
            operand.offset
            + operand.reach(product.batch)
            + operand.row * rows
            + operand.depth * (product.k + 256)
        )
    return max(reach) > _INT32_REACH
