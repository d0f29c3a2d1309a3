"""Each batch entry alone."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def forward(self, q, k, v):
        return torch.softmax(q @ k.transpose(-2, -1) * 0.25, -1) @ v


def get_inputs():
    return [torch.randn(2, 10, 16), torch.randn(2, 10, 16), torch.randn(2, 10, 16)]


def get_init_inputs():
    return []
"""

HONEST = """
import torch
from torch import nn
from torch.nn import functional as F


class ModelNew(nn.Module):
    def forward(self, q, k, v):
        if q.dim() != 3 or q.shape[0] < 2 or torch.is_grad_enabled():
            return torch.softmax(q @ k.transpose(-2, -1) * 0.25, -1) @ v
        return torch.stack([torch.softmax(a @ b.transpose(-2, -1) * 0.25, -1) @ c for a, b, c in zip(q, k, v)])
"""
