"""Matrix products of fp16 and bf16 on Hopper's tensor cores, with the steps after them in one launch:
`wgmma.cu` specialised for a fusion group.

Operands are read as they lie, along k or across it, 16 bytes at a time. Sums are fp32 in the tensor
core, as the libraries' are; the result is rounded once, after the last step. Where A has few rows
the operands change places, so that a tile's 128 rows are columns of C.
"""

from __future__ import annotations

import hashlib
import math
from importlib.resources import files

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.device.specs import H200
from torch_cudal1.kernels.codegen.epilogue import CudaEpilogue, print_cuda_epilogue
from torch_cudal1.kernels.codegen.wgmma import print_wgmma
from torch_cudal1.kernels.ops.matmul import Operand, Product, put_long_side_left
from torch_cudal1.kernels.proposal import CudaOptions, KernelSource, Proposal
from torch_cudal1.kernels.templates.gemm_tiled import GemmParts
from torch_cudal1.kernels.templates.gemm_tiles import GemmSchedule, read_schedule

__all__ = ["lower_half_precision"]

# One text in three parts.
_FILES = ("packed_machine.cu", "tail_functions.cu", "wgmma.cu")
_ITEM_BYTES = 2
# Elements of one copy of 16 bytes, and rows of an operand across k that one swizzle covers.
_COPIED, _SWIZZLED = 8, 64
_MAX_LAG = 3  # stages whose copies are on their way
# Stages that consumers hold: of the one before they may still read while the next is multiplied.
_HELD = 2
# A block computes tiles until none is left.
_SM_COUNT = H200.sm_count
# Of a tile of 64 rows: registers and shared memory of two blocks fit into an SM.
_MAX_SHARED_COLUMNS = 128
_REACH = 2**31 - 1


def lower_half_precision(parts: GemmParts, proposal: Proposal) -> KernelSource:
    """The kernel of a proposal. Raises NotLowerableError where the operands do not lie as it reads
    them, or the steps after the product have no C++ form.
    """
    schedule, product = read_schedule(proposal), parts.product
    if parts.weight is not None:
        raise NotLowerableError(
            "a weight that is made in the fusion group; wgmma reads operands from memory"
        )
    if product.dtype not in (torch.float16, torch.bfloat16):
        raise NotLowerableError(f"a wgmma product of {product.dtype}")
    epilogue = print_cuda_epilogue(parts.epilogue, product.dtype)
    product, swapped = put_long_side_left(product, schedule.rows)
    sizes = _define_sizes(product, schedule) | {
        "SWAPPED": int(swapped),
        "RUN": epilogue.run,
        "ROUNDED": int(epilogue.dtype != torch.float32),
    }
    text, name = _print_text(product, epilogue, sizes)
    arguments = (product.left.value, product.right.value, epilogue.written, *epilogue.reads)
    # 1024 bytes to align the ring, since the swizzle is of address bits; 16 bytes a stage for its
    # two barriers.
    stage_bytes = _ITEM_BYTES * schedule.depth * (schedule.rows + schedule.columns) + 16
    cuda = CudaOptions(tuple(sorted(sizes.items())), 1024 + schedule.stages * stage_bytes)
    # A warpgroup that copies, and one for each 64 rows that multiplies.
    threads = 128 + 2 * schedule.rows
    return KernelSource(
        f"wgmma_{name}",
        text,
        tuple((value, "*") for value in arguments),
        sizes["BLOCKS"],
        threads // 32,
        cuda=cuda,
    )


def _define_sizes(product: Product, schedule: GemmSchedule) -> dict[str, int]:
    high, wide = math.ceil(product.m / schedule.rows), math.ceil(product.n / schedule.columns)
    tiles = product.batch * high * wide
    per_sm = 2 if schedule.rows == 64 and schedule.columns <= _MAX_SHARED_COLUMNS else 1
    if max(product.m, product.n) * product.k > _REACH:
        raise NotLowerableError("a matrix of more than 2^31 elements")
    return {
        "HALF": int(product.dtype == torch.float16),
        "PLANES": 1,
        "CLUSTER": 1,
        "STREAM": 0,
        "BM": schedule.rows,
        "BN": schedule.columns,
        "ACC": schedule.columns // 2,
        "STAGES": schedule.stages,
        "LAG": min(_MAX_LAG, schedule.stages - _HELD),
        "GROUP": schedule.group,
        "M": product.m,
        "N": product.n,
        "K": product.k,
        "HIGH": high,
        "WIDE": wide,
        "TILES": tiles,
        "PER_SM": per_sm,
        "BLOCKS": min(tiles, per_sm * _SM_COUNT),
        **_define_operand("A", product.left, product.m, product, schedule.rows),
        **_define_operand("B", product.right, product.n, product, schedule.columns),
    }


def _define_operand(
    name: str, operand: Operand, rows: int, product: Product, tile: int
) -> dict[str, int]:
    """Raises NotLowerableError where it cannot be read 16 bytes at a time."""
    along_k = operand.depth == 1
    # Copies are along one dimension, and step by whole copies along the others.
    contiguous, step, length = (
        (operand.depth, operand.row, product.k) if along_k else (operand.row, operand.depth, rows)
    )
    steps = (step, operand.batch, operand.offset, length)
    if (
        operand.digits
        or contiguous != 1
        or any(each % _COPIED for each in steps)
        or (not along_k and tile % _SWIZZLED)
    ):
        raise NotLowerableError("an operand that cannot be copied 16 bytes at a time")
    return {
        f"{name}_ROW": operand.row,
        f"{name}_DEPTH": operand.depth,
        f"{name}_BATCH": operand.batch,
        f"{name}_OFFSET": operand.offset,
        f"{name}_ALONG_K": int(along_k),
    }


def _print_text(product: Product, epilogue: CudaEpilogue, sizes: dict[str, int]) -> tuple[str, str]:
    """The C++ text, and the name of its kernel."""
    text = "".join(
        (files("torch_cudal1.kernels.templates.hopper") / name).read_text() for name in _FILES
    )
    # everything that changes the code is in the name, which thus stands for one machine code
    digest = hashlib.sha256(
        (text + epilogue.text + repr(sorted(sizes.items()))).encode()
    ).hexdigest()[:16]
    across = (not sizes["A_ALONG_K"], not sizes["B_ALONG_K"])
    words = {
        "WGMMA_DEFINITION": print_wgmma(sizes["BN"], product.dtype, across),
        "TAIL_DEFINITION": epilogue.text,
        "TAIL_PARAMETERS": epilogue.parameters,
        "TAIL_ARGUMENTS": epilogue.arguments,
        "INDEX": "i64" if "i64 row" in epilogue.text else "int",
        " MULTIPLY(": f" wgmma_{digest}(",
    }
    # The comment at the head of the file names the words that are replaced: it must keep them.
    head, start, body = text.partition("typedef unsigned int u32")
    for word, meant in words.items():
        body = body.replace(word, meant)
    return head + start + body, digest
