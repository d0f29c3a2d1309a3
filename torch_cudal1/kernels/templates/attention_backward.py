"""Gradients of fused attention without a score in memory, the same bits in every run: no two
programs add to one number.

    weights = exp(scale query key^T + bias - logsumexp)           delta = sum(grad out) of each row
    slopes  = weights (grad value^T - delta)
    d_value = weights^T grad      d_key = scale slopes^T query      d_query = scale slopes key

Three launches: `delta`; the gradient of a block of queries, with all keys; those of a block of keys
and values, with all queries of all heads that share them. The last two make the weights anew, seven
products for the five that there are. A causal mask skips blocks. Products are as in `attention`: of
fp32 in pieces, of half types as they are, summed in fp32. No kernel is made of a result that nobody
reads. Bytes moved: delta reads two tensors; of the others each block reads its own rows once, and
the other side's, which the L2 serves.

Source: Dao, FlashAttention-2 (2023), algorithm 2, without its atomic additions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.kernels.codegen.prelude import POINTERS, headed
from torch_cudal1.kernels.proposal import Kernel, Proposal, shared_limit
from torch_cudal1.kernels.templates.attention_step import (
    HALVES,
    BackwardStep,
    StepTensor,
    read_step,
)

__all__ = ["FAMILY", "gradients", "gradients_of"]

FAMILY = "attention_backward"

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
_PIECES = 16
# rows at most under a causal mask: in larger blocks than PyTorch's a NaN that the mask hides would
# reach further than there
_CAUSAL_BLOCK = 64
# rows at a time for TF32 products: of 16, eight warps of sm_90 read shared memory that is not
# theirs (Triton 3.6)
_LEAST_OTHER = 32
_TENSOR_MEMORY = range(
    100, 120
)  # where products of 64 rows and more keep sums and pieces; of too many Triton makes a trap


@dataclass(frozen=True)
class _Tile:
    """How the two kernels of products are cut: rows of their own, rows they take at a time, and how
    products are computed.
    """

    method: str
    own: int
    other: int
    warps: int
    stages: int

    @property
    def precision(self) -> str:
        """The last argument of a product."""
        return "" if self.method == "half" else f', input_precision="{self.method}"'

    def rounded(self, *names: str) -> str:
        """Statements that round operands of plain TF32 products to the nearest, as the tensor cores
        would cut them off.
        """
        return "; ".join(
            f"{name} = nearest_tf32({name})" for name in names if self.method == "tf32"
        )


def gradients(
    program: Program, sm: int, rights: Collection[str], most: int
) -> tuple[Proposal, ...]:
    """At most `most` proposals, best guess first. Raises NotLowerableError with what the kernels do
    not serve.
    """
    step = read_step(program)
    methods = (
        ("half",)
        if step.query.dtype in HALVES
        else (("tf32",) if "matmul" in rights else ()) + ("tf32x3", "bf16x6")
    )
    width = _padded(max(step.query.shape[3], step.value.shape[3]))
    found = [
        (method, *tile)
        for tile in _tiles(step)
        for method in methods
        if _fits(method, tile, width, sm)
    ]
    names = ("method", "own", "other", "warps", "stages")
    return tuple(Proposal(FAMILY, dict(zip(names, one, strict=True))) for one in found[:most])


def gradients_of(
    program: Program, proposal: Proposal
) -> tuple[tuple[Kernel, ...], Mapping[int, TensorSpec]]:
    """The kernels in launch order and the specs of all that they write. Raises NotLowerableError,
    or ProgramError for nonsense.
    """
    step, specs = read_step(program), value_specs(program)
    tile = _tile(proposal, step)
    kernels = [
        _kernel(
            "delta",
            _delta_text(step),
            _blocks(step.query, _DELTA_ROWS),
            _Tile("half", _DELTA_ROWS, 0, 4, 1),
            step,
        )
    ]
    if "query" in step.results:
        kernels.append(
            _kernel("queries", _queries_text(step, tile), _blocks(step.query, tile.own), tile, step)
        )
    if {"key", "value"} & step.results.keys():
        kernels.append(
            _kernel("keys", _keys_text(step, tile), _blocks(step.key, tile.own), tile, step)
        )
    scratch = TensorSpec("float32", step.delta.shape, step.delta.strides, "cuda")
    return tuple(kernels), {one.value: specs[one.value] for one in step.results.values()} | {
        step.delta.value: scratch
    }


def _tiles(step: BackwardStep) -> tuple[tuple[int, int, int, int], ...]:
    """Tiles for its heads and mask."""
    table = _HALF_TILES if step.query.dtype in HALVES else _TILES
    tiles = next(
        tiles
        for size, tiles in table.items()
        if max(step.query.shape[3], step.value.shape[3]) <= size
    )
    return tuple(tile for tile in tiles if not step.causal or max(tile[:2]) <= _CAUSAL_BLOCK)


def _fits(method: str, tile: tuple[int, int, int, int], width: int, sm: int) -> bool:
    """Whether the memories of a multiprocessor hold what a program keeps, for heads of `width`
    elements.
    """
    own, other, *_ = tile
    if _misread(method, other):
        return False
    if method == "half" or own < 64 or sm not in _TENSOR_MEMORY:
        return method == "half" or _PIECES * own * width <= shared_limit(sm)
    return (own, other) == (64, 32) and width <= (32 if method == "bf16x6" else 64)


def _misread(method: str, other: int) -> bool:
    """Whether the compiled kernel would read outside its shared memory."""
    return method.startswith("tf32") and other < _LEAST_OTHER


def _tile(proposal: Proposal, step: BackwardStep) -> _Tile:
    own, other, warps, stages = (
        proposal.number(name, 0) for name in ("own", "other", "warps", "stages")
    )
    method, tiles = proposal.config.get("method"), _tiles(step)
    allowed = ("half",) if step.query.dtype in HALVES else ("tf32", "tf32x3", "bf16x6")
    if (own, other, warps, stages) not in tiles or method not in allowed:
        raise ProgramError(
            "proposal", f"{dict(proposal.config)}: none of the tiles {tiles} with one of {allowed}"
        )
    if _misread(str(method), other):
        raise ProgramError(
            "proposal",
            f"{dict(proposal.config)}: {method} with {other} rows at a time, expected {_LEAST_OTHER}",
        )
    return _Tile(str(method), own, other, warps, stages)


def _blocks(tensor: StepTensor, rows: int) -> int:
    return math.prod(tensor.shape[:2]) * math.ceil(tensor.shape[2] / rows)


def _kernel(name: str, body: str, grid: int, tile: _Tile, step: BackwardStep) -> Kernel:
    """A kernel from its text; of all tensors it takes those that the text names."""
    taken = {one.value: one for one in step.tensors if f"p{one.value} +" in body}
    lines = [line for line in body.splitlines() if line.strip()]
    text = headed(
        ", ".join(f"p{value}" for value in taken)
        + "):\n"
        + "\n".join("    " + line for line in lines)
        + "\n"
    )
    symbol = f"attention_{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    arguments = tuple((value, POINTERS[one.dtype]) for value, one in taken.items())
    return Kernel(symbol, text.replace("SYMBOL", symbol), arguments, grid, tile.warps, tile.stages)


def _delta_text(step: BackwardStep) -> str:
    rows, size = step.query.shape[2], step.value.shape[3]
    inside = _mask(
        [*_test("m", rows, _DELTA_ROWS, "[:, None]"), *_test("e", size, _padded(size), "[None, :]")]
    )
    return f"""
block = tl.program_id(0){step.wide}
head = block // {math.ceil(rows / _DELTA_ROWS)}
m = block % {math.ceil(rows / _DELTA_ROWS)} * {_DELTA_ROWS} + tl.arange(0, {_DELTA_ROWS})
e = tl.arange(0, {_padded(size)})
out = tl.load({step.out.tile("head", "m", "e")}{inside}).to(tl.float32)
grad = tl.load({step.grad.tile("head", "m", "e")}{inside}).to(tl.float32)
tl.store({step.delta.row("head", "m")}, tl.sum(grad * out, axis=1){_store_mask(_test("m", rows, _DELTA_ROWS))})
"""


def _queries_text(step: BackwardStep, tile: _Tile) -> str:
    """Of a block of queries, with keys and values of as many rows as the mask lets them see."""
    (_, _, rows, depth), columns, size = step.query.shape, step.key.shape[2], step.value.shape[3]
    in_rows, in_columns = _test("m", rows, tile.own), _test("n", columns, tile.other)
    in_depth, in_size = (
        _test("d", depth, _padded(depth), "[None, :]"),
        _test("e", size, _padded(size), "[None, :]"),
    )
    tall, wide = (
        [f"{test}[:, None]" for test in in_rows],
        [f"{test}[:, None]" for test in in_columns],
    )
    seen = ["(m[:, None] >= n[None, :])"] * step.causal + [
        f"{test}[None, :]" for test in in_columns
    ]
    last = (
        f"min({columns}, (block % {math.ceil(rows / tile.own)} + 1) * {tile.own})"
        if step.causal
        else columns
    )
    made = step.results["query"]
    return f"""
block = tl.program_id(0){step.wide}
head = block // {math.ceil(rows / tile.own)}
shared = {_keys_head(step)}
m = block % {math.ceil(rows / tile.own)} * {tile.own} + tl.arange(0, {tile.own})
d = tl.arange(0, {_padded(depth)})
e = tl.arange(0, {_padded(size)})
query = tl.load({step.query.tile("head", "m", "d")}{_mask([*tall, *in_depth])})
grad = tl.load({step.grad.tile("head", "m", "e")}{_mask([*tall, *in_size])})
total = tl.load({step.logsumexp.row("head", "m")}{_mask(in_rows)})[:, None]
delta = tl.load({step.delta.row("head", "m")}{_mask(in_rows)})[:, None]
{tile.rounded("query", "grad")}
made = tl.zeros([{tile.own}, {_padded(depth)}], tl.float32)
for start in range(0, {last}, {tile.other}):
    n = start + tl.arange(0, {tile.other}){step.wide}
    key = tl.load({step.key.tile("shared", "n", "d")}{_mask([*wide, *in_depth])})
    value = tl.load({step.value.tile("shared", "n", "e")}{_mask([*wide, *in_size])})
    {tile.rounded("key", "value")}
    score = tl.dot(query, tl.trans(key){tile.precision}) * {step.scale}
    {_biased(step.bias, [*tall, *(f"{test}[None, :]" for test in in_columns)])}
    weight = libdevice.exp(score - total)
    slope = weight * (tl.dot(grad, tl.trans(value){tile.precision}) - delta)
    {_masked("slope", seen)}
    {tile.rounded("slope")}
    made = made + tl.dot(slope{_typed(step)}, key{tile.precision})
tl.store({made.tile("head", "m", "d")}, made * {step.scale}{_store_mask([*tall, *in_depth])})
"""


def _keys_text(step: BackwardStep, tile: _Tile) -> str:
    """Of a block of keys and values, with the queries that see them; scores lie on their side, so
    that no product turns them.
    """
    (_, heads, rows, depth), columns, size = (
        step.query.shape,
        step.key.shape[2],
        step.value.shape[3],
    )
    in_rows, in_columns = _test("m", rows, tile.other), _test("n", columns, tile.own)
    in_depth, in_size = (
        _test("d", depth, _padded(depth), "[None, :]"),
        _test("e", size, _padded(size), "[None, :]"),
    )
    tall, wide = (
        [f"{test}[:, None]" for test in in_rows],
        [f"{test}[:, None]" for test in in_columns],
    )
    seen = ["(m[None, :] >= n[:, None])"] * step.causal + [f"{test}[None, :]" for test in in_rows]
    blocks, own = math.ceil(columns / tile.own), step.key.shape[1]
    first = f"block % {blocks} * {tile.own} // {tile.other} * {tile.other}" if step.causal else 0
    stores = [
        f"tl.store({step.results[name].tile('shared', 'n', along)}, {text}{_store_mask([*wide, *inside])})"
        for name, along, text, inside in (
            ("key", "d", f"made_key * {step.scale}", in_depth),
            ("value", "e", "made_value", in_size),
        )
        if name in step.results
    ]
    text = f"""
block = tl.program_id(0){step.wide}
shared = block // {blocks}
n = block % {blocks} * {tile.own} + tl.arange(0, {tile.own})
d = tl.arange(0, {_padded(depth)})
e = tl.arange(0, {_padded(size)})
key = tl.load({step.key.tile("shared", "n", "d")}{_mask([*wide, *in_depth])})
value = tl.load({step.value.tile("shared", "n", "e")}{_mask([*wide, *in_size])})
{tile.rounded("key", "value")}
made_key = tl.zeros([{tile.own}, {_padded(depth)}], tl.float32)
made_value = tl.zeros([{tile.own}, {_padded(size)}], tl.float32)
for each in range(0, {step.shared}):
    head = (shared // {own} * {heads} + shared % {own} * {step.shared} + each)
    for start in range({first}, {rows}, {tile.other}):
        m = start + tl.arange(0, {tile.other}){step.wide}
        query = tl.load({step.query.tile("head", "m", "d")}{_mask([*tall, *in_depth])})
        grad = tl.load({step.grad.tile("head", "m", "e")}{_mask([*tall, *in_size])})
        total = tl.load({step.logsumexp.row("head", "m")}{_mask(in_rows)})[None, :]
        delta = tl.load({step.delta.row("head", "m")}{_mask(in_rows)})[None, :]
        {tile.rounded("query", "grad")}
        score = tl.dot(key, tl.trans(query){tile.precision}) * {step.scale}
        {_biased(step.bias, [*wide, *(f"{test}[None, :]" for test in in_rows)], turned=True)}
        weight = libdevice.exp(score - total)
        {_masked("weight", seen)}
        slope = weight * (tl.dot(value, tl.trans(grad){tile.precision}) - delta)
        {_masked("slope", seen)}
        {tile.rounded("weight", "slope")}
        made_value = made_value + tl.dot(weight{_typed(step)}, grad{tile.precision})
        made_key = made_key + tl.dot(slope{_typed(step)}, query{tile.precision})
"""
    return text + "\n".join(stores)


def _keys_head(step: BackwardStep) -> str:
    heads, own = step.query.shape[1], step.key.shape[1]
    return (
        "head"
        if step.shared == 1
        else f"(head // {heads} * {own} + head % {heads} // {step.shared})"
    )


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _test(name: str, size: int, tile: int, spread: str = "") -> list[str]:
    """That a position is inside, where a tile may reach beyond."""
    return [f"({name} < {size}){spread}"] * (size % tile != 0)


def _mask(tests: list[str]) -> str:
    return f", mask={' & '.join(tests)}, other=0.0" if tests else ""


def _store_mask(tests: list[str]) -> str:
    return f", mask={' & '.join(tests)}" if tests else ""


def _biased(bias: StepTensor | None, tests: list[str], *, turned: bool = False) -> str:
    """A line that adds the bias, where there is one; `turned`: to scores that lie on their side."""
    if bias is None:
        return ""
    addresses = (bias.turned if turned else bias.tile)("head", "m", "n")
    return f"score = score + tl.load({addresses}{_mask(tests)}).to(tl.float32)"


def _masked(name: str, tests: list[str]) -> str:
    """A line that makes 0 of what is masked or beyond the edge, whatever a NaN or an infinity made
    of it.
    """
    return f"{name} = tl.where({' & '.join(tests)}, {name}, 0.0)" if tests else ""


def _typed(step: BackwardStep) -> str:
    return (
        f".to(tl.{str(step.query.dtype).removeprefix('torch.')})"
        if step.query.dtype in HALVES
        else ""
    )
