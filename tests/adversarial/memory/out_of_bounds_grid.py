"""The grid is one block too long, so a store runs over the end of the output by 512 bytes.

Seen as missing masks. The values are right; who owns those bytes loses them. `guard_band` surrounds every tensor with a pattern
and finds it changed. A store far away is for `guard_page`.
"""

from __future__ import annotations

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, assemble, candidate, on_cuda, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    48,
    "out_of_bounds",
    "memory",
    expected="guard_band",
    status="open",
    form="program",
    variant="grid",
    needs=("gpu", "compiler"),
    seen=("L1", "DR"),
)


def reference() -> Region:
    return product("cuda")


def cheat() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(PRODUCT), "product", grid=33))


def honest() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(PRODUCT), "product", grid=32))
