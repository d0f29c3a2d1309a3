"""Two products of one input as one, with live weights."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.first = nn.Linear(features, features)
        self.second = nn.Linear(features, features)

    def forward(self, x):
        return torch.cat([self.first(x), self.second(x)], -1)


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
        self.first = nn.Linear(features, features)
        self.second = nn.Linear(features, features)

    def forward(self, x):
        weight = torch.cat([self.first.weight, self.second.weight])
        bias = torch.cat([self.first.bias, self.second.bias])
        return F.linear(x, weight, bias)
"""
