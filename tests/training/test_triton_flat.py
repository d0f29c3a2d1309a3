"""Triton programs of elementwise chains, diagonals, scans and pools, and the launch that rendered
modules share.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training.triton_facts import Facts, check_facts, compute_facts, list_ops, needs_gpu
from torch_cudal1.training.ksl.triton_flat import HEAD

NAMES = list_ops("chain", "diag", "scan", "pool")


@pytest.fixture(scope="module")
def facts() -> Facts:
    return compute_facts(NAMES, interpreted=True)


@pytest.mark.parametrize("name", NAMES)
def test_programs_compute_what_they_are_meant_to_under_the_interpreter(
    facts: Facts, name: str
) -> None:
    check_facts(name, facts[name])


@pytest.mark.gpu
@needs_gpu
def test_programs_compute_what_they_are_meant_to_on_a_gpu() -> None:
    for name, facts in compute_facts(NAMES, interpreted=False).items():
        check_facts(name, facts)


def test_a_launch_keeps_what_was_compiled_for_tensors_that_lie_alike() -> None:
    names: dict[str, Any] = {}
    text = HEAD[HEAD.index("COMPILED = {}") :]
    exec(text, names)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    class Kernel:
        def __init__(self, name: str, compiled: Any) -> None:
            self.name, self.compiled = name, compiled

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*args: Any, **options: Any) -> Any:
                calls.append((self.name, args, options))
                return self.compiled

            return run

    kernel = Kernel("source", Kernel("compiled", None))
    wide = torch.zeros(64)
    for tensor in (wide[:32], wide[:32], wide[1:33], wide[1:33]):
        names["launch"](kernel, (1, 1, 1), (tensor,), (32,), {"BLOCK": 8}, num_warps=4)
    assert [name for name, *_ in calls] == ["source", "compiled", "source", "compiled"]
    assert calls[0][2] == {"BLOCK": 8, "num_warps": 4}
    assert calls[1][1:] == ((wide.data_ptr(), 32, 8), {})
    assert calls[3][1] == (wide.data_ptr() + 4, 32, 8)
