"""Compiling ahead: what Triton is asked for, and what is not launched."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from torch_cudal1.judge.worker.kernel_compile import compile_ahead, skip_launches

jit = pytest.importorskip("triton.runtime.jit")
CPU = torch.device("cpu")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, dict[str, Any]]]:
    launches: list[tuple[bool, dict[str, Any]]] = []
    monkeypatch.setattr(
        jit.JITFunction,
        "run",
        lambda kernel, *args, warmup, **options: launches.append((warmup, options)),
    )
    return launches


def test_a_launch_compiles_and_does_no_more_until_the_block_ends(
    runs: list[tuple[bool, dict[str, Any]]],
) -> None:
    before = jit.JITFunction.run
    with suppress(ValueError), skip_launches():
        jit.JITFunction.run(object(), 1, grid=(2,), warmup=False, BLOCK=4)
        raise ValueError
    assert runs == [(True, {"grid": (2,), "BLOCK": 4})]
    assert jit.JITFunction.run is before


def test_integers_are_zero_so_that_nothing_is_read_far_away() -> None:
    tensors: list[torch.Tensor] = []
    compile_ahead(
        lambda inputs: tensors.extend(inputs), [((2, 3), torch.float32), ((4,), torch.int64)], CPU
    )
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == [
        ((2, 3), torch.float32),
        ((4,), torch.int64),
    ]
    assert not tensors[1].any()
