"""A Program under our own CUDA graph meets new addresses, new values at the old address, and a caller who holds its results.

A duty of our own runtime: inputs are copied in, shapes are guarded, results are cloned out.
"""

from __future__ import annotations

import torch

from tests.adversarial.case import Case
from tests.adversarial.plans import product
from torch_cudal1.runtime.runner import build_runner

CASE = Case(
    38,
    "graph_hazard",
    "state",
    expected="capture",
    status="runtime",
    form="runtime",
    variant="runtime",
    needs=("gpu",),
    seen=("L1",),
)


def attack() -> None:
    program = product("cuda").program
    device = torch.device("cuda")
    runner = build_runner(program, "eager+graph", device, static=frozenset())
    outputs = []
    for _ in range(6):
        x, y = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
        (out,) = runner([x, y])
        outputs.append((out, x * y))
        x.data.normal_()
        (again,) = runner([x, y])
        assert torch.equal(again, x * y)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out, expected in outputs)


def twin() -> None:
    program = product("cuda").program
    device = torch.device("cuda")
    runner = build_runner(program, "eager", device, static=frozenset())
    x, y = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    assert torch.equal(runner([x, y])[0], x * y)
