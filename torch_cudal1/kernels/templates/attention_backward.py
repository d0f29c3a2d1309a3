"""Gradients of fused attention without a score in memory, the same bits in every run: no two
programs add to one number.

    weights = exp(scale query key^T + bias - logsumexp)           delta = sum(grad out) of each row
    slopes  = weights (grad value^T - delta)
    d_value = weights^T grad      d_key = scale slopes^T query      d_query = scale slopes key

Three launches: `delta`; the gradient of a block of queries, with all keys; those of a block of keys
and values, with all queries of all heads that share them. The last two make the weights anew, seven
products for the five that there are. A causal mask skips blocks. Products are as in `attention`: of
fp32 in pieces, of half types as they are, summed in fp32. No kernel is made of a result that nothing
reads. Bytes moved: delta reads two tensors; of the others each block reads its own rows once, and
the other side's, which the L2 serves.

Source: Dao, FlashAttention-2 (2023), algorithm 2, without its atomic additions.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.device.specs import max_shared_bytes
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.kernels.codegen.prelude import POINTERS, add_prelude
from torch_cudal1.kernels.proposal import KernelSource, Proposal
from torch_cudal1.kernels.template import (
    FusionRules,
    LoweredKernels,
    ProposalRequest,
    Template,
    TemplateInput,
)
from torch_cudal1.kernels.templates.attention_kernel import (
    HALVES,
    cast_text,
    load_mask,
    pad_to_power,
)
from torch_cudal1.kernels.templates.attention_step import (
    TARGETS,
    BackwardStep,
    StepTensor,
    is_backward,
    read_backward,
)

__all__ = ["TEMPLATE"]

_DELTA_ROWS = 32
# elements of a head -> rows that a program keeps, rows that it takes at a time, warps, stages; best
# guess first. Compiled for sm_90 they keep all in registers, but for heads of 128 in fp32: those
# spill some hundred bytes a thread.
_TILES = {
    32: ((64, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 3)),
    64: ((64, 32, 4, 2), (128, 32, 8, 2), (64, 32, 4, 1), (32, 32, 4, 2)),
    128: ((64, 32, 8, 1), (64, 16, 8, 2), (32, 64, 8, 1), (32, 32, 4, 1)),
}
_HALF_TILES = {
    64: ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 4, 2), (64, 32, 4, 3)),
    128: ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)),
}
# bytes of shared memory at least for an element of fp32 tiles that stay: two tensors, two pieces
_SPLIT_BYTES_PER_ELEMENT = 16
# rows at most under a causal mask: in larger blocks than PyTorch's a NaN that the mask hides would
# reach further than there
_MAX_CAUSAL_ROWS = 64
# Rows at a time for TF32 products: with 16 rows, kernels of eight warps on sm_90 read outside their
# shared memory (Triton 3.6).
_MIN_TF32_ROWS = 32
# GPUs where products of 64 rows and more keep sums and pieces in tensor memory: of a tile that
# needs too much of it Triton makes a trap.
_TENSOR_MEMORY_SM = range(100, 120)


@dataclass(frozen=True)
class _Tile:
    """How the two kernels of products are cut: rows of their own, rows they take at a time, and how
    products are computed.
    """

    method: str
    rows: int
    rows_per_step: int
    warps: int
    stages: int

    @property
    def precision(self) -> str:
        """The last argument of a product."""
        return "" if self.method == "half" else f', input_precision="{self.method}"'

    def print_rounding(self, *names: str) -> str:
        """Statements that round operands of plain TF32 products to the nearest, as the tensor cores
        would cut them off.
        """
        return "; ".join(
            f"{name} = nearest_tf32({name})" for name in names if self.method == "tf32"
        )


def _propose(workload: TemplateInput, request: ProposalRequest) -> tuple[Proposal, ...]:
    step = read_backward(workload.program)
    # TF32's plain product only where the user allows it; the other two keep fp32's accuracy.
    methods = (
        ("half",)
        if step.query.dtype in HALVES
        else (("tf32",) if "matmul" in request.tf32_ops else ()) + ("tf32x3", "bf16x6")
    )
    # What registers and shared memory hold is padded to powers of two.
    width = pad_to_power(max(step.query.shape[3], step.value.shape[3]))
    configs = [
        (method, *tile)
        for tile in _choose_tiles(step)
        for method in methods
        if _fits(method, tile, width, request.sm)
    ]
    names = ("method", "own", "other", "warps", "stages")
    return tuple(
        Proposal("attention_backward", dict(zip(names, config, strict=True)))
        for config in configs[: request.limit]
    )


def _lower(workload: TemplateInput, proposal: Proposal) -> LoweredKernels:
    step, specs = read_backward(workload.program), value_specs(workload.program)
    tile = _read_tile(proposal, step)
    # Both other kernels read delta: a launch of its own writes it once, before them.
    kernels = [
        _make_kernel(
            "delta",
            _print_delta(step),
            _count_blocks(step.query, _DELTA_ROWS),
            _Tile("half", _DELTA_ROWS, 0, 4, 1),
            step,
        )
    ]
    # No kernel is made of a gradient that nothing reads.
    if "query" in step.results:
        kernels.append(
            _make_kernel(
                "queries",
                _print_queries(step, tile),
                _count_blocks(step.query, tile.rows),
                tile,
                step,
            )
        )
    if {"key", "value"} & step.results.keys():
        kernels.append(
            _make_kernel(
                "keys", _print_keys(step, tile), _count_blocks(step.key, tile.rows), tile, step
            )
        )
    # One number a row, in fp32: the sum of products that all slopes of the row subtract.
    scratch = TensorSpec("float32", step.delta.shape, step.delta.strides, "cuda")
    written = {result.value: specs[result.value] for result in step.results.values()}
    return LoweredKernels(tuple(kernels), written | {step.delta.value: scratch})


def _choose_tiles(step: BackwardStep) -> tuple[tuple[int, int, int, int], ...]:
    """Tiles for its heads and mask."""
    table = _HALF_TILES if step.query.dtype in HALVES else _TILES
    tiles = next(
        tiles
        for size, tiles in table.items()
        if max(step.query.shape[3], step.value.shape[3]) <= size
    )
    return tuple(tile for tile in tiles if not step.causal or max(tile[:2]) <= _MAX_CAUSAL_ROWS)


def _fits(method: str, tile: tuple[int, int, int, int], width: int, sm: int) -> bool:
    """Whether the memories of a multiprocessor hold what a program keeps, for heads of `width`
    elements.
    """
    row_block, column_block, *_ = tile
    if _reads_out_of_bounds(method, column_block):
        return False
    if method == "half" or row_block < 64 or sm not in _TENSOR_MEMORY_SM:
        return method == "half" or _SPLIT_BYTES_PER_ELEMENT * row_block * width <= max_shared_bytes(
            sm
        )
    # Blackwell: sums and pieces of larger tiles do not fit tensor memory, and Triton would make a
    # trap.
    return (row_block, column_block) == (64, 32) and width <= (32 if method == "bf16x6" else 64)


def _reads_out_of_bounds(method: str, other: int) -> bool:
    """Whether the compiled kernel would read outside its shared memory."""
    # Found with compute-sanitizer on an H100: an operand of a wgmma lay outside of shared memory,
    # in the second warp group only (benchmarks/LOG.md, 2026-11-25).
    return method.startswith("tf32") and other < _MIN_TF32_ROWS


def _read_tile(proposal: Proposal, step: BackwardStep) -> _Tile:
    row_block, column_block, warps, stages = (
        proposal.number(name, 0) for name in ("own", "other", "warps", "stages")
    )
    method, tiles = proposal.config.get("method"), _choose_tiles(step)
    allowed = ("half",) if step.query.dtype in HALVES else ("tf32", "tf32x3", "bf16x6")
    if (row_block, column_block, warps, stages) not in tiles or method not in allowed:
        raise ProgramError(
            "proposal", f"{dict(proposal.config)}: none of the tiles {tiles} with one of {allowed}"
        )
    if _reads_out_of_bounds(str(method), column_block):
        raise ProgramError(
            "proposal",
            f"{dict(proposal.config)}: {method} with {column_block} rows at a time, expected {_MIN_TF32_ROWS}",
        )
    return _Tile(str(method), row_block, column_block, warps, stages)


def _count_blocks(tensor: StepTensor, rows: int) -> int:
    return math.prod(tensor.shape[:2]) * math.ceil(tensor.shape[2] / rows)


def _make_kernel(name: str, body: str, grid: int, tile: _Tile, step: BackwardStep) -> KernelSource:
    """A kernel from its text; its arguments are the tensors that the text names."""
    arguments_by_value = {
        tensor.value: tensor for tensor in step.tensors if f"p{tensor.value} +" in body
    }
    lines = [line for line in body.splitlines() if line.strip()]
    text = add_prelude(
        ", ".join(f"p{value}" for value in arguments_by_value)
        + "):\n"
        + "\n".join("    " + line for line in lines)
        + "\n"
    )
    symbol = f"attention_{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    arguments = tuple(
        (value, POINTERS[tensor.dtype]) for value, tensor in arguments_by_value.items()
    )
    return KernelSource(
        symbol, text.replace("SYMBOL", symbol), arguments, grid, tile.warps, tile.stages
    )


def _print_delta(step: BackwardStep) -> str:
    rows, size = step.query.shape[2], step.value.shape[3]
    inside = load_mask(
        [
            *_format_bounds_test("m", rows, _DELTA_ROWS, "[:, None]"),
            *_format_bounds_test("e", size, pad_to_power(size), "[None, :]"),
        ]
    )
    return f"""
block = tl.program_id(0){step.offset_cast}
head = block // {math.ceil(rows / _DELTA_ROWS)}
m = block % {math.ceil(rows / _DELTA_ROWS)} * {_DELTA_ROWS} + tl.arange(0, {_DELTA_ROWS})
e = tl.arange(0, {pad_to_power(size)})
out = tl.load({step.out.tile("head", "m", "e")}{inside}).to(tl.float32)
grad = tl.load({step.grad.tile("head", "m", "e")}{inside}).to(tl.float32)
tl.store({step.delta.row("head", "m")}, tl.sum(grad * out, axis=1){_store_mask(_format_bounds_test("m", rows, _DELTA_ROWS))})
"""


@dataclass(frozen=True)
class _Bounds:
    """The tests that a position of each axis is inside its tensor, where its tile is ragged."""

    rows: list[str]
    columns: list[str]
    depth: list[str]
    size: list[str]


def _find_bounds(step: BackwardStep, *, rows: int, columns: int) -> _Bounds:
    """The tests of a block of `rows` queries and `columns` keys."""
    depth, size = step.query.shape[3], step.value.shape[3]
    return _Bounds(
        _format_bounds_test("m", step.query.shape[2], rows),
        _format_bounds_test("n", step.key.shape[2], columns),
        _format_bounds_test("d", depth, pad_to_power(depth), "[None, :]"),
        _format_bounds_test("e", size, pad_to_power(size), "[None, :]"),
    )


def _broadcast_tests(tests: list[str], axes: str) -> list[str]:
    """Tests of a vector of positions, spread over a tile."""
    return [f"{test}{axes}" for test in tests]


def _print_queries(step: BackwardStep, tile: _Tile) -> str:
    """The kernel of the gradient of queries: a block of them, with the keys and values that the mask
    lets them see.
    """
    (_, _, rows, depth), columns, size = step.query.shape, step.key.shape[2], step.value.shape[3]
    inside = _find_bounds(step, rows=tile.rows, columns=tile.rows_per_step)
    tall, wide = (
        _broadcast_tests(inside.rows, "[:, None]"),
        _broadcast_tests(inside.columns, "[:, None]"),
    )
    # The mask is put on the slopes, not on the scores: a hidden score may be NaN or infinite, and
    # weight * (... - delta) would carry that into the sum.
    visible = ["(m[:, None] >= n[None, :])"] * step.causal + _broadcast_tests(
        inside.columns, "[None, :]"
    )
    # Keys behind the block's last row are hidden from all of its rows.
    last = (
        f"min({columns}, (block % {math.ceil(rows / tile.rows)} + 1) * {tile.rows})"
        if step.causal
        else columns
    )
    result = step.results["query"]
    return f"""
block = tl.program_id(0){step.offset_cast}
head = block // {math.ceil(rows / tile.rows)}
shared = {_print_keys_head(step)}
m = block % {math.ceil(rows / tile.rows)} * {tile.rows} + tl.arange(0, {tile.rows})
d = tl.arange(0, {pad_to_power(depth)})
e = tl.arange(0, {pad_to_power(size)})
query = tl.load({step.query.tile("head", "m", "d")}{load_mask([*tall, *inside.depth])})
grad = tl.load({step.grad.tile("head", "m", "e")}{load_mask([*tall, *inside.size])})
total = tl.load({step.logsumexp.row("head", "m")}{load_mask(inside.rows)})[:, None]
delta = tl.load({step.delta.row("head", "m")}{load_mask(inside.rows)})[:, None]
{tile.print_rounding("query", "grad")}
made = tl.zeros([{tile.rows}, {pad_to_power(depth)}], tl.float32)
for start in range(0, {last}, {tile.rows_per_step}):
    n = start + tl.arange(0, {tile.rows_per_step}){step.offset_cast}
    key = tl.load({step.key.tile("shared", "n", "d")}{load_mask([*wide, *inside.depth])})
    value = tl.load({step.value.tile("shared", "n", "e")}{load_mask([*wide, *inside.size])})
    {tile.print_rounding("key", "value")}
    score = tl.dot(query, tl.trans(key){tile.precision}) * {step.scale}
    {_print_bias(step.bias, [*tall, *_broadcast_tests(inside.columns, "[None, :]")])}
    weight = libdevice.exp(score - total)
    slope = weight * (tl.dot(grad, tl.trans(value){tile.precision}) - delta)
    {_print_mask("slope", visible)}
    {tile.print_rounding("slope")}
    made = made + tl.dot(slope{cast_text(step.query.dtype)}, key{tile.precision})
tl.store({result.tile("head", "m", "d")}, made * {step.scale}{_store_mask([*tall, *inside.depth])})
"""


def _print_keys(step: BackwardStep, tile: _Tile) -> str:
    """The kernel of the gradients of keys and values: a block of them, with the queries that see
    them. Scores are transposed from the start, so that no product has to transpose them.
    """
    (_, heads, rows, depth), columns = step.query.shape, step.key.shape[2]
    size, key_heads = step.value.shape[3], step.key.shape[1]
    inside = _find_bounds(step, rows=tile.rows_per_step, columns=tile.rows)
    tall, wide = (
        _broadcast_tests(inside.rows, "[:, None]"),
        _broadcast_tests(inside.columns, "[:, None]"),
    )
    visible = ["(m[None, :] >= n[:, None])"] * step.causal + _broadcast_tests(
        inside.rows, "[None, :]"
    )
    blocks = math.ceil(columns / tile.rows)
    # Queries before the block's first key see none of its keys.
    first = (
        f"block % {blocks} * {tile.rows} // {tile.rows_per_step} * {tile.rows_per_step}"
        if step.causal
        else 0
    )
    text = f"""
block = tl.program_id(0){step.offset_cast}
shared = block // {blocks}
n = block % {blocks} * {tile.rows} + tl.arange(0, {tile.rows})
d = tl.arange(0, {pad_to_power(depth)})
e = tl.arange(0, {pad_to_power(size)})
key = tl.load({step.key.tile("shared", "n", "d")}{load_mask([*wide, *inside.depth])})
value = tl.load({step.value.tile("shared", "n", "e")}{load_mask([*wide, *inside.size])})
{tile.print_rounding("key", "value")}
made_key = tl.zeros([{tile.rows}, {pad_to_power(depth)}], tl.float32)
made_value = tl.zeros([{tile.rows}, {pad_to_power(size)}], tl.float32)
for each in range(0, {step.queries_per_key}):
    head = (shared // {key_heads} * {heads} + shared % {key_heads} * {step.queries_per_key} + each)
    for start in range({first}, {rows}, {tile.rows_per_step}):
        m = start + tl.arange(0, {tile.rows_per_step}){step.offset_cast}
        query = tl.load({step.query.tile("head", "m", "d")}{load_mask([*tall, *inside.depth])})
        grad = tl.load({step.grad.tile("head", "m", "e")}{load_mask([*tall, *inside.size])})
        total = tl.load({step.logsumexp.row("head", "m")}{load_mask(inside.rows)})[None, :]
        delta = tl.load({step.delta.row("head", "m")}{load_mask(inside.rows)})[None, :]
        {tile.print_rounding("query", "grad")}
        score = tl.dot(key, tl.trans(query){tile.precision}) * {step.scale}
        {_print_bias(step.bias, [*wide, *_broadcast_tests(inside.rows, "[None, :]")], transposed=True)}
        weight = libdevice.exp(score - total)
        {_print_mask("weight", visible)}
        slope = weight * (tl.dot(value, tl.trans(grad){tile.precision}) - delta)
        {_print_mask("slope", visible)}
        {tile.print_rounding("weight", "slope")}
        made_value = made_value + tl.dot(weight{cast_text(step.query.dtype)}, grad{tile.precision})
        made_key = made_key + tl.dot(slope{cast_text(step.query.dtype)}, query{tile.precision})
"""
    return text + _print_key_stores(step, wide, inside)


def _print_key_stores(step: BackwardStep, wide: list[str], inside: _Bounds) -> str:
    stores = (
        ("key", "d", f"made_key * {step.scale}", inside.depth),
        ("value", "e", "made_value", inside.size),
    )
    return "\n".join(
        f"tl.store({step.results[name].tile('shared', 'n', axis)}, {text}{_store_mask([*wide, *tests])})"
        for name, axis, text, tests in stores
        if name in step.results
    )


def _print_keys_head(step: BackwardStep) -> str:
    # Neighbouring heads of queries share one of keys (grouped and multi-query attention).
    heads, key_heads = step.query.shape[1], step.key.shape[1]
    return (
        "head"
        if step.queries_per_key == 1
        else f"(head // {heads} * {key_heads} + head % {heads} // {step.queries_per_key})"
    )


def _format_bounds_test(name: str, size: int, tile: int, spread: str = "") -> list[str]:
    """The test that a position is inside; none where the tile divides the size."""
    return [f"({name} < {size}){spread}"] * (size % tile != 0)


def _store_mask(tests: list[str]) -> str:
    return f", mask={' & '.join(tests)}" if tests else ""


def _print_bias(bias: StepTensor | None, tests: list[str], *, transposed: bool = False) -> str:
    """A line that adds the bias, where there is one; `transposed`: to scores that lie on their side."""
    if bias is None:
        return ""
    addresses = (bias.transposed_tile if transposed else bias.tile)("head", "m", "n")
    return f"score = score + tl.load({addresses}{load_mask(tests)}).to(tl.float32)"


def _print_mask(name: str, tests: list[str]) -> str:
    """A line that sets to 0 what is masked or beyond the edge, NaN and infinity included."""
    return f"{name} = tl.where({' & '.join(tests)}, {name}, 0.0)" if tests else ""


TEMPLATE = Template(
    family="attention_backward",
    summary="Backwards of the fused attention operators, without atomic additions: the same bits in "
    "every run.",
    architectures="sm_80 and newer",
    dtypes="fp32, fp16, bf16",
    propose=_propose,
    lower=_lower,
    # a mask may hide keys; a group of its own, for its kernels take no further step in
    fusion=FusionRules("product", TARGETS, takes_epilogue=False, partial_reads=TARGETS),
    matches_program=is_backward,
    is_shortlisted=True,
)
