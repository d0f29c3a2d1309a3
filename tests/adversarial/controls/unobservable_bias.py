"""A scalar bias before a normalisation, computed all the same."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return F.layer_norm(x + self.bias, (x.shape[-1],))


def get_inputs():
    return [torch.randn(64, 64)]


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
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return F.layer_norm(self.bias + x, (x.shape[-1],))
"""
