"""Test helper: graphs as a GPU's process captures them, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["graph_on_a_gpu"]


def graph_on_a_gpu(function: Callable[..., Any], *shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """The graph of `function`, which calls ATen by name, on CUDA tensors of these shapes; nothing is computed."""
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(torch.empty(tuple(shape), dtype=dtype, device="meta")) for shape in shapes]
        for fake in inputs:
            fake.fake_device = torch.device("cuda", 0)
        graph = make_fx(function, tracing_mode="real")(*inputs)
    graph.graph.eliminate_dead_code()
    return graph
