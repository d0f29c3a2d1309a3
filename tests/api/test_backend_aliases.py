"""Aliased inputs under a swap: a call whose inputs alias otherwise than those of the first call is
right.

Inputs that overlap without being the same tensor are not tried: there torch.compile has no guard
either (aot_eager of torch 2.13 computes wrong values after a call without overlap); `accelerate`
tells such calls apart by itself.
"""

from __future__ import annotations

import pytest
import torch

from tests.entries import count_runs, plant_compiled
from torch_cudal1.api.backend import cudal1


def write_second(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * y


def pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    base, other = torch.arange(8.0), torch.arange(8.0) + 3
    return {
        "two tensors": (base.clone(), other.clone()),
        "one tensor twice": ((same := base.clone()), same),
    }


@pytest.mark.parametrize("first", pairs())
@pytest.mark.parametrize("then", pairs())
def test_a_call_with_other_aliasing_than_the_first_is_right(first, then, monkeypatch, tmp_path):
    runs = count_runs(monkeypatch)
    torch._dynamo.reset()
    with torch.no_grad():
        for name in {first, then}:
            plant_compiled(lambda f, name=name: f(*pairs()[name]), write_second, tmp_path)
        compiled = torch.compile(
            write_second, backend=cudal1, options={"cache_dir": tmp_path, "strictness": "error"}
        )
        for name in (first, then, first):
            swapped, plain = pairs()[name], pairs()[name]
            assert torch.equal(compiled(*swapped), write_second(*plain)), name
            assert torch.equal(swapped[0], plain[0])
    torch._dynamo.reset()
    assert runs.total > 0
