"""The grid is one block short: the last rows are whatever the allocator left there.

Ours. `numerics` sees the wrong values, and a fill of fresh memory (`poison`) shows that the rows were never written.
"""

from __future__ import annotations

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, assemble, candidate, on_cuda, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    16,
    "partial",
    "laziness",
    expected="numerics",
    status="open",
    form="program",
    variant="grid",
    needs=("gpu", "compiler"),
)


def reference() -> Region:
    return product("cuda")


def cheat() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(PRODUCT), "product", grid=31))


def honest() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(PRODUCT), "product", grid=32))
