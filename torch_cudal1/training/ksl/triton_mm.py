"""Renders Triton kernels of matrix products: tiles in grouped order with the epilogue in registers,
or sums over K that are split between programs.

The conventions are those of `triton_flat`; `acc=f16` accumulates in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch_cudal1.training.ksl.grammar import KslProgram
from torch_cudal1.training.ksl.module_template import ShapeCase
from torch_cudal1.training.ksl.triton_flat import HEAD, render_block_count, render_launch

__all__ = ["RENDERERS"]

# Tiles are taken in groups of GROUP rows: programs that run at the same time share columns of `w`
# in the L2 cache. `input_precision="ieee"` keeps TF32 out of float32 products, as eager does by
# default.
_TILES = """

@triton.jit
def product({pointers}, out_ptr, M, N, K, tiles_m, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    tile = tl.program_id(0)
    wide = GROUP * tiles_n
    first = tile // wide * GROUP
    high = min(tiles_m - first, GROUP)
    r = (first + tile % wide % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = (tile % wide // high) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    v = tl.zeros((BLOCK_M, BLOCK_N), {acc})
    for start in range(0, {end}, BLOCK_K):
        a = tl.load(x_ptr + r[:, None] * K + (start + k)[None, :]{mask_a})
        b_tile = tl.load(w_ptr + (start + k)[:, None] * N + c[None, :]{mask_b})
        v = tl.dot(a, b_tile, v, input_precision="ieee", out_dtype={acc})
    v = v.to(tl.float32)
{bias}{epilogue}    tl.store(out_ptr + r[:, None] * N + c[None, :], v{mask_out})
"""
# Each share of K writes its own partial sums. Atomic additions would need no buffer, but their
# order differs from run to run, and so do the last bits.
_SPLIT = """

@triton.jit
def product(x_ptr, w_ptr, part_ptr, M, N, K, tiles_n, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr):
    tile = tl.program_id(0)
    share = tl.program_id(1)
    r = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    v = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(share * BLOCK_K, {end}, SPLIT * BLOCK_K):
        a = tl.load(x_ptr + r[:, None] * K + (start + k)[None, :]{mask_a})
        b_tile = tl.load(w_ptr + (start + k)[:, None] * N + c[None, :]{mask_b})
        v = tl.dot(a, b_tile, v, input_precision="ieee")
    tl.store(part_ptr + share * M * N + r[:, None] * N + c[None, :], v{mask_out})
"""


def _render_masks(program: KslProgram) -> dict[str, str]:
    # K is cut to whole blocks and partial tiles are not launched: wrong on ragged shapes, but no
    # access outside the tensors.
    if program["mask"] == "off":
        return {"end": "K // BLOCK_K * BLOCK_K", "mask_a": "", "mask_b": "", "mask_out": ""}
    return {
        "end": "K",
        "mask_a": ", mask=(r[:, None] < M) & ((start + k)[None, :] < K), other=0.0",
        "mask_b": ", mask=((start + k)[:, None] < K) & (c[None, :] < N), other=0.0",
        "mask_out": ", mask=(r[:, None] < M) & (c[None, :] < N)",
    }


def _render_tiles(case: ShapeCase, program: KslProgram) -> tuple[str, str]:
    bias = "b" in case.op.names
    # Loaded after the loop over K, so that it occupies no registers there.
    load = f"    b = tl.load(b_ptr + c{', mask=c < N' if program['mask'] == 'on' else ''}).to(tl.float32)[None, :]\n"
    epilogue = case.op.pieces["triton"]
    kernel = _TILES.format(
        pointers=", ".join(f"{name}_ptr" for name in case.op.names),
        # A half-precision accumulator passes a tolerance of 1e-2 and fails the judge.
        acc="tl.float16" if program["acc"] == "f16" else "tl.float32",
        bias=load if bias else "",
        # In registers: the product makes no further trip through memory.
        epilogue=f"    v = {epilogue}\n" if epilogue else "",
        **_render_masks(program),
    )
    block_m, block_n = program.number("block_m"), program.number("block_n")
    m, n, k = (case.sizes[name] for name in "MNK")
    call = render_launch(
        "product",
        "(tiles_m * tiles_n, 1, 1)",
        [*case.op.names, "out"],
        f"{m}, {n}, {k}, tiles_m, tiles_n",
        {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": program["block_k"],
            "GROUP": program["group_m"],
        },
        num_warps=program["warps"],
        num_stages=program["stages"],
    )
    body = (
        f"out = torch.empty(({m}, {n}), dtype=x.dtype, device=x.device)\n"
        f"tiles_m, tiles_n = {render_block_count(program, str(m), block_m)}, {render_block_count(program, str(n), block_n)}\n{call}\nreturn out"
    )
    return HEAD + kernel, body


def _render_split(case: ShapeCase, program: KslProgram) -> tuple[str, str]:
    """Render partial sums in memory, which are added in a fixed order so that results are the same
    bits in every run.
    """
    block_m, block_n, split = (
        program.number("block_m"),
        program.number("block_n"),
        program.number("split_k"),
    )
    m, n, k = (case.sizes[name] for name in "MNK")
    # By PyTorch, as the sum over shares is: it needs all of them.
    epilogue = case.op.pieces["torch"]
    call = render_launch(
        "product",
        f"({render_block_count(program, str(m), block_m)} * tiles_n, {split}, 1)",
        ["x", "w", "part"],
        f"{m}, {n}, {k}, tiles_n",
        {"SPLIT": split, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": program["block_k"]},
        num_warps=program["warps"],
    )
    body = (
        # float32, whatever the inputs: partial sums in half precision would be rounded `split`
        # times.
        f"part = torch.empty(({split}, {m}, {n}), dtype=torch.float32, device=x.device)\n"
        f"tiles_n = {render_block_count(program, str(n), block_n)}\n{call}\n"
        f"v = part.sum(0)\n{f'v = {epilogue}' if epilogue else ''}\nreturn v.to(x.dtype)"
    )
    return HEAD + _SPLIT.format(**_render_masks(program)), body


RENDERERS: Mapping[str, Callable[[ShapeCase, KslProgram], tuple[str, str]]] = {
    "mm.tiles": _render_tiles,
    "mm.split": _render_split,
}
