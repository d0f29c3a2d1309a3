"""Eager's view by another operator."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def forward(self, x):
        return x.transpose(0, 1)


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
    def forward(self, x):
        return x.permute(1, 0)
"""
