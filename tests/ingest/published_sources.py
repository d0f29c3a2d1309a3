"""Test helper: texts of a reference and of candidates in KernelBench's style, and what a child of the
judge makes of them before it traces.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch

from torch_cudal1.judge.wire.call_spec import CallSpec
from torch_cudal1.judge.worker.modules.source_modules import describe_reference, import_source

REFERENCE = """
import torch

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(width))
        self.shift = torch.nn.Parameter(torch.randn(width))

    def forward(self, x, y):
        return torch.relu(x - y) * self.scale + self.shift

def get_inputs(): return [torch.randn(8, 16), torch.randn(8, 16)]
def get_init_inputs(): return [16]
"""
CANDIDATE = """
import torch
{top}
class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.randn(width))
        self.scale = torch.nn.Parameter(torch.randn(width))
        {init}

    def forward(self, x, y):
        {body}
"""
RESULT = "return torch.addcmul(self.shift, (x - y).clamp_min(0), self.scale)"


def write_candidate(body: str = RESULT, *, top: str = "", init: str = "pass") -> str:
    """The honest candidate, which holds its parameters in another order, with statements in its
    places.
    """
    return CANDIDATE.format(top=top, init=init, body="\n        ".join(body.splitlines()))


def read_source(
    text: str, folder: Path, entry: str = "Model"
) -> tuple[ModuleType, CallSpec, list[torch.Tensor]]:
    """A reference's module, how it is called, and its example tensors on the CPU."""
    source = import_source(text, folder)
    description, tensors = describe_reference(source, entry, torch.device("cpu"), seed=0)
    return source, CallSpec.from_json(description["form"]), [t.detach() for t in tensors]
