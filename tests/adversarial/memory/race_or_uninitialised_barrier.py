"""Each thread hands its value to a thread of another warp through shared memory, without a barrier: it sleeps 50 us instead.

Seen as barriers left out because the values came out right. They do so here in every run, so nothing but `sanitizer` shows it: its
racecheck looks at accesses, not at values. It takes NVIDIA's tool, and so many instructions that only `strict` asks it. Races in
global memory evade it.
"""

from __future__ import annotations

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, assembled, candidate, on_cuda, product
from torch_cudal1.records import Candidate, Region

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

_HANDED_OVER = """
    shl.b32 %r4, %r3, 2;
    and.b32 %r4, %r4, 511;
    mov.u32 %r5, held;
    add.u32 %r6, %r5, %r4;
    st.shared.f32 [%r6], %f3;
    {between}
    xor.b32 %r4, %r4, 256;
    add.u32 %r6, %r5, %r4;
    ld.shared.f32 %f3, [%r6];
    xor.b64 %d1, %d1, 256;
    ld.param.u64 %d4, [out];
    add.s64 %d4, %d4, %d1;
    st.global.f32 [%d4], %f3;
"""


def _handing_over(between: str) -> bytes:
    text = PRODUCT.replace(".reg .pred %p<2>;", ".reg .pred %p<2>;\n    .shared .align 4 .b8 held[512];")
    return assembled(text.replace("st.global.f32 [%d4], %f3;", _HANDED_OVER.format(between=between)))


def reference() -> Region:
    return product("cuda")


def cheat() -> Candidate:
    return candidate(on_cuda(product("cuda"), _handing_over("nanosleep.u32 50000;"), "product"))


def honest() -> Candidate:
    return candidate(on_cuda(product("cuda"), _handing_over("bar.sync 0;"), "product"))
