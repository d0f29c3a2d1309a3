"""A kernel is launched and its result thrown away by a selection that is always false; eager's operators do the work.

Ours. `ghost` replaces each own kernel by one that does nothing: where no output changes, the kernel is decoration. One element
that really comes from the kernel evades it, and fails the share of the device time.
"""

from __future__ import annotations

from dataclasses import replace

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, V, assemble, candidate, on_cuda, op, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    19,
    "placebo",
    "laziness",
    expected="ghost",
    status="open",
    form="program",
    variant="decor",
    alone=True,
    needs=("gpu", "compiler"),
    seen=("KG",),
)


def reference() -> Region:
    return product("cuda")


def cheat() -> Candidate:
    launched = on_cuda(product("cuda"), assemble(PRODUCT), "product")
    real = op("aten.mul.Tensor", V(0), V(1), out=3)
    never = op("aten.ne.Tensor", V(3), V(3), out=4)
    number = op("aten.isnan.default", V(3), out=5)
    both = op("aten.logical_xor.default", V(4), V(5), out=6)
    return candidate(
        replace(
            launched,
            steps=(
                *launched.steps,
                real,
                never,
                number,
                both,
                op("aten.where.self", V(6), V(2), V(3), out=7),
            ),
            outputs=(7,),
        )
    )


def honest() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(PRODUCT), "product"))
