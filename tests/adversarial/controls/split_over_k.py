"""A product in four parts, added in order."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def forward(self, x, y):
        return x @ y


def get_inputs():
    return [torch.randn(48, 64), torch.randn(64, 40)]


def get_init_inputs():
    return []
"""

HONEST = """
import torch
from torch import nn
from torch.nn import functional as F


class ModelNew(nn.Module):
    def forward(self, x, y):
        parts = [a @ b for a, b in zip(x.chunk(4, -1), y.chunk(4, -2))]
        return parts[0] + parts[1] + (parts[2] + parts[3]) if len(parts) == 4 else x @ y
"""
