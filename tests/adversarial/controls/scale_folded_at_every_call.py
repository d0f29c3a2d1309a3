"""An algebraic rewrite whose weights are read anew."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.scale = 0.5
        self.register_buffer('shift', torch.zeros(features))

    def forward(self, x):
        return self.linear(x) * self.scale + self.shift


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return [64]
"""

HONEST = """
import torch
from torch import nn
from torch.nn import functional as F


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.scale = 0.5
        self.register_buffer('shift', torch.zeros(features))

    def forward(self, x):
        return F.linear(x, self.linear.weight * self.scale, self.linear.bias * self.scale + self.shift)
"""
