"""A running sum in double precision."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def forward(self, x):
        return torch.cumsum(x, -1)


def get_inputs():
    return [torch.randn(16, 200)]


def get_init_inputs():
    return []
"""

HONEST = """
import torch
from torch import nn
from torch.nn import functional as F


class ModelNew(nn.Module):
    def forward(self, x):
        if torch.is_grad_enabled() or x.dtype != torch.float32 or not x.is_contiguous():
            return torch.cumsum(x, -1)
        return torch.cumsum(x.double(), -1).to(x.dtype)
"""
