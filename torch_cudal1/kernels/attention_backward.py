"""Gradients of fused attention without a score in memory, the same bits in every run: no two programs add to one number.

    weights = exp(scale query key^T + bias - logsumexp)           delta = sum(grad out) of each row
    slopes  = weights (grad value^T - delta)
    d_value = weights^T grad      d_key = scale slopes^T query      d_query = scale slopes key

Three launches: `delta`; the gradient of a block of queries, with all keys; those of a block of keys and values, with all queries of
all heads that share them. The last two make the weights anew, seven products for the five that there are. A causal mask skips
blocks. Products are as in `attention`: of fp32 in pieces, of half types as they are, summed in fp32. No kernel is made of a result
that nobody reads. Dropout, packed sequences and the gradient of a bias are refused. Bytes moved: delta reads two tensors; of the
others each block reads its own rows once, and the other side's, which the L2 serves.

Source: Dao, FlashAttention-2 (2023), algorithm 2, without its atomic additions.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_cudal1.errors import NotLowerableError, ProgramError
from torch_cudal1.kernels.attention import MOST_DEPTH
from torch_cudal1.kernels.index import row_major
from torch_cudal1.kernels.plan import Kernel, Proposal, shared_limit
from torch_cudal1.kernels.source import POINTERS, headed
from torch_cudal1.program import attention
from torch_cudal1.program.aten import overload
from torch_cudal1.program.model import Aten, Program, TensorSpec, Value
from torch_cudal1.program.operator import value_specs

__all__ = ["FAMILY", "TARGETS", "gradients", "gradients_of", "is_backward"]

FAMILY = "attention_backward"
TARGETS = attention.targets(attention.BACKWARDS)

_HALVES = (torch.float16, torch.bfloat16)
_INT32_REACH = 2**31 - 1
_DELTA_ROWS = 32
# elements of a head -> rows that a program keeps, rows that it takes at a time, warps, stages; best guess first. Compiled for sm_90
# they keep all in registers, but for heads of 128 in fp32: those spill some hundred bytes a thread.
_TILES = {
    32: ((64, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 3)),
    64: ((64, 32, 4, 2), (128, 32, 8, 2), (64, 32, 4, 1), (32, 32, 4, 2)),
    128: ((64, 32, 8, 1), (64, 16, 8, 2), (32, 64, 8, 1), (32, 32, 4, 1)),
}
_HALF_TILES = {
    64: ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 4, 2), (64, 32, 4, 3)),
    128: ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)),
}
_PIECES = 16  # bytes of shared memory at least for an element of fp32 tiles that stay: two tensors, two pieces
# rows at most under a causal mask: in larger blocks than PyTorch's a NaN that the mask hides would reach further than there
_CAUSAL_BLOCK = 64
_LEAST_OTHER = (
    32  # rows at a time for TF32 products: of 16, eight warps of sm_90 read shared memory that is not theirs (Triton 3.6)
)
_TENSOR_MEMORY = range(100, 120)  # where products of 64 rows and more keep sums and pieces; of too many Triton makes a trap


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the step: its value number, sizes and strides of batch, heads, rows and, but for one number a row, elements."""

    value: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tile(self, head: str, rows: str, columns: str) -> str:
        """Addresses of a matrix; `head` counts the heads of all batches, `rows` and `columns` name vectors."""
        return f"{self._head(head)} + {rows}[:, None] * {self.strides[2]} + {columns}[None, :] * {self.strides[3]}"

    def turned(self, head: str, rows: str, columns: str) -> str:
        """As `tile`, of the transposed matrix."""
        return f"{self._head(head)} + {columns}[:, None] * {self.strides[3]} + {rows}[None, :] * {self.strides[2]}"

    def row(self, head: str, rows: str) -> str:
        """Addresses of one number a row."""
        return f"{self._head(head)} + {rows} * {self.strides[2]}"

    def _head(self, head: str) -> str:
        return f"p{self.value} + {head} // {self.shape[1]} * {self.strides[0]} + {head} % {self.shape[1]} * {self.strides[1]}"

    @property
    def reach(self) -> int:
        """The largest offset of an element."""
        return sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class _Step:
    """The step: its tensors, and those of its results that are read; `delta` is scratch, `bias` as large as all scores."""

    grad: _Tensor
    query: _Tensor
    key: _Tensor
    value: _Tensor
    out: _Tensor
    logsumexp: _Tensor
    delta: _Tensor
    bias: _Tensor | None
    results: Mapping[str, _Tensor]
    scale: float
    causal: bool

    @property
    def shared(self) -> int:
        """Heads of queries for each of keys and values."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def wide(self) -> str:
        """What makes a number one of 64 bits, where an offset needs them."""
        return ".to(tl.int64)" if max(one.reach for one in self.tensors) > _INT32_REACH else ""

    @property
    def tensors(self) -> tuple[_Tensor, ...]:
        """All of them."""
        given = (self.grad, self.query, self.key, self.value, self.out, self.logsumexp, self.delta)
        return (*given, *([] if self.bias is None else [self.bias]), *self.results.values())


@dataclass(frozen=True)
class _Tile:
    """How the two kernels of products are cut: rows of their own, rows they take at a time, and how products are computed."""

    method: str
    own: int
    other: int
    warps: int
    stages: int

    @property
    def precision(self) -> str:
        """The last argument of a product."""
        return "" if self.method == "half" else f', input_precision="{self.method}"'


def is_backward(program: Program) -> bool:
    """Whether it is the backward of a fused attention operator and nothing else."""
    return len(program.steps) == 1 and isinstance(program.steps[0], Aten) and program.steps[0].target in TARGETS


def gradients(program: Program, sm: int, rights: Collection[str], most: int) -> tuple[Proposal, ...]:
    """At most `most` proposals, best guess first. Raises NotLowerableError with what the kernels do not serve."""
    step = _step(program)
    methods = ("half",) if step.query.dtype in _HALVES else (("tf32",) if "matmul" in rights else ()) + ("tf32x3", "bf16x6")
    width = _padded(max(step.query.shape[3], step.value.shape[3]))
    found = [(method, *tile) for tile in _tiles(step) for method in methods if _fits(method, tile, width, sm)]
    names = ("method", "own", "other", "warps", "stages")
    return tuple(Proposal(FAMILY, dict(zip(names, one, strict=True))) for one in found[:most])


def gradients_of(program: Program, proposal: Proposal) -> tuple[tuple[Kernel, ...], Mapping[int, TensorSpec]]:
    """The kernels in launch order and the specs of all that they write. Raises NotLowerableError, or ProgramError for nonsense."""
    step, specs = _step(program), value_specs(program)
    tile = _tile(proposal, step)
    kernels = [_kernel("delta", _delta_text(step), _blocks(step.query, _DELTA_ROWS), _Tile("half", _DELTA_ROWS, 0, 4, 1), step)]
    if "query" in step.results:
        kernels.append(_kernel("queries", _queries_text(step, tile), _blocks(step.query, tile.own), tile, step))
    if {"key", "value"} & step.results.keys():
        kernels.append(_kernel("keys", _keys_text(step, tile), _blocks(step.key, tile.own), tile, step))
    scratch = TensorSpec("float32", step.delta.shape, step.delta.strides, "cuda")
    return tuple(kernels), {one.value: specs[one.value] for one in step.results.values()} | {step.delta.value: scratch}


def _tiles(step: _Step) -> tuple[tuple[int, int, int, int], ...]:
    """Tiles for its heads and mask."""
    table = _HALF_TILES if step.query.dtype in _HALVES else _TILES
    tiles = next(tiles for size, tiles in table.items() if max(step.query.shape[3], step.value.shape[3]) <= size)
    return tuple(tile for tile in tiles if not step.causal or max(tile[:2]) <= _CAUSAL_BLOCK)


def _fits(method: str, tile: tuple[int, int, int, int], width: int, sm: int) -> bool:
    """Whether the memories of a multiprocessor hold what a program keeps, for heads of `width` elements."""
    own, other, *_ = tile
    if _misread(method, other):
        return False
    if method == "half" or own < 64 or sm not in _TENSOR_MEMORY:
        return method == "half" or _PIECES * own * width <= shared_limit(sm)
    return (own, other) == (64, 32) and width <= (32 if method == "bf16x6" else 64)


def _misread(method: str, other: int) -> bool:
    """Whether the compiled kernel would read outside its shared memory."""
    return method.startswith("tf32") and other < _LEAST_OTHER


def _tile(proposal: Proposal, step: _Step) -> _Tile:
    own, other, warps, stages = (proposal.number(name, 0) for name in ("own", "other", "warps", "stages"))
    method, tiles = proposal.config.get("method"), _tiles(step)
    allowed = ("half",) if step.query.dtype in _HALVES else ("tf32", "tf32x3", "bf16x6")
    if (own, other, warps, stages) not in tiles or method not in allowed:
        raise ProgramError("proposal", f"{dict(proposal.config)}: none of the tiles {tiles} with one of {allowed}")
    if _misread(str(method), other):
        raise ProgramError("proposal", f"{dict(proposal.config)}: {method} with {other} rows at a time, expected {_LEAST_OTHER}")
    return _Tile(str(method), own, other, warps, stages)


def _blocks(tensor: _Tensor, rows: int) -> int:
    return math.prod(tensor.shape[:2]) * math.ceil(tensor.shape[2] / rows)


def _kernel(name: str, body: str, grid: int, tile: _Tile, step: _Step) -> Kernel:
    """A kernel from its text; of all tensors it takes those that the text names."""
    taken = {one.value: one for one in step.tensors if f"p{one.value} +" in body}
    lines = [line for line in body.splitlines() if line.strip()]
    text = headed(", ".join(f"p{value}" for value in taken) + "):\n" + "\n".join("    " + line for line in lines) + "\n")
    symbol = f"attention_{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    arguments = tuple((value, POINTERS[one.dtype]) for value, one in taken.items())
    return Kernel(symbol, text.replace("SYMBOL", symbol), arguments, grid, tile.warps, tile.stages)


def _delta_text(step: _Step) -> str:
    rows, size = step.query.shape[2], step.value.shape[3]
    inside = _mask([*_test("m", rows, _DELTA_ROWS, "[:, None]"), *_test("e", size, _padded(size), "[None, :]")])
    return f"""
block = tl.program_id(0){step.wide}
head = block // {math.ceil(rows / _DELTA_ROWS)}
m = block % {math.ceil(rows / _DELTA_ROWS)} * {_DELTA_ROWS} + tl.arange(0, {_DELTA_ROWS})
e = tl.arange(0, {_padded(size)})
out = tl.load({step.out.tile("head", "m", "e")}{inside}).to(tl.float32)
grad = tl.load({step.grad.tile("head", "m", "e")}{inside}).to(tl.float32)
tl.store({step.delta.row("head", "m")}, tl.sum(grad * out, axis=1){_store_mask(_test("m", rows, _DELTA_ROWS))})
"""


def _queries_text(step: _Step, tile: _Tile) -> str:
    """Of a block of queries, with keys and values of as many rows as the mask lets them see."""
    (_, _, rows, depth), columns, size = step.query.shape, step.key.shape[2], step.value.shape[3]
    in_rows, in_columns = _test("m", rows, tile.own), _test("n", columns, tile.other)
    in_depth, in_size = _test("d", depth, _padded(depth), "[None, :]"), _test("e", size, _padded(size), "[None, :]")
    tall, wide = [f"{test}[:, None]" for test in in_rows], [f"{test}[:, None]" for test in in_columns]
    seen = ["(m[:, None] >= n[None, :])"] * step.causal + [f"{test}[None, :]" for test in in_columns]
    last = f"min({columns}, (block % {math.ceil(rows / tile.own)} + 1) * {tile.own})" if step.causal else columns
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
made = tl.zeros([{tile.own}, {_padded(depth)}], tl.float32)
for start in range(0, {last}, {tile.other}):
    n = start + tl.arange(0, {tile.other}){step.wide}
    key = tl.load({step.key.tile("shared", "n", "d")}{_mask([*wide, *in_depth])})
    value = tl.load({step.value.tile("shared", "n", "e")}{_mask([*wide, *in_size])})
    score = tl.dot(query, tl.trans(key){tile.precision}) * {step.scale}
    {_biased(step.bias, [*tall, *(f"{test}[None, :]" for test in in_columns)])}
    weight = libdevice.exp(score - total)
    slope = weight * (tl.dot(grad, tl.trans(value){tile.precision}) - delta)
    {_masked("slope", seen)}
    made = made + tl.dot(slope{_typed(step)}, key{tile.precision})
tl.store({made.tile("head", "m", "d")}, made * {step.scale}{_store_mask([*tall, *in_depth])})
"""


def _keys_text(step: _Step, tile: _Tile) -> str:
    """Of a block of keys and values, with the queries that see them; scores lie on their side, so that no product turns them."""
    (_, heads, rows, depth), columns, size = step.query.shape, step.key.shape[2], step.value.shape[3]
    in_rows, in_columns = _test("m", rows, tile.other), _test("n", columns, tile.own)
    in_depth, in_size = _test("d", depth, _padded(depth), "[None, :]"), _test("e", size, _padded(size), "[None, :]")
    tall, wide = [f"{test}[:, None]" for test in in_rows], [f"{test}[:, None]" for test in in_columns]
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
        score = tl.dot(key, tl.trans(query){tile.precision}) * {step.scale}
        {_biased(step.bias, [*wide, *(f"{test}[None, :]" for test in in_rows)], turned=True)}
        weight = libdevice.exp(score - total)
        {_masked("weight", seen)}
        slope = weight * (tl.dot(value, tl.trans(grad){tile.precision}) - delta)
        {_masked("slope", seen)}
        made_value = made_value + tl.dot(weight{_typed(step)}, grad{tile.precision})
        made_key = made_key + tl.dot(slope{_typed(step)}, query{tile.precision})
"""
    return text + "\n".join(stores)


def _keys_head(step: _Step) -> str:
    heads, own = step.query.shape[1], step.key.shape[1]
    return "head" if step.shared == 1 else f"(head // {heads} * {own} + head % {heads} // {step.shared})"


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _test(name: str, size: int, tile: int, spread: str = "") -> list[str]:
    """That a position is inside, where a tile may reach beyond."""
    return [f"({name} < {size}){spread}"] * (size % tile != 0)


def _mask(tests: list[str]) -> str:
    return f", mask={' & '.join(tests)}, other=0.0" if tests else ""


def _store_mask(tests: list[str]) -> str:
    return f", mask={' & '.join(tests)}" if tests else ""


def _biased(bias: _Tensor | None, tests: list[str], *, turned: bool = False) -> str:
    """A line that adds the bias, where there is one; `turned`: to scores that lie on their side."""
    if bias is None:
        return ""
    addresses = (bias.turned if turned else bias.tile)("head", "m", "n")
    return f"score = score + tl.load({addresses}{_mask(tests)}).to(tl.float32)"


def _masked(name: str, tests: list[str]) -> str:
    """A line that makes 0 of what is masked or beyond the edge, whatever a NaN or an infinity made of it."""
    return f"{name} = tl.where({' & '.join(tests)}, {name}, 0.0)" if tests else ""


def _typed(step: _Step) -> str:
    return f".to(tl.{str(step.query.dtype).removeprefix('torch.')})" if step.query.dtype in _HALVES else ""


def _step(program: Program) -> _Step:
    """Read the step. Raises NotLowerableError with what the kernels do not serve."""
    if not is_backward(program):
        raise NotLowerableError("no backward of fused attention by itself")
    (step,) = program.steps
    assert isinstance(step, Aten)
    names = [argument.name.removesuffix("_") for argument in overload(step.target)._schema.arguments]
    bound = dict(zip(names, step.args, strict=False)) | dict(step.kwargs)
    specs = value_specs(program)
    names = [*("grad_out", "query", "key", "value", "out", "logsumexp"), *["attn_bias"] * (bound.get("attn_bias") is not None)]
    tensors = {name: _tensor(bound[name], specs) for name in names}
    _check(step.target, bound, tensors)
    results = dict(zip(("query", "key", "value"), step.outs, strict=False))
    wanted = {value for value in program.outputs if value is not None}
    if not wanted <= set(results.values()):
        raise NotLowerableError("a result that is no gradient of queries, keys or values")
    batch, heads, rows, depth = tensors["query"].shape
    scale = bound.get("scale")
    return _Step(
        grad=tensors["grad_out"],
        query=tensors["query"],
        key=tensors["key"],
        value=tensors["value"],
        out=tensors["out"],
        logsumexp=tensors["logsumexp"],
        delta=_Tensor(program.value_count, torch.float32, (batch, heads, rows), row_major((batch, heads, rows))),
        bias=_spread(tensors.get("attn_bias"), (batch, heads, rows, tensors["key"].shape[2])),
        results={name: _tensor(Value(value), specs) for name, value in results.items() if value in wanted},
        scale=_single(1 / math.sqrt(depth) if scale is None else scale),
        causal=bool(bound.get("is_causal")),
    )


def _tensor(value: object, specs: Mapping[int, TensorSpec]) -> _Tensor:
    if not isinstance(value, Value) or value.index not in specs:
        raise NotLowerableError("an operand that is no tensor")
    spec = specs[value.index]
    return _Tensor(value.index, spec.torch_dtype, spec.shape, spec.strides)


def _spread(bias: _Tensor | None, shape: tuple[int, ...]) -> _Tensor | None:
    """The bias as large as all scores; in a dimension of one element every step is none."""
    if bias is None:
        return None
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.strides, strict=True))
    return _Tensor(bias.value, bias.dtype, shape, strides)


def _single(number: float) -> float:
    """The number as eager's kernels get it."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _check(target: str, bound: Mapping[str, Any], tensors: Mapping[str, _Tensor]) -> None:
    query, key, value = (tensors[name].shape for name in ("query", "key", "value"))
    matrices = [one for name, one in tensors.items() if name != "logsumexp"]
    total = tensors["logsumexp"]
    problems = {
        "no dropout": bool(bound.get("dropout_p")),
        "a bias of the efficient operators, whose log-sum-exp of a row without keys is a number": "attn_bias" in tensors
        and "efficient" not in target,
        "a bias for every score, or the same for all of a dimension": "attn_bias" in tensors
        and any(size not in (1, scores) for size, scores in zip(tensors["attn_bias"].shape, (*query[:3], key[2]), strict=False)),
        "no packed sequences": any(bound.get(name) is not None for name in ("cum_seq_q", "cum_seq_k")),
        "tensors of one type, fp32 or a half one": len({one.dtype for one in matrices}) > 1
        or matrices[0].dtype not in (torch.float32, *_HALVES),
        "heads in a dimension of their own, of some elements": any(len(one.shape) != 4 or 0 in one.shape for one in matrices),
        "one log-sum-exp in fp32 a row": total.dtype != torch.float32
        or total.shape[:2] != query[:2]
        or math.prod(total.shape[2:]) < query[2]
        or total.shape[3:] not in ((), (1,)),
        "keys and values of as many heads, which divide the queries'": key[:3] != value[:3] or bool(query[1] % key[1]),
        f"heads of at most {MOST_DEPTH} elements": max(query[3], value[3]) > MOST_DEPTH,
        "a causal mask of as many queries as keys, where operators disagree about others": "efficient" not in target
        and bool(bound.get("is_causal"))
        and query[2] != key[2],
    }
    if wanted := [text for text, broken in problems.items() if broken]:
        raise NotLowerableError(f"kernels for gradients of attention serve {wanted[0]}")
