"""A session of the worker in this process, with a small module in a slot, for tests of its handlers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.judge.wire.call_spec import CallSpec, pack_arguments
from torch_cudal1.judge.wire.channel import load_tensors, save_tensors
from torch_cudal1.judge.worker.modules.module_runner import ModuleRunner
from torch_cudal1.judge.worker.session import HANDLERS, Session

__all__ = ["CPU", "NAMES", "SLOT", "call", "load_module", "make_inputs", "put", "read_outputs"]

CPU = torch.device("cpu")
SLOT = "candidate"
MODULE = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("shift", torch.zeros(3))
    def forward(self, x):
        return self.linear(x) + self.shift
"""
NAMES = ("shift", "linear.weight", "linear.bias")
SPEC = CallSpec(
    "ModelNew",
    pack_arguments({"args": (), "kwargs": {}}, None),
    NAMES,
    pack_arguments({"args": (torch.empty(2, 4),), "kwargs": {}}, []),
)


def call(session: Session, verb: str, **request: Any) -> dict[str, Any]:
    """The answer of a handler; raises what the handler raises."""
    return HANDLERS[verb](session, {"verb": verb, **request})


def load_module(session: Session, text: str = MODULE) -> ModuleRunner:
    """Put the module of a source into `SLOT`, and an input set "first" beside it."""
    call(session, "load_source", slot=SLOT, text=text, form=SPEC.to_json(), way={})
    put(session, "first", make_inputs(1))
    runner = session.slots[SLOT]
    assert isinstance(runner, ModuleRunner)
    return runner


def make_inputs(seed: int) -> list[torch.Tensor]:
    """Buffer, weight and bias of the module, then the tensor of its call."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((3,), (3, 4), (3,), (2, 4))]


def put(session: Session, name: str, tensors: list[torch.Tensor]) -> None:
    """Hand an input set over."""
    path = session.scratch / f"set {name}"
    layout = save_tensors(tensors, path)
    call(session, "put", name=name, layout=layout, path=str(path), base="")


def read_outputs(answer: Mapping[str, Any], path: Path) -> list[torch.Tensor | None]:
    """The tensors that an answer describes."""
    return load_tensors(answer["layout"], path, CPU)
