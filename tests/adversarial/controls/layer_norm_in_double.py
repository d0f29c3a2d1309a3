"""Statistics in double precision."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.LayerNorm(features)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return [64]
"""

HONEST = """
import torch
from torch import nn
from torch.nn import functional as F


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.LayerNorm(features)

    def forward(self, x):
        if torch.is_grad_enabled() or x.dtype != torch.float32:
            return self.norm(x)
        wide = x.double()
        variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
        return ((wide - mean) * torch.rsqrt(variance + self.norm.eps) * self.norm.weight + self.norm.bias).to(x.dtype).contiguous()
"""
