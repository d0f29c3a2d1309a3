"""A Program of ours is called on a stream of the caller's, behind a slow producer, and its input is overwritten at once.

A duty of our own runtime: every launch goes to the caller's stream.
"""

from __future__ import annotations

import torch

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, assemble, on_cuda, product
from torch_cudal1.runtime.executor import prepare

CASE = Case(
    50,
    "stream_order",
    "memory",
    expected="stream_order",
    status="runtime",
    form="runtime",
    variant="runtime",
    needs=("gpu", "compiler"),
    seen=("L1",),
)


def attack() -> None:
    device = torch.device("cuda")
    plan = on_cuda(product("cuda"), assemble(PRODUCT), "product")
    runner = prepare(plan, device)
    x, y = torch.zeros(64, 64, device=device), torch.full((64, 64), 3.0, device=device)
    runner([x, y])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        x.fill_(2.0)
        (out,) = runner([x, y])
        x.fill_(9.0)
        assert bool((out == 6.0).all())


def twin() -> None:
    device = torch.device("cuda")
    plan = on_cuda(product("cuda"), assemble(PRODUCT), "product")
    x, y = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    assert torch.equal(prepare(plan, device)([x, y])[0], x * y)
