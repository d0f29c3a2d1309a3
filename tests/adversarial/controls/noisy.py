"""Prints and warns at every call."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return [64]
"""

HONEST = """
import torch
from torch import nn
from torch.nn import functional as F
import warnings


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        print("pass", x.shape)
        warnings.warn("only a remark")
        return torch.relu(self.linear(x))
"""
