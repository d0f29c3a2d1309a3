"""Threads of different warps write the same element of shared memory and read it, without a barrier, all with one value.

Seen as barriers left out because the values came out right. They do so here whatever comes first, so nothing but `sanitizer` shows
it: its racecheck looks at accesses, not at values. It takes NVIDIA's tool, and so many instructions that only `strict` asks it.
Races in global memory evade it.
"""

from __future__ import annotations

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, assemble, candidate, on_cuda, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    49,
    "race_or_uninitialised",
    "memory",
    expected="sanitizer",
    status="open",
    form="program",
    variant="barrier",
    first_profile="strict",
    alone=True,
    needs=("gpu", "compiler"),
    seen=("L1",),
)

# The product of this thread and that of the one 64 further; the latter is what this thread stores in the end.
_HANDED_OVER = """
    xor.b64 %d5, %d1, 256;
    shl.b32 %r4, %r3, 2;
    and.b32 %r4, %r4, 511;
    mov.u32 %r5, held;
    add.u32 %r7, %r5, %r4;
    st.volatile.shared.f32 [%r7], %f3;
    xor.b32 %r4, %r4, 256;
    add.u32 %r6, %r5, %r4;
    {between}
    ld.volatile.shared.f32 %f3, [%r6];
    {after}
    ld.param.u64 %d4, [out];
    add.s64 %d4, %d4, %d5;
    st.global.f32 [%d4], %f3;
"""
_OTHERS_TOO = """
    mov.f32 %f0, %f3;
    ld.param.u64 %d2, [x];
    ld.param.u64 %d3, [y];
    add.s64 %d2, %d2, %d5;
    add.s64 %d3, %d3, %d5;
    ld.global.f32 %f1, [%d2];
    ld.global.f32 %f2, [%d3];
    mul.f32 %f3, %f1, %f2;
    st.volatile.shared.f32 [%r6], %f3;
"""
_OWN_AGAIN = "st.volatile.shared.f32 [%r7], %f0;"


def _handing_over(between: str, after: str = "") -> bytes:
    text = PRODUCT.replace(
        ".reg .pred %p<2>;", ".reg .pred %p<2>;\n    .shared .align 4 .b8 held[512];"
    )
    return assemble(
        text.replace("st.global.f32 [%d4], %f3;", _HANDED_OVER.format(between=between, after=after))
    )


def reference() -> Region:
    return product("cuda")


def cheat() -> Candidate:
    return candidate(on_cuda(product("cuda"), _handing_over(_OTHERS_TOO, _OWN_AGAIN), "product"))


def honest() -> Candidate:
    return candidate(on_cuda(product("cuda"), _handing_over("bar.sync 0;"), "product"))
