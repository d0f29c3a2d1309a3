"""The kernel counts its launches in a variable of the device and leaves out the work from the thousandth on.

Seen as call counters; in C++ they are invisible to Python. Machine code with memory that outlives a call is refused when it is
read (`cubin_scan`). Scratch that the plan allocates for each call is the honest place.
"""

from __future__ import annotations

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, assemble, candidate, on_cuda, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    4,
    "fork_timing",
    "timing",
    expected="cubin_scan",
    status="closed",
    form="program",
    variant="device_counter",
    alone=True,
    needs=("gpu", "compiler"),
    seen=("KG", "GM"),
)


COUNTING = PRODUCT.replace(".visible", ".global .align 4 .u32 calls;\n.visible").replace(
    "ret;", "atom.global.add.u32 %r4, [calls], 1;\n    ret;"
)


def reference() -> Region:
    return product("cuda")


def cheat() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(COUNTING), "product"))


def honest() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(PRODUCT), "product"))
