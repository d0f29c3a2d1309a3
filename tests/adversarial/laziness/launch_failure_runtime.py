"""A launch that the device refuses at run time: a grid that does not exist, past all static checks.

A duty of our own runtime: the status of every launch is looked at, and a failure is an error, never an empty result.
"""

from __future__ import annotations

import pytest
import torch

from tests.adversarial.case import Case
from tests.adversarial.plans import PRODUCT, assemble, on_cuda, product
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.runtime.executor import prepare

CASE = Case(
    17,
    "launch_failure",
    "laziness",
    expected="contract",
    status="runtime",
    form="runtime",
    variant="runtime",
    needs=("gpu", "compiler"),
    seen=("WF",),
)


def attack() -> None:
    device = torch.device("cuda")
    plan = on_cuda(product("cuda"), assemble(PRODUCT), "product", cluster=16)
    x, y = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    with pytest.raises(Cudal1Error):
        prepare(plan, device)([x, y])


def twin() -> None:
    device = torch.device("cuda")
    plan = on_cuda(product("cuda"), assemble(PRODUCT), "product")
    x, y = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    assert torch.equal(prepare(plan, device)([x, y])[0], x * y)
