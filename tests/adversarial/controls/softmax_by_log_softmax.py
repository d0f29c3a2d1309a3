"""Exponential of the log-softmax in double."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)


def get_inputs():
    return [torch.randn(32, 100)]


def get_init_inputs():
    return []
"""

HONEST = """
import torch
from torch import nn
from torch.nn import functional as F


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.log_softmax(x.double(), -1).exp().to(x.dtype) if not torch.is_grad_enabled() else torch.softmax(x, -1)
"""
