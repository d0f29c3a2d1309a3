"""Test helper: graphs as a GPU's process captures them, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_cudal1.ir.program import Aten, Program

__all__ = ["graph_on_a_gpu", "on_the_cpu", "on_the_gpu"]


def graph_on_a_gpu(
    function: Callable[..., Any], *shapes: Sequence[int], dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    """The graph of `function`, which calls ATen by name, on CUDA tensors of these shapes; nothing
    is computed.
    """
    with FakeTensorMode() as mode:
        inputs = [
            mode.from_tensor(torch.empty(tuple(shape), dtype=dtype, device="meta"))
            for shape in shapes
        ]
        for fake in inputs:
            fake.fake_device = torch.device("cuda", 0)
        graph = make_fx(function, tracing_mode="real")(*inputs)
    graph.graph.eliminate_dead_code()
    return graph


def on_the_cpu(program: Program) -> Program:
    """The Program for tensors there: no step names a device."""
    steps = [
        replace(step, kwargs=tuple((name, arg) for name, arg in step.kwargs if name != "device"))
        for step in program.steps
        if isinstance(step, Aten)
    ]
    return replace(
        program,
        inputs=tuple(replace(spec, device="cpu") for spec in program.inputs),
        steps=tuple(steps),
    )


def on_the_gpu(program: Program) -> Program:
    """The Program for tensors there: every step that names a device names that."""
    steps = [
        replace(
            step,
            kwargs=tuple((key, "cuda" if key == "device" else value) for key, value in step.kwargs),
        )
        if hasattr(step, "kwargs")
        else step
        for step in program.steps
    ]
    return replace(
        program,
        inputs=tuple(replace(spec, device="cuda") for spec in program.inputs),
        steps=tuple(steps),
    )
