"""Two products of a cell as one."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 16)
        self.new = nn.Linear(16, 16)

    def forward(self, x, h):
        h = torch.sigmoid(self.gate(x)) * torch.tanh(self.new(x) + h)
        return h


def get_inputs():
    return [torch.randn(12, 16), torch.randn(12, 16)]


def get_init_inputs():
    return []
"""

HONEST = """
import torch
from torch import nn
from torch.nn import functional as F


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 16)
        self.new = nn.Linear(16, 16)

    def forward(self, x, h):
        both = F.linear(x, torch.cat([self.gate.weight, self.new.weight]), torch.cat([self.gate.bias, self.new.bias]))
        gate, new = both.chunk(2, -1)
        return torch.sigmoid(gate) * torch.tanh(new + h)
"""
