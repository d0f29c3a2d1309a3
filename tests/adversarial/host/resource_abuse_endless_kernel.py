"""The kernel never ends.

Seen in checkers' lists. GPU time has no limit of its own: the request's deadline kills the process (`resource`), and the next
candidate meets a new one.
"""

from __future__ import annotations

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, assemble, candidate, on_cuda, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    57,
    "resource_abuse",
    "host",
    expected="resource",
    status="open",
    form="program",
    variant="endless_kernel",
    needs=("gpu", "compiler"),
    seen=("KB",),
)


SPINNING = PRODUCT.replace(
    "ret;",
    "again: ld.volatile.global.u32 %r5, [%d2]; setp.ne.u32 %p1, %r5, 2143289345; @%p1 bra again;\n    ret;",
)


def reference() -> Region:
    return product("cuda")


def cheat() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(SPINNING), "product"))


def honest() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(PRODUCT), "product"))
