"""A launch asks for 2,048 threads a block: the device refuses it, fast, and the output holds what was there.

Seen with 65,792 bytes of shared memory and no check of the status, at 104 times the speed. Grid, block and shared memory are
held against the limits of the targets before anything runs (`contract`); the launcher checks the status of what does run.
"""

from __future__ import annotations

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, assemble, candidate, on_cuda, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    17,
    "launch_failure",
    "laziness",
    expected="contract",
    status="open",
    form="program",
    variant="block",
    needs=("gpu", "compiler"),
    seen=("WF", "L1"),
)


def reference() -> Region:
    return product("cuda")


def plan(block: int) -> Candidate:
    return candidate(
        on_cuda(product("cuda"), assemble(PRODUCT), "product", grid=4096 // block, block=block)
    )


def cheat() -> Candidate:
    return plan(2048)


def honest() -> Candidate:
    return plan(1024)
