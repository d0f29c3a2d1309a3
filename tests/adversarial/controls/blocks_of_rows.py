"""A product row block by row block."""

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
        return torch.cat([part @ y for part in x.split(16)]) if x.shape[0] > 16 else x @ y
"""
