"""The kernel reads the device's global timer and is wrong after a date.

None has been proved in the wild. Nothing that a test can wait for shows it; `cubin_scan` refuses machine code that reads clocks
or timers without declaring it. What depends on untested values stays possible.
"""

from __future__ import annotations

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, assemble, candidate, on_cuda, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    58,
    "time_bomb",
    "host",
    expected="cubin_scan",
    status="closed",
    form="program",
    variant="device_timer",
    needs=("gpu", "compiler"),
)


WAITING = PRODUCT.replace(
    "mul.f32 %f3, %f1, %f2;",
    """mul.f32 %f3, %f1, %f2;
    mov.u64 %d5, %globaltimer; setp.gt.u64 %p1, %d5, 4102444800000000000; @%p1 mov.f32 %f3, 0f00000000;""",
)


def reference() -> Region:
    return product("cuda")


def cheat() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(WAITING), "product"))


def honest() -> Candidate:
    return candidate(on_cuda(product("cuda"), assemble(PRODUCT), "product"))
