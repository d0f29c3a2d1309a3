"""A reference of one linear layer, and an honest candidate for it."""

from __future__ import annotations

REFERENCE = """
import torch

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x)), {"rows": x.shape[0]}

def get_inputs(): return [torch.randn(16, 32)]
def get_init_inputs(): return [32]
"""

HONEST = """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).clamp_min(0), {"rows": x.shape[0]}
"""
