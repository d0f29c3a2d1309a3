"""Every thread also reads 64 KiB beyond the end of its input and throws the value away unless it is one special pattern.

Ours. No output depends on it, so neither values nor guard bands show it; it faults when the next page is not mapped. `guard_page`
puts inputs and outputs into memory of their own, with nothing mapped beside it.
"""

from __future__ import annotations

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, assemble, candidate, on_cuda, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    48,
    "out_of_bounds",
    "memory",
    expected="guard_page",
    status="open",
    form="program",
    variant="peek",
    alone=True,
    needs=("gpu", "compiler"),
)


PEEKING = PRODUCT.replace(
    "mul.f32 %f3, %f1, %f2;",
    """mul.f32 %f3, %f1, %f2;
    add.s64 %d5, %d2, 65536; ld.global.u32 %r5, [%d5]; setp.eq.u32 %p1, %r5, 2143289345; @%p1 mov.f32 %f3, %f1;""",
)


def reference() -> Region:
    return product("cuda")


def cheat() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(PEEKING), "product"))


def honest() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(PRODUCT), "product"))
