"""The text of the attention kernel: a loop over tiles of keys with an online softmax.

It knows nothing of Programs and proposals: `kernels.templates.attention` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torch_cudal1.kernels.codegen.epilogue import list_values, print_triton_epilogue
from torch_cudal1.kernels.codegen.loop_nest import Nest
from torch_cudal1.kernels.codegen.prelude import add_prelude
from torch_cudal1.kernels.expr.from_program import Output
from torch_cudal1.kernels.expr.nodes import Dot, Node
from torch_cudal1.kernels.ops.matmul import read_operand

__all__ = [
    "HALVES",
    "AttentionParts",
    "cast_text",
    "load_mask",
    "pad_to_power",
    "print_attention_kernel",
]

HALVES = (torch.float16, torch.bfloat16)
_INT32_REACH = 2**31 - 1
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
class AttentionParts:
    """The two products, and what is computed around them.

    `scores`: the nest that makes scores of `acc`, an element of the first product. `result`: the
    nest that makes the result of `acc`, an element of the second. `softmax`: the weights are the
    softmax of the scores, `causal`: of keys up to the query's own place, `safe`: 0 in rows that
    every key is hidden from. `total`: the log-sum-exp of each row where that is a result too.
    """

    first: Dot
    second: Dot
    scores: Nest
    result: Nest
    softmax: bool
    causal: bool
    safe: bool
    total: Output | None = None


@dataclass(frozen=True)
class _ScoreTile:
    """A tile of scores, and what its extents are padded to."""

    parts: AttentionParts
    method: str
    rows: int
    columns: int

    @property
    def row_blocks(self) -> int:
        return math.ceil(self.parts.first.shape[1] / self.rows)

    @property
    def ragged(self) -> tuple[bool, bool]:
        """Whether the last tile along rows, and along columns, reaches beyond the edge."""
        _, height, width = self.parts.first.shape
        return height % self.rows != 0, width % self.columns != 0

    @property
    def depth(self) -> int:
        """Elements of a query and a key."""
        return self.parts.first.left.shape[-1]

    @property
    def size(self) -> int:
        """Elements of a value."""
        return self.parts.second.shape[-1]

    @property
    def padded_depth(self) -> int:
        return pad_to_power(self.depth)

    @property
    def padded_size(self) -> int:
        return pad_to_power(self.size)


def print_attention_kernel(
    parts: AttentionParts, method: str, rows: int, columns: int
) -> tuple[str, tuple[int, ...]]:
    """The kernel's text with SYMBOL for its name, and the value numbers of its arguments."""
    tile = _ScoreTile(parts, method, rows, columns)
    height = parts.first.shape[1]
    digits: list[str] = []
    # Rows beyond the last wrap, so that their addresses stay in memory; they are not stored.
    m = f"(m % {height})" if tile.ragged[0] else "m"
    query, query_at = _print_address(parts.first.left, (m, "d"), digits)
    key, key_at = _print_address(parts.first.right, ("d", "n"), digits)
    value, value_at = _print_address(parts.second.right, ("n", "e"), digits)
    words = {
        "DIGITS": "\n".join(digits),
        "QUERY": query_at,
        "KEY": key_at,
        "VALUE": value_at,
        **_list_sizes(tile),
        **_list_masks(tile),
        **_format_rounding_lines(method),
        "PRECISION": "" if method == "half" else f', input_precision="{method}"',
        "TYPED": cast_text(parts.second.right.dtype),
    }
    blocks = {
        "SCORES": _print_scores(tile),
        "WEIGHTS": _ONLINE.strip().splitlines() if parts.softmax else ["weight = score"],
        "FINISH": _print_finish(tile),
    }
    lines = _fill_body(words, blocks)
    reads, _ = list_values(parts.scores)
    result_reads, writes = list_values(parts.result)
    totals = (parts.total.value,) if parts.total else ()
    ordered = tuple(dict.fromkeys((query, key, value, *reads, *result_reads, *writes, *totals)))
    head = ", ".join(f"p{value_number}" for value_number in ordered) + "):\n"
    return add_prelude(head + "\n".join("    " + line for line in lines) + "\n"), ordered


def _list_sizes(tile: _ScoreTile) -> dict[str, int | str]:
    batch, height, width = tile.parts.first.shape
    reach = max(batch * height * max(width, tile.depth), 1)
    # Keys behind the block's last row are hidden from all of its rows.
    last = f"min({width}, (block % {tile.row_blocks} + 1) * {tile.rows})"
    return {
        "HIGH": tile.row_blocks,
        "DEPTH": tile.padded_depth,
        "WIDTH": tile.padded_size,
        "ROWS": height,
        "LAST": last if tile.parts.causal else width,
        "TO64": ".to(tl.int64)" if reach > _INT32_REACH else "",
        "BM": tile.rows,
        "BN": tile.columns,
    }


def _list_masks(tile: _ScoreTile) -> dict[str, int | str]:
    """The bounds tests of rows and columns, and the masks of the loads."""
    _, height, width = tile.parts.first.shape
    ragged_rows, ragged_columns = tile.ragged
    in_depth = [f"(d < {tile.depth})[{{}}]"] * (tile.padded_depth != tile.depth)
    in_size = [f"(e < {tile.size})[None, :]"] * (tile.padded_size != tile.size)
    return {
        "QUERY_MASK": load_mask([test.format("None, :") for test in in_depth]),
        "KEY_MASK": load_mask(
            [test.format(":, None") for test in in_depth] + ["column_ok"] * ragged_columns
        ),
        # Values beyond the edge are read as 0: their weight is 0, and 0 times a NaN that lies in
        # memory there would be a NaN.
        "VALUE_MASK": load_mask(in_size + [f"(n < {width})[:, None]"] * ragged_columns),
        "ROW_OK": f"row_ok = (m < {height})[:, None]" if ragged_rows else "",
        "COLUMN_OK": f"column_ok = (n < {width})[None, :]" if ragged_columns else "",
    }


def _print_scores(tile: _ScoreTile) -> list[str]:
    """Lines that make `score` of `acc`, an element of the first product."""
    nest = tile.parts.scores
    # The last line is the nest's store: scores are never in memory.
    lines = print_triton_epilogue(nest, tile.rows, tile.columns, tile.ragged)[:-1]
    score = nest.statements[-1].operands[0].name
    # A key beyond the edge must not count: its exponential is 0, or its score where there is none.
    outside = 'float("-inf")' if tile.parts.softmax else "0.0"
    _, ragged_columns = tile.ragged
    return [
        *lines,
        f"score = tl.where(column_ok, {score}, {outside})"
        if ragged_columns
        else f"score = {score}",
    ]


def _print_finish(tile: _ScoreTile) -> list[str]:
    """Lines after the loop over keys: the result and the log-sum-exp, to memory."""
    parts, padded = tile.parts, tile.padded_size != tile.size
    lines = [
        "acc = tl.div_rn(out, total)" if parts.softmax else "acc = out",
        "column = e[None, :]",
    ]
    # Rows that every key is hidden from are 0, as in PyTorch's `_safe_softmax`; 0 / 0 would be NaN.
    lines += ['acc = tl.where(top == float("-inf"), 0.0, acc)'] * parts.safe
    lines += [f"column_ok = (e < {tile.size})[None, :]"] * padded
    bounds = (tile.ragged[0], padded)
    lines += print_triton_epilogue(parts.result, tile.rows, tile.padded_size, bounds)
    return lines + (_print_logsumexp(parts.total, parts.first.shape[1]) if parts.total else [])


def _fill_body(words: Mapping[str, int | str], blocks: Mapping[str, list[str]]) -> list[str]:
    """The body with each word replaced, and each line that names a block by the block's lines."""
    lines: list[str] = []
    for line in _BODY.strip().splitlines():
        indent, word = line[: len(line) - len(line.lstrip())], line.strip()
        if word in blocks:
            lines += [indent + block_line for block_line in blocks[word]]
        else:
            lines += _fill_words(line, words)
    return lines


def _print_address(node: Node, names: tuple[str, str], text: list[str]) -> tuple[int, str]:
    """Value number of an operand, and the offset of its elements as text; lines for the digits of
    the batch go to `text`.

    `names` of the vectors along its rows and columns.
    """
    operand = read_operand(node)
    parts = [str(operand.offset)] * bool(operand.offset) + [f"batch * {operand.batch}"] * bool(
        operand.batch
    )
    for digit in operand.digits:
        name = f"batch_{digit.every}_{digit.extent}"
        line = f"{name} = batch // {digit.every} % {digit.extent}"
        if line not in text:
            text.append(line)
        parts.append(f"{name} * {digit.stride}")
    parts += [f"{names[0]}[:, None] * {operand.row}", f"{names[1]}[None, :] * {operand.depth}"]
    return operand.value, f"p{operand.value} + " + " + ".join(parts)


def _print_logsumexp(output: Output, height: int) -> list[str]:
    """The log-sum-exp as the operators leave it: 0 for a row that every key was hidden from,
    infinity behind the last row.
    """
    # PyTorch pads the log-sum-exp with infinities behind the last row, and its fp32 backward relies
    # on them.
    padded = output.spec.shape[2]
    inside = f"(m < {height})[:, None]" if padded > height else ""
    stored = 'tl.where(top == float("-inf"), 0.0, top + libdevice.log(total))'
    stored = f'tl.where({inside}, {stored}, float("inf"))' if inside else stored
    return [
        f"tl.store(p{output.value} + batch * {padded} + m[:, None], {stored}, mask=(m < {padded})[:, None])"
    ]


def _fill_words(line: str, words: Mapping[str, int | str]) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    # Longest first: QUERY is the beginning of QUERY_MASK.
    for word in sorted(words, key=len, reverse=True):
        line = line.replace(word, str(words[word]))
    return [
        indent + one.strip() if i else one for i, one in enumerate(line.splitlines()) if one.strip()
    ]


def load_mask(tests: list[str]) -> str:
    """The arguments of `tl.load` that make it read 0 wherever a test fails."""
    return f", mask={' & '.join(tests)}, other=0.0" if tests else ""


def _format_rounding_lines(method: str) -> dict[str, str]:
    """Lines that round operands of plain TF32 products to the nearest: in pieces, a product does
    that itself.
    """
    # Tensor cores cut operands off where cuBLAS rounds: of positive inputs the rms error was 0.148
    # cut off and 0.0074 rounded (benchmarks/LOG.md, 2026-11-26).
    places = {
        "ROUNDED_QUERY": ("query",),
        "ROUNDED_PAIR": ("key", "value"),
        "ROUNDED_WEIGHT": ("weight",),
    }
    return {
        place: "\n".join(f"{name} = nearest_tf32({name})" for name in names if method == "tf32")
        for place, names in places.items()
    }


def cast_text(dtype: torch.dtype) -> str:
    """The cast of an fp32 operand to the half type of the product's other one."""
    return f".to(tl.{str(dtype).removeprefix('torch.')})" if dtype in HALVES else ""


def pad_to_power(size: int) -> int:
    """The extent of a tile that holds `size` elements."""
    # `tl.arange` takes powers of two, `tl.dot` 16 elements or more.
    return max(16, 1 << (size - 1).bit_length())
