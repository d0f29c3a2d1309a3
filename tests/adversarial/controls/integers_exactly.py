"""Integer arithmetic in another order."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def forward(self, x):
        return (x * 3 + 1) % 7


def get_inputs():
    return [torch.randint(0, 100, (64, 64))]


def get_init_inputs():
    return []
"""

HONEST = """
import torch
from torch import nn
from torch.nn import functional as F


class ModelNew(nn.Module):
    def forward(self, x):
        return (x + x + x + 1) % 7
"""
