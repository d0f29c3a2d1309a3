"""A reference and programs for it, right and wrong, small enough for a test."""

from __future__ import annotations

from torch_cudal1.judge.pool.measured import Decoded, TrainingTask

__all__ = ["REFERENCE", "TASK", "program", "source"]

REFERENCE = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2 + 1
def get_inputs():
    return [torch.randn(32, 64)]
def get_init_inputs():
    return []
"""
TASK = TrainingTask("relu", REFERENCE)


def source(
    result: str = "torch.relu(x).mul_(2).add_(1)", *, before: str = "pass", top: str = ""
) -> str:
    return f"""
import torch
from torch import nn
{top}
class ModelNew(nn.Module):
    def forward(self, x):
        {before}
        return {result}
"""


def program(name: str, text: str) -> Decoded:
    return Decoded(name, text)
