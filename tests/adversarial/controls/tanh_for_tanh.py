"""The function itself under another name."""

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
        return y * x.tanh()
"""
