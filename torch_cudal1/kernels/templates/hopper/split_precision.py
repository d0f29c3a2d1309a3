"""Matrix products of fp32 on Hopper's tensor cores, at fp32 accuracy: `packed_*.cu` specialised for
a fusion group.

Three launches. The first reads both operands and notes the size of each row; the second reads them
again, cuts them into 16-bit pieces and lays these out as the tensor cores read them (4, 6 or 2
bytes an element); the third multiplies. What a method's result holds, with u = 2^-24:

    packed-bf16x6   three bf16 pieces hold all 24 bits and fp32's range: the error is about that of an fp32 sum
    packed-f16x3    two fp16 pieces hold 22 bits of a row scaled by a power of two, so that a product's error is at most 3 u |a||b|;
                    numbers below 2^-17 of their row's largest lose bits: 2^-39 (max|a_i| |b_j| + |a_i| max|b_j|) more. Where that
                    could matter for a third of a row or half of a column within a tile, the tile is computed again in plain fp32
    packed-stream   as packed-f16x3, but the operand with more rows is read as it lies and cut on its way to the tensor core, scaled
                    by rows of 64 of k: a large weight costs one pass over memory
    packed-f16x1    one fp16 piece, 11 bits as TF32 has: only where the user allows TF32

A tile with NaN, infinity, numbers above 3.3e38 or rows whose largest is tiny is computed again in
plain fp32 as well, by a slow loop: right before fast. Partial sums leave the tensor core every 64 *
promote of k, because its accumulator truncates.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from importlib.resources import files

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.codegen.epilogue import CudaEpilogue, print_cuda_epilogue
from torch_cudal1.kernels.codegen.wgmma import print_wgmma, print_wgmma_register_operand
from torch_cudal1.kernels.ops.matmul import Operand, Product, put_streamed_left
from torch_cudal1.kernels.proposal import CudaOptions, KernelSource, Proposal
from torch_cudal1.kernels.templates.gemm_tiled import GemmParts
from torch_cudal1.kernels.templates.gemm_tiles import GemmSchedule, read_schedule

__all__ = ["lower_split_precision"]

# HALF, PLANES, PRODUCTS of packed_machine.cu.
_TWO = (1, 2, 3)
_PIECES_OF_METHOD = {
    "packed-f16x3": _TWO,
    "packed-stream": _TWO,
    "packed-bf16x6": (0, 3, 6),
    "packed-f16x1": (1, 1, 1),
}
# One text in four parts, and a fifth for streamed products.
_FILES = ("packed_machine.cu", "packed_pack.cu", "tail_functions.cu", "packed_multiply.cu")
_STREAM = "packed_stream.cu"
# Bytes of a row of the streamed operand in the ring: eight lanes that read 16 bytes each meet all
# banks (packed_stream.cu).
_STREAM_PITCH_BYTES = 320
_DEPTH, _ROWS = 64, 128
_REACH = 2**31 - 1
# multiply: two warpgroups that multiply, and one that only copies.
_THREADS = {"measure": 256, "pack": 256, "multiply": 384}


def lower_split_precision(
    parts: GemmParts, proposal: Proposal, first: int
) -> tuple[tuple[KernelSource, ...], dict[int, TensorSpec]]:
    """The three kernels, and their scratch values numbered from `first`. Raises NotLowerableError
    when the epilogue has no C++ form.
    """
    if parts.weight is not None:
        raise NotLowerableError(
            "a weight that is made in the fusion group; packing reads operands from memory"
        )
    schedule, product, epilogue = (
        read_schedule(proposal),
        parts.product,
        print_cuda_epilogue(parts.epilogue),
    )
    swapped = False
    if stream := schedule.method == "packed-stream":
        product, swapped = put_streamed_left(product)
    if product.dtype is not torch.float32 or schedule.method not in _PIECES_OF_METHOD:
        raise NotLowerableError(f"method {schedule.method} for a product of {product.dtype}")
    _, planes, _ = _PIECES_OF_METHOD[schedule.method]
    sizes = _define_sizes(product, schedule) | {"STREAM": int(stream), "SWAPPED": int(swapped)}
    if (
        max(product.m * product.k, product.n * product.k, sizes["M_PAD"] * sizes["CHUNKS"] * 64)
        > _REACH
    ):
        raise NotLowerableError("a matrix of more than 2^31 elements")
    scratch: dict[int, TensorSpec] = {}
    sides = ((sizes["A_BATCHES"], sizes["M_PAD"]), (sizes["B_BATCHES"], sizes["N_PAD"]))
    # Of a streamed product the left operand is read as it lies: it has no scratch of its own.
    for i, (batch, rows) in list(enumerate(sides))[int(stream) :]:
        scratch[first + i] = _make_dense_spec("float32", (batch, sizes["SEGMENTS"], rows, 4))
        scratch[first + 2 + i] = _make_dense_spec(
            "int16", (batch, planes, sizes["CHUNKS"], rows, _DEPTH)
        )
        scratch[first + 4 + i] = _make_dense_spec("int32", (batch, rows, 2))
    operands = (product.left.value, product.right.value)
    row_sizes, piece_values = (first, first + 1), (first + 2, first + 3, first + 4, first + 5)
    text, name = _print_text(schedule, epilogue, sizes)
    defines = tuple(sorted((sizes | {"PAIRS": int(epilogue.pairs)}).items()))
    if stream:
        a, b = operands
        values = {
            "measure": (b, row_sizes[1]),
            "pack": (b, row_sizes[1], piece_values[1], piece_values[3]),
            "multiply": (a, b, piece_values[1], piece_values[3], epilogue.written, *epilogue.reads),
        }
        return _make_kernels(text, name, defines, values), scratch
    values = {
        "measure": (*operands, *row_sizes),
        "pack": (*operands, *row_sizes, *piece_values),
        "multiply": (*operands, *piece_values, epilogue.written, *epilogue.reads),
    }
    return _make_kernels(text, name, defines, values), scratch


def _make_kernels(
    text: str,
    name: str,
    defines: tuple[tuple[str, int], ...],
    values: Mapping[str, tuple[int, ...]],
) -> tuple[KernelSource, ...]:
    sizes = dict(defines)
    left_bytes = sizes["BM"] * (
        _STREAM_PITCH_BYTES if sizes["STREAM"] else sizes["PLANES"] * 2 * _DEPTH
    )
    # 1024 bytes to align the ring, since the swizzle is of address bits; 16 bytes a stage for its
    # two barriers.
    ring = 1024 + sizes["STAGES"] * (left_bytes + sizes["PLANES"] * sizes["BN"] * 2 * _DEPTH + 16)
    shared = {
        "measure": 8 * 128 * 16,
        "pack": sizes["PLANES"] * 128 * _DEPTH * 2 + 512,
        "multiply": ring,
    }
    clusters = {"measure": 1, "pack": 1, "multiply": sizes["CLUSTER"]}
    kernels = []
    for kind, grid in _count_blocks(sizes).items():
        arguments = tuple((value, "*") for value in values[kind])
        cuda = CudaOptions(defines, shared[kind], clusters[kind])
        kernels.append(
            KernelSource(f"{kind}_{name}", text, arguments, grid, _THREADS[kind] // 32, cuda=cuda)
        )
    return tuple(kernels)


def _define_sizes(product: Product, schedule: GemmSchedule) -> dict[str, int]:
    half, planes, products = _PIECES_OF_METHOD[schedule.method]
    # At least so many blocks measure a segment.
    blocks = product.batch * math.ceil(min(product.m, product.n) / 128)
    # Each block that packs reads what all segments noted: more segments measure faster and pack
    # slower.
    segments = min(max(8, 264 // blocks), 32, math.ceil(product.k / _DEPTH / 4))
    # A cluster has neighbouring rows of tiles, all of which must exist: M is padded to whole
    # clusters.
    height = _ROWS * schedule.cluster
    together = max(1, schedule.promote)
    # Partial sums leave the tensor core after `together` chunks: the last group must be whole.
    chunks = math.ceil(product.k / _DEPTH / together) * together
    return {
        "HALF": half,
        "PLANES": planes,
        "PRODUCTS": products,
        "BM": _ROWS,
        "BN": schedule.columns,
        "ACC": schedule.columns // 2,
        "STAGES": schedule.stages,
        "PROMOTE": schedule.promote,
        "GROUP": schedule.group,
        "BATCH": product.batch,
        "M": product.m,
        "N": product.n,
        "K": product.k,
        "M_PAD": math.ceil(product.m / height) * height,
        "CLUSTER": schedule.cluster,
        "N_PAD": math.ceil(product.n / schedule.columns) * schedule.columns,
        "CHUNKS": chunks,
        "SEGMENTS": segments,
        "SEGMENT": math.ceil(chunks / segments),
        "PACK_CHUNKS": 4,
        **_define_operand("A", product.left, product.batch),
        **_define_operand("B", product.right, product.batch),
    }


def _define_operand(name: str, operand: Operand, batch: int) -> dict[str, int]:
    # The kernels step from one matrix to the next by a single stride.
    if operand.digits:
        raise NotLowerableError("a batch whose matrices lie at no single stride")
    # An operand that all matrices of the batch share is packed once.
    shared = operand.batch == 0
    return {
        f"{name}_ROW": operand.row,
        f"{name}_K": operand.depth,
        f"{name}_BATCH": operand.batch,
        f"{name}_OFFSET": operand.offset,
        f"{name}_BATCHES": 1 if shared else batch,
    }


def _count_blocks(sizes: Mapping[str, int]) -> dict[str, int]:
    """Blocks of each kernel, in launch order."""
    packed = (("B", "N"),) if sizes["STREAM"] else (("A", "M"), ("B", "N"))
    rows = sum(
        sizes[f"{side}_BATCHES"] * math.ceil(sizes[f"{pad}_PAD"] / 128) for side, pad in packed
    )
    return {
        "measure": rows * sizes["SEGMENTS"],
        "pack": rows * math.ceil(sizes["CHUNKS"] / sizes["PACK_CHUNKS"]),
        "multiply": sizes["BATCH"] * (sizes["M_PAD"] // _ROWS) * (sizes["N_PAD"] // sizes["BN"]),
    }


def _print_text(
    schedule: GemmSchedule, epilogue: CudaEpilogue, sizes: Mapping[str, int]
) -> tuple[str, str]:
    """The C++ text, and the name its kernels share."""
    parts = (*_FILES, _STREAM) if sizes["STREAM"] else _FILES
    text = "".join(
        (files("torch_cudal1.kernels.templates.hopper") / name).read_text() for name in parts
    )
    # everything that changes the code is in the name, which thus stands for one machine code
    digest = hashlib.sha256(
        (text + epilogue.text + repr(sorted(sizes.items()))).encode()
    ).hexdigest()[:16]
    name = f"{schedule.method.removeprefix('packed-')}_{digest}"
    print_definition = print_wgmma_register_operand if sizes["STREAM"] else print_wgmma
    words = {
        "WGMMA_DEFINITION": print_definition(
            schedule.columns, torch.float16 if sizes["HALF"] else torch.bfloat16
        ),
        "TAIL_DEFINITION": epilogue.text,
        "TAIL_PARAMETERS": epilogue.parameters,
        "TAIL_ARGUMENTS": epilogue.arguments,
        "INDEX": "i64" if "i64 row" in epilogue.text else "int",
        "    MEASURE(": f"    measure_{name}(",
        "    PACK(": f"    pack_{name}(",
        "    MULTIPLY(": f"    multiply_{name}(",
    }
    # The comment at the head of the file names the words that are replaced: it must keep them.
    head, _, body = text.partition("typedef unsigned int u32")
    body = "typedef unsigned int u32" + body
    for word, meant in words.items():
        body = body.replace(word, meant)
    return head + body, name


def _make_dense_spec(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorSpec(dtype, shape, strides, "cuda")
