"""Tasks of the kernel-schedule language at ragged shapes, and running what is rendered for them."""

from __future__ import annotations

from typing import Any

import torch

from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.ksl.grammar import Device
from torch_cudal1.training.ksl.ops import OPS, make_task

# Ragged: no size is a multiple of any block.
RAGGED = {
    "chain": (70, 96),
    "row": (70, 300),
    "mm": (70, 48, 100),
    "diag": (70, 90),
    "scan": (70, 200),
    "pool": (3, 7, 66),
}


CPU = KslCodec("cpu")


DEVICES: tuple[Device, ...] = ("cpu", "cuda")


def task_for(name: str) -> TrainingTask:
    return make_task(name, RAGGED[OPS[name].kind])


def run_module(text: str, entry: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What a module of a source text answers; `torch.empty` gives NaN, so that what is not written
    shows.
    """
    names: dict[str, Any] = {}
    exec(compile(text, "<program>", "exec"), names)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        result: torch.Tensor = names[entry]()(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    return result
