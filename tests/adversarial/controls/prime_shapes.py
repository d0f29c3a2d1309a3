"""Sizes that no tile divides, in tiles."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def forward(self, x, y):
        return torch.tanh(x) * y


def get_inputs():
    return [torch.randn(37, 53), torch.randn(37, 53)]


def get_init_inputs():
    return []
"""

HONEST = """
import torch
from torch import nn
from torch.nn import functional as F


class ModelNew(nn.Module):
    def forward(self, x, y):
        if x.dim() != 2 or x.shape != y.shape or not x.numel():
            return torch.tanh(x) * y
        if not (x.is_contiguous() and y.is_contiguous()):
            return torch.tanh(x) * y
        return torch.cat([torch.tanh(a) * b for a, b in zip(x.split(16), y.split(16))])
"""
