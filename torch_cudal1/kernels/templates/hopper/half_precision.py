"""Matrix products of fp16 and bf16 on Hopper's tensor cores, with the steps after them in one launch:
`wgmma.cu` specialised for a fusion group.

Operands are read as they lie, along k or across it, 16 bytes at a time. Sums are fp32 in the tensor
core, as the libraries' are; the result is rounded once, after the last step. Where A has few rows
the operands change places, so that a tile's 128 rows are columns of C.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.device.specs import H200, max_shared_bytes
from torch_cudal1.kernels.codegen.epilogue import CudaEpilogue, print_cuda_epilogue
from torch_cudal1.kernels.codegen.wgmma import print_wgmma
from torch_cudal1.kernels.ops.matmul import Operand, Product, put_long_side_left
from torch_cudal1.kernels.proposal import CudaOptions, KernelSource, Proposal
from torch_cudal1.kernels.templates.gemm_tiled import GemmParts
from torch_cudal1.kernels.templates.gemm_tiles import GemmSchedule, read_schedule

__all__ = ["lower_gated", "lower_half_precision", "lower_siblings"]

# One text in four parts.
_FILES = ("packed_machine.cu", "tail_functions.cu", "half_functions.cu", "wgmma.cu")
_ITEM_BYTES = 2
# Rows of an operand along k that a warpgroup copies at once.
_COPIED_ROWS = 16
# Elements of one copy of 16 bytes, and rows of an operand across k that one swizzle covers.
_COPIED, _SWIZZLED = 8, 64
# A block computes tiles until none is left.
_SM_COUNT = H200.sm_count
# Of a tile: registers of two blocks fit into an SM, so that one multiplies while the other writes.
_MAX_SHARED_COLUMNS = 128
# Of an SM's shared memory each block takes so many for itself.
_RESERVED_BYTES = 1024
_SM_SHARED_BYTES = max_shared_bytes(90) + _RESERVED_BYTES
_REACH = 2**31 - 1
# Of the weight, bytes that all blocks fetch while the kernel ahead ends, and lines of 128 bytes of a
# thread. 50 MB, as much as the L2 holds, made 128 x 11008 x 4096 10 % slower than none
# (benchmarks/LOG.md, 2026-12-01).
_EARLY_BYTES, _MAX_EARLY_LINES, _LINE_BYTES = 16_000_000, 8, 128
# What the kernel's text has once for each right operand.
_PART_BEGINS, _PART_ENDS = "// PART BEGINS\n", "// PART ENDS\n"


@dataclass(frozen=True)
class _Part:
    """A right operand, its result, and the steps after it; or two, whose products make one result."""

    product: Product
    epilogue: CudaEpilogue
    second: Product | None = None

    @property
    def products(self) -> tuple[Product, ...]:
        """One, or both."""
        return (self.product,) if self.second is None else (self.product, self.second)


def lower_half_precision(parts: GemmParts, proposal: Proposal) -> KernelSource:
    """The kernel of a proposal for one product. Raises NotLowerableError where the operands do not
    lie as it reads them, or the steps after the product have no C++ form.
    """
    schedule = read_schedule(proposal)
    product, is_swapped = put_long_side_left(parts.product, schedule.rows)
    return _lower([_Part(product, _print_epilogue(parts))], schedule, is_swapped=is_swapped)


def lower_siblings(siblings: Sequence[GemmParts], schedule: GemmSchedule) -> KernelSource:
    """The kernel of several products that share their left operand. Raises as
    `lower_half_precision`, and where they share none.
    """
    first = siblings[0].product
    for parts in siblings:
        product = parts.product
        if (product.left, product.batch, product.m, product.k) != (first.left, 1, first.m, first.k):
            raise NotLowerableError("products of different left operands, or batches")
        if (product.right.depth == 1) != (first.right.depth == 1):
            raise NotLowerableError("right operands of which some lie along k and some across it")
    parts_of_kernel = [_Part(parts.product, _print_epilogue(parts)) for parts in siblings]
    return _lower(parts_of_kernel, schedule, is_swapped=False)


def lower_gated(
    parts: GemmParts, second: Product, second_value: int, schedule: GemmSchedule
) -> KernelSource:
    """The kernel of two products of one left operand that make one result; `second_value` stands for
    the second one's result in the steps after them. Raises as `lower_siblings`.
    """
    first = parts.product
    if replace(second, right=first.right) != first or first.batch != 1:
        raise NotLowerableError("products of different left operands or shapes, or batches")
    if schedule.columns % (2 * _COPIED_ROWS):
        raise NotLowerableError(f"half of {schedule.columns} columns of a tile for each product")
    epilogue = _print_epilogue(parts, second_value)
    return _lower([_Part(first, epilogue, second)], schedule, is_swapped=False)


def _print_epilogue(parts: GemmParts, second: int | None = None) -> CudaEpilogue:
    if parts.weight is not None:
        raise NotLowerableError(
            "a weight that is made in the fusion group; wgmma reads operands from memory"
        )
    dtype = parts.product.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise NotLowerableError(f"a wgmma product of {dtype}")
    return print_cuda_epilogue(parts.epilogue, dtype, second)


def _lower(parts: Sequence[_Part], schedule: GemmSchedule, *, is_swapped: bool) -> KernelSource:
    sizes = _define_sizes(parts, schedule) | {"SWAPPED": int(is_swapped)}
    sides = len(parts[0].products)
    rights = [
        _describe_operand(product.right, product.n, product.k, schedule.columns // sides)
        for part in parts
        for product in part.products
    ]
    if len({right.along_k for right in rights}) > 1:
        raise NotLowerableError("right operands of which some lie along k and some across it")
    sizes["B_ALONG_K"] = rights[0].along_k
    text, name = _print_text(parts, rights, schedule, sizes)
    reads = dict.fromkeys(value for part in parts for value in part.epilogue.reads)
    arguments = (
        parts[0].product.left.value,
        *(product.right.value for part in parts for product in part.products),
        *(part.epilogue.written for part in parts),
        *reads,
    )
    cuda = CudaOptions(tuple(sorted(sizes.items())), _count_shared_bytes(schedule))
    # Those that copy, and a warpgroup for each 64 rows that multiplies.
    threads = sizes["COPIERS"] + 2 * schedule.rows
    return KernelSource(
        name,
        text,
        tuple((value, "*") for value in arguments),
        sizes["BLOCKS"],
        threads // 32,
        cuda=cuda,
    )


def _define_sizes(parts: Sequence[_Part], schedule: GemmSchedule) -> dict[str, int]:
    product = parts[0].product
    high = math.ceil(product.m / schedule.rows)
    sides = len(parts[0].products)
    wide = sum(math.ceil(part.product.n * sides / schedule.columns) for part in parts)
    tiles = product.batch * high * wide
    fits = 2 * (_count_shared_bytes(schedule) + _RESERVED_BYTES) <= _SM_SHARED_BYTES
    per_sm = 2 if fits and schedule.columns <= _MAX_SHARED_COLUMNS else 1
    if max(product.m, *(part.product.n for part in parts)) * product.k > _REACH:
        raise NotLowerableError("a matrix of more than 2^31 elements")
    lhs = _describe_operand(product.left, product.m, product.k, schedule.rows)
    # A warpgroup copies; where two blocks of 128 rows share an SM only a warp of each, so that
    # registers are left for the sums.
    copiers = 32 if per_sm == 2 and schedule.rows == 128 else 128
    blocks = min(tiles, per_sm * _SM_COUNT)
    early_lines = _EARLY_BYTES // (_LINE_BYTES * blocks * (copiers + 2 * schedule.rows))
    return {
        "HALF": int(product.dtype == torch.float16),
        "PLANES": 1,
        "CLUSTER": 1,
        "STREAM": 0,
        "BM": schedule.rows,
        "BN": schedule.columns,
        "ACC": schedule.columns // 2,
        "STAGES": schedule.stages,
        "GROUP": schedule.group,
        "SIDES": sides,
        "M": product.m,
        "K": product.k,
        "HIGH": high,
        "WIDE": wide,
        "TILES": tiles,
        "PER_SM": per_sm,
        "COPIERS": copiers,
        "BLOCKS": blocks,
        # What a batch multiplies is made by the kernel ahead as a rule.
        "EARLY_LINES": min(_MAX_EARLY_LINES, early_lines) if product.batch == 1 else 0,
        "A_ROW": lhs.row,
        "A_DEPTH": lhs.depth,
        "A_BATCH": lhs.batch,
        "A_OFFSET": lhs.offset,
        "A_ALONG_K": lhs.along_k,
    }


def _count_shared_bytes(schedule: GemmSchedule) -> int:
    # 1024 bytes to align the ring, since the swizzle is of address bits; 16 bytes a stage for its
    # two barriers.
    stage_bytes = _ITEM_BYTES * schedule.depth * (schedule.rows + schedule.columns) + 16
    return 1024 + schedule.stages * stage_bytes


@dataclass(frozen=True)
class _Strides:
    """How an operand lies, in elements. `along_k`: 1 where a copy is along k, 0 where across it."""

    row: int
    depth: int
    batch: int
    offset: int
    along_k: int


def _describe_operand(operand: Operand, rows: int, depth: int, tile: int) -> _Strides:
    """An operand of `rows` x `depth`, of which a tile has `tile` rows. Raises NotLowerableError
    where it cannot be read 16 bytes at a time.
    """
    along_k = operand.depth == 1
    # From one row to the next is any number where there is only one.
    operand = replace(operand, row=0) if along_k and rows == 1 else operand
    # Copies are along one dimension, and step by whole copies along the others.
    contiguous, step, length = (
        (operand.depth, operand.row, depth) if along_k else (operand.row, operand.depth, rows)
    )
    steps = (step, operand.batch, operand.offset, length)
    if (
        operand.digits
        or contiguous != 1
        or any(each % _COPIED for each in steps)
        or (not along_k and tile % _SWIZZLED)
    ):
        raise NotLowerableError("an operand that cannot be copied 16 bytes at a time")
    return _Strides(operand.row, operand.depth, operand.batch, operand.offset, int(along_k))


def _print_text(
    parts: Sequence[_Part],
    rights: Sequence[_Strides],
    schedule: GemmSchedule,
    sizes: dict[str, int],
) -> tuple[str, str]:
    """The C++ text, and the name of its kernel."""
    text = "".join(
        (files("torch_cudal1.kernels.templates.hopper") / name).read_text() for name in _FILES
    )
    # The comment at the head of the file names the words that are replaced: it must keep them.
    head, start, body = text.partition("typedef unsigned int u32")
    common, _, rest = body.partition(_PART_BEGINS)
    part_text, _, kernel = rest.partition(_PART_ENDS)
    product = parts[0].product
    across = (not sizes["A_ALONG_K"], not sizes["B_ALONG_K"])
    part_texts = [_print_part(part_text, i, part) for i, part in enumerate(parts)]
    body = "".join([common, *part_texts, kernel])
    for word, meant in {
        "WGMMA_DEFINITION": print_wgmma(sizes["BN"], product.dtype, across),
        **_print_words(parts, rights, schedule),
    }.items():
        body = body.replace(word, meant)
    # everything that changes the code is in the name, which thus stands for one machine code
    digest = hashlib.sha256((body + repr(sorted(sizes.items()))).encode()).hexdigest()[:16]
    return head + start + body.replace(" MULTIPLY(", f" wgmma_{digest}("), f"wgmma_{digest}"


def _print_part(text: str, number: int, part: _Part) -> str:
    """The text of a part, with its constants."""
    epilogue = part.epilogue
    constants = {
        "PART": f"part{number}",
        "N": part.product.n,
        "RUN": epilogue.run,
        "ROUNDED": int(epilogue.dtype != torch.float32),
    }
    words = {
        "TAIL_DEFINITION": epilogue.text,
        "TAIL_PARAMETERS": epilogue.parameters,
        "TAIL_ARGUMENTS": epilogue.arguments,
        "INDEX": "i64" if "i64 row" in epilogue.text else "int",
    }
    for word, meant in words.items():
        text = text.replace(word, meant)
    return "".join(
        [
            *(f"#define {name} {value}\n" for name, value in constants.items()),
            text,
            *(f"#undef {name}\n" for name in constants),
        ]
    )


def _print_fetches(
    parts: Sequence[_Part], rights: Sequence[_Strides], schedule: GemmSchedule
) -> dict[str, str]:
    """What stands for the words that read right operands."""
    fetches, early_fetches = [], []
    of_parts = [
        (i, side, part) for i, part in enumerate(parts) for side in range(len(part.products))
    ]
    for number, ((i, side, part), right) in enumerate(zip(of_parts, rights, strict=True)):
        strides = f"TN, {part.product.n}, {right.row}, {right.depth}, {bool(right.along_k):d}"
        start = f"b{number} + {right.offset} + tile.batch * (i64){right.batch}, tile.column"
        # Rows of 128 bytes along k, or 8192 bytes for 64 columns across it.
        columns = schedule.columns // len(part.products) * side
        place = f"to + {columns} * 128" if columns else "to"
        fetches.append(f"  if (tile.part == {i}) fetch<{strides}>({place}, {start}, k, thread);")
        early_fetches.append(
            f"  fetch_weight<{strides}, HIGH>({start}, tile.row / BM, tile.part == {i});"
        )
    return {"FETCH_RIGHT": "\n".join(fetches), "FETCH_WEIGHTS": "\n".join(early_fetches)}


def _print_words(
    parts: Sequence[_Part], rights: Sequence[_Strides], schedule: GemmSchedule
) -> dict[str, str]:
    """What stands for the words that all parts share."""
    first_tiles = [0]
    for part in parts:
        columns = schedule.columns // len(part.products)
        first_tiles.append(first_tiles[-1] + math.ceil(part.product.n / columns))
    numbers = range(len(parts))
    # Of each tile and part in turn; the last part is what is left.
    choose_part = "".join(f"tile < {first_tiles[i + 1]} ? {i} : " for i in numbers[:-1])
    choose_first = "".join(f"part == {i} ? {first_tiles[i]} : " for i in numbers[:-1])
    stores = [
        f"      if (tile.part == {i}) part{i}::store(sum, c{i}, tile, first, quad{part.epilogue.arguments});"
        for i, part in enumerate(parts)
    ]
    prefetches = [
        f"      if (tile.part == {i}) part{i}::look_ahead(tile, first, quad{part.epilogue.arguments});"
        for i, part in enumerate(parts)
    ]
    # An operand that the steps of several parts read is one parameter.
    parameters = dict.fromkeys(
        parameter
        for part in parts
        for parameter in part.epilogue.parameters.split(", ")
        if parameter
    )
    results = (
        f", {'float' if part.epilogue.dtype == torch.float32 else 'u16'}* c{i}"
        for i, part in enumerate(parts)
    )
    return {
        "PART_FUNCTIONS": (
            f"__device__ __forceinline__ int part_of(int tile) {{ return {choose_part}{numbers[-1]}; }}\n"
            f"__device__ __forceinline__ int first_tile_of(int part) {{ return {choose_first}{first_tiles[-2]}; }}"
        ),
        **_print_fetches(parts, rights, schedule),
        "STORE_PARTS": "\n".join(stores),
        "LOOK_AHEAD": "\n".join(prefetches),
        "RIGHT_PARAMETERS": "".join(f", const u16* b{i}" for i in range(len(rights))),
        "RIGHT_ARGUMENTS": "".join(f", b{i}" for i in range(len(rights))),
        "RESULT_PARAMETERS": "".join(results),
        "ALL_PARAMETERS": "".join(f", {parameter}" for parameter in parameters),
    }
