"""Prints the C++ functions that stand for one wgmma instruction of 64 x N x 16, whose accumulators
must be named one by one (PTX ISA, "wgmma.mma_async").
"""

from __future__ import annotations

import torch

__all__ = ["print_wgmma", "print_wgmma_register_operand"]

_PTX_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}


def print_wgmma(
    columns: int, dtype: torch.dtype, across: tuple[bool, bool] = (False, False)
) -> str:
    """`WGMMA(d, a, b, add)`: d (+)= a b, of operands in shared memory.

    `across`: for a and b, whether they lie across k rather than along it.
    """
    count = columns // 2
    kind = _PTX_TYPES[dtype]
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    flags = ", ".join(str(int(flag)) for flag in across)
    return f"""__device__ __forceinline__ void WGMMA(float (&d)[{count}], u64 a, u64 b, int add) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{registers}}}, %{count}, %{count + 1}, p, 1, 1, {flags};\\n}}"
      : {outputs}
      : "l"(a), "l"(b), "r"(add));
}}"""


def print_wgmma_register_operand(columns: int, dtype: torch.dtype) -> str:
    """`WGMMA_HELD(d, a, b, add)`: the same with its first operand in registers."""
    count = columns // 2
    kind = _PTX_TYPES[dtype]
    registers = ", ".join(f"%{i}" for i in range(count))
    lhs_registers = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""__device__ __forceinline__ void WGMMA_HELD(float (&d)[{count}], const u32 (&a)[4], u64 b, int add) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{registers}}}, {{{lhs_registers}}}, %{count + 4}, p, 1, 1, 0;\\n}}"
      : {outputs}
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}}"""
