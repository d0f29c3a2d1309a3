"""Attention in one kernel: scores of a tile of rows against all keys, weighted values summed on the
way, nothing of it in memory.

    out[m] = sum_n weight(scores[m, n]) value[n],   scores = tail(query key^T)

`tail` is any chain of element-wise steps (scale, bias, mask); `weight` is softmax, computed online,
or another such chain (relu). The products are `gemm`'s: of fp32 in pieces that keep fp32's accuracy
("bf16x6", "tf32x3"), in TF32 only where the user allows it, of half types as they are. There scores
stay in fp32 up to the weights, which the second product takes in the values' type: a model that
takes its softmax in fp32 and rounds the weights is computed so, and its scores are not rounded on
the way. Products of two types are refused. Bytes moved: one read of query, keys and values per band
of rows, which the L2 serves, and one write.

The log-sum-exp of each row, which a backward reads, is a second result where a fused operator
yields it.

Source: Dao, Fu, Ermon, Rudra, Ré, FlashAttention (2022); Milakov, Gimelshein (2018) for the online
softmax.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.codegen.epilogue import triton_tail, values_of
from torch_cudal1.kernels.codegen.loop_nest import Nest, schedule_tail
from torch_cudal1.kernels.codegen.prelude import POINTERS, headed
from torch_cudal1.kernels.expr.affine import Cut, Index, flatten, row_major
from torch_cudal1.kernels.expr.from_program import Output, Trace
from torch_cudal1.kernels.expr.nodes import (
    Dot,
    LogSumExp,
    Map,
    Node,
    Softmax,
    View,
    every,
    replaced,
    reshape,
    resolved,
    rounding,
    sources,
)
from torch_cudal1.kernels.ops.matmul import Sizes, cut_in_two, matrices, places
from torch_cudal1.kernels.proposal import Kernel, Proposal

__all__ = ["MOST_DEPTH", "attended", "attentions"]

MOST_DEPTH = 128  # of query and value: their tiles stay in registers
_HALVES = (torch.float16, torch.bfloat16)
_INT32_REACH = 2**31 - 1
# rows, columns, warps, stages; best guess first
_TILES = ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 3))
_BODY = """
block = tl.program_id(0)
batch = (block // HIGH)TO64
DIGITS
m = (block % HIGH) * BM + tl.arange(0, BM)
d = tl.arange(0, DEPTH)
e = tl.arange(0, WIDTH)
query = tl.load(QUERYQUERY_MASK)
ROUNDED_QUERY
top = tl.full([BM, 1], float("-inf"), tl.float32)
total = tl.zeros([BM, 1], tl.float32)
out = tl.zeros([BM, WIDTH], tl.float32)
row = (batch * ROWS + m)[:, None]
ROW_OK
for start in range(0, LAST, BN):
    n = start + tl.arange(0, BN)
    column = n[None, :]
    COLUMN_OK
    key = tl.load(KEYKEY_MASK)
    value = tl.load(VALUEVALUE_MASK)
    ROUNDED_PAIR
    acc = tl.dot(query, keyPRECISION)
    SCORES
    WEIGHTS
    ROUNDED_WEIGHT
    out = out + tl.dot(weightTYPED, valuePRECISION)
FINISH
"""
_ONLINE = """
higher = nan_max(top, tl.reduce(score, 1, nan_max, keep_dims=True))
safe = tl.where(higher == float("-inf"), 0.0, higher)
weight = libdevice.exp(score - safe)
shrunk = libdevice.exp(top - safe)
total = total * shrunk + tl.sum(weight, axis=1, keep_dims=True)
out = out * shrunk
top = higher
"""


@dataclass(frozen=True)
class _Parts:
    """`scores` is what `acc`, the first product, becomes in the first nest; in the second, `acc` is
    the result's element.

    `total`: the log-sum-exp of each row where that is a result too.
    """

    first: Dot
    second: Dot
    scores: Nest
    result: Nest
    softmax: bool
    causal: bool
    safe: bool
    total: Output | None = None


def attentions(traced: Trace, rights: Collection[str], most: int) -> tuple[Proposal, ...]:
    """At most `most` proposals, best guess first. Raises NotLowerableError when the island is no
    attention.
    """
    parts = _parts(traced, 1 + max(traced.leaves))
    dtype, height = parts.first.left.dtype, parts.first.shape[1]
    methods = (
        ("half",)
        if dtype in _HALVES
        else (("tf32",) if "matmul" in rights else ()) + ("tf32x3", "bf16x6")
    )
    found = [(m, *tile) for tile in _TILES for m in methods]
    names = ("method", "rows", "columns", "warps", "stages")
    found.sort(key=lambda one: one[1] >= 2 * height)  # tiles that are mostly empty come last
    return tuple(Proposal("attention", dict(zip(names, one, strict=True))) for one in found[:most])


def attended(
    traced: Trace, proposal: Proposal, specs: Mapping[int, TensorSpec], free: int
) -> Kernel:
    """The kernel of a proposal; `free` is a value number that nothing has.

    Raises NotLowerableError when the island is no attention, ProgramError when the proposal is
    nonsense.
    """
    parts = _parts(traced, free)
    rows, columns, warps, stages = (
        proposal.number(name, 0) for name in ("rows", "columns", "warps", "stages")
    )
    method = proposal.config.get("method")
    allowed = ("half",) if parts.first.left.dtype in _HALVES else ("tf32", "tf32x3", "bf16x6")
    if (rows, columns, warps, stages) not in _TILES or method not in allowed:
        raise ProgramError(
            "proposal", f"{dict(proposal.config)}: none of the tiles {_TILES} with one of {allowed}"
        )
    text, values = _text(parts, str(method), rows, columns)
    symbol = f"attention_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    arguments = tuple((value, POINTERS[specs[value].torch_dtype]) for value in values)
    batch, height = parts.first.shape[:2]
    return Kernel(
        symbol,
        text.replace("SYMBOL", symbol),
        arguments,
        batch * math.ceil(height / rows),
        warps,
        stages,
    )


def _parts(traced: Trace, free: int) -> _Parts:
    output, total = _results(traced.outputs)
    (node,) = resolved((output.node,), streamed=False)
    second, node = _weights_first(_dot_below(node), node)
    weights = _behind_views(second.left, second.shape[0], second.left.shape)
    softmax = isinstance(weights, Softmax)
    if not softmax and every(Softmax, (weights,)):
        raise NotLowerableError(
            "a softmax that is computed on, or rounded to another type, before it meets the values"
        )
    scores = weights.scores if isinstance(weights, Softmax) else weights
    first = _dot_below(scores)
    if first.left.dtype != second.right.dtype:
        raise NotLowerableError(
            f"a product of {first.left.dtype} for the scores and of {second.right.dtype} with the values"
        )
    if (
        len(first.shape) != 3
        or math.prod(first.shape) != math.prod(scores.shape)
        or first.shape[:2] != second.shape[:2]
    ):
        raise NotLowerableError("scores of another shape than the first product")
    if max(first.left.shape[-1], second.shape[-1]) > MOST_DEPTH:
        raise NotLowerableError(f"queries or values of more than {MOST_DEPTH} elements")
    spec = TensorSpec("float32", first.shape, row_major(first.shape), "cuda")
    nest = schedule_tail((Output(free, reshape(scores, first.shape), spec),), first)
    result = schedule_tail((replace(output, node=node),), second)
    causal, safe = (
        (weights.causal, weights.safe) if isinstance(weights, Softmax) else (False, False)
    )
    return _Parts(first, second, nest, result, softmax, causal, safe, total)


def _weights_first(second: Dot, node: Node) -> tuple[Dot, Node]:
    """The second product with the weights on its left, and `node` made of it: contractions of
    einsum may have it the other way.
    """
    if len(second.shape) != 3 or every(Dot, (second.left,)) or not every(Dot, (second.right,)):
        return second, node
    batch, rows, columns = second.shape
    turned = Dot((batch, columns, rows), second.dtype, _turned(second.right), _turned(second.left))
    return turned, replaced(node, {second: _turned(turned)})


def _turned(node: Node) -> Node:
    """Each matrix transposed."""
    batch, rows, columns = node.shape
    return View(
        (batch, columns, rows), node.dtype, node, lambda index: (index[0], index[2], index[1])
    )


def _results(outputs: tuple[Output, ...]) -> tuple[Output, Output | None]:
    """The weighted values, and the log-sum-exp where that is a result too."""
    totals = [one for one in outputs if isinstance(one.node, LogSumExp)]
    others = [one for one in outputs if one not in totals]
    if len(others) != 1 or len(totals) > 1:
        raise NotLowerableError("attention with several results")
    if totals and totals[0].spec.strides != row_major(totals[0].spec.shape):
        raise NotLowerableError(f"a log-sum-exp with strides {totals[0].spec.strides}")
    return others[0], totals[0] if totals else None


def _dot_below(node: Node) -> Dot:
    """The product that an expression is made of, through element-wise steps and views."""
    waiting, found = [node], dict[Dot, None]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, Dot):
            found[one] = None
        elif isinstance(one, (Map, View)):
            waiting += one.args if isinstance(one, Map) else (one.source,)
    if len(found) != 1:
        raise NotLowerableError(f"{len(found)} products where attention has one")
    return next(iter(found))


def _behind_views(node: Node, batch: int, shape: tuple[int, ...]) -> Node:
    """The weights under other shapes; the same elements in the same order. What is no softmax is
    taken as it comes.
    """
    below = node
    while isinstance(below, View) or _hands_on(below, node.dtype):
        (below,) = sources(below)
    if not isinstance(below, Softmax):
        return node
    sizes: Sizes = ((batch,), (shape[-2],), (shape[-1],))
    for _ in range(4):
        index: Index = places(sizes)
        below = node
        try:
            while isinstance(below, View) or _hands_on(below, node.dtype):
                index = below.remap(index) if isinstance(below, View) else index
                (below,) = sources(below)
            whole = flatten(places(sizes), row_major(shape))
            if flatten(index, row_major(below.shape)) != whole:
                raise NotLowerableError("weights that are permuted before they meet the values")
            return below
        except Cut as cut:
            sizes = cut_in_two(sizes, cut)
    raise NotLowerableError("weights that are reshaped too often")


def _hands_on(node: Node, dtype: torch.dtype) -> bool:
    """Whether it is its argument as it is, or rounded to a half type `dtype` in which a product
    reads it anyway.
    """
    return type(node) is Map and node.template in ("({0})", rounding(dtype))


def _address(node: Node, names: tuple[str, str], text: list[str]) -> tuple[int, str]:
    """Value number of an operand, and the offset of its elements as text; lines for the digits of
    the batch go to `text`.

    `names` of the vectors along its rows and columns.
    """
    found = matrices(node)
    parts = [str(found.offset)] * bool(found.offset) + [f"batch * {found.batch}"] * bool(
        found.batch
    )
    for digit in found.digits:
        name = f"batch_{digit.every}_{digit.extent}"
        line = f"{name} = batch // {digit.every} % {digit.extent}"
        if line not in text:
            text.append(line)
        parts.append(f"{name} * {digit.stride}")
    parts += [f"{names[0]}[:, None] * {found.row}", f"{names[1]}[None, :] * {found.depth}"]
    return found.value, f"p{found.value} + " + " + ".join(parts)


def _text(parts: _Parts, method: str, rows: int, columns: int) -> tuple[str, tuple[int, ...]]:
    batch, height, width = parts.first.shape
    depth, size = parts.first.left.shape[-1], parts.second.shape[-1]
    padded, out_width = (max(16, 1 << (n - 1).bit_length()) for n in (depth, size))
    ragged = height % rows != 0, width % columns != 0
    digits: list[str] = []
    m = f"(m % {height})" if ragged[0] else "m"
    query, query_at = _address(parts.first.left, (m, "d"), digits)
    key, key_at = _address(parts.first.right, ("d", "n"), digits)
    value, value_at = _address(parts.second.right, ("n", "e"), digits)
    in_depth = [f"(d < {depth})[{{}}]"] * (padded != depth)
    in_size = [f"(e < {size})[None, :]"] * (out_width != size)
    words: dict[str, int | str] = {
        "HIGH": math.ceil(height / rows),
        "DIGITS": "\n".join(digits),
        "DEPTH": padded,
        "WIDTH": out_width,
        "ROWS": height,
        "LAST": f"min({width}, (block % {math.ceil(height / rows)} + 1) * {rows})"
        if parts.causal
        else width,
        "QUERY_MASK": _mask([test.format("None, :") for test in in_depth]),
        "KEY_MASK": _mask(
            [test.format(":, None") for test in in_depth] + ["column_ok"] * ragged[1]
        ),
        "VALUE_MASK": _mask(in_size + [f"(n < {width})[:, None]"] * ragged[1]),
        "QUERY": query_at,
        "KEY": key_at,
        "VALUE": value_at,
        "ROW_OK": f"row_ok = (m < {height})[:, None]" if ragged[0] else "",
        "COLUMN_OK": f"column_ok = (n < {width})[None, :]" if ragged[1] else "",
        "PRECISION": "" if method == "half" else f', input_precision="{method}"',
        **_rounded(method),
        "TYPED": _typed(parts.second.right.dtype),
        "TO64": ".to(tl.int64)"
        if max(batch * height * max(width, depth), 1) > _INT32_REACH
        else "",
        "BM": rows,
        "BN": columns,
    }
    reads, _ = values_of(parts.scores)
    result_reads, writes = values_of(parts.result)
    scores = triton_tail(parts.scores, rows, columns, ragged)[:-1]
    score = parts.scores.statements[-1].needs[0].name
    outside = 'float("-inf")' if parts.softmax else "0.0"
    scores.append(
        f"score = tl.where(column_ok, {score}, {outside})" if ragged[1] else f"score = {score}"
    )
    weights = _ONLINE.strip().splitlines() if parts.softmax else ["weight = score"]
    finish = [
        "acc = tl.div_rn(out, total)" if parts.softmax else "acc = out",
        "column = e[None, :]",
    ]
    finish += ['acc = tl.where(top == float("-inf"), 0.0, acc)'] * parts.safe
    finish += [f"column_ok = (e < {size})[None, :]"] * (out_width != size)
    finish += triton_tail(parts.result, rows, out_width, (ragged[0], out_width != size))
    finish += _total_lines(parts.total, height) if parts.total else []
    lines: list[str] = []
    blocks = {"SCORES": scores, "WEIGHTS": weights, "FINISH": finish}
    for line in _BODY.strip().splitlines():
        indent, word = line[: len(line) - len(line.lstrip())], line.strip()
        lines += (
            [indent + one for one in blocks.get(word, [])]
            if word in blocks
            else _filled(line, words)
        )
    totals = (parts.total.value,) if parts.total else ()
    ordered = tuple(dict.fromkeys((query, key, value, *reads, *result_reads, *writes, *totals)))
    head = ", ".join(f"p{one}" for one in ordered) + "):\n"
    return headed(head + "\n".join("    " + line for line in lines) + "\n"), ordered


def _total_lines(output: Output, height: int) -> list[str]:
    """The log-sum-exp as the operators leave it: 0 for a row that every key was hidden from,
    infinity behind the last row.
    """
    padded = output.spec.shape[2]
    inside = f"(m < {height})[:, None]" if padded > height else ""
    made = 'tl.where(top == float("-inf"), 0.0, top + libdevice.log(total))'
    made = f'tl.where({inside}, {made}, float("inf"))' if inside else made
    return [
        f"tl.store(p{output.value} + batch * {padded} + m[:, None], {made}, mask=(m < {padded})[:, None])"
    ]


def _filled(line: str, words: Mapping[str, int | str]) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    for word in sorted(words, key=len, reverse=True):
        line = line.replace(word, str(words[word]))
    return [
        indent + one.strip() if i else one for i, one in enumerate(line.splitlines()) if one.strip()
    ]


def _mask(tests: list[str]) -> str:
    return f", mask={' & '.join(tests)}, other=0.0" if tests else ""


def _rounded(method: str) -> dict[str, str]:
    """Lines that round operands of plain TF32 products to the nearest: in pieces, a product does
    that itself.
    """
    places = {
        "ROUNDED_QUERY": ("query",),
        "ROUNDED_PAIR": ("key", "value"),
        "ROUNDED_WEIGHT": ("weight",),
    }
    return {
        place: "\n".join(f"{name} = nearest_tf32({name})" for name in names if method == "tf32")
        for place, names in places.items()
    }


def _typed(dtype: torch.dtype) -> str:
    return f".to(tl.{str(dtype).removeprefix('torch.')})" if dtype in _HALVES else ""
