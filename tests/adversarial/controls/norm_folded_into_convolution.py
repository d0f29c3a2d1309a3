"""A batch norm in the weights of the convolution before it. An infinite weight would make NaN elsewhere.

The bias is added behind the convolution: as its own, convolutions on CPUs with AVX2 sum onto it, and 36 roundings at its size are 2.4 times
eager's error (median of 300 draws), which is more than a source may have.
"""

REFERENCE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


def get_inputs():
    return [torch.randn(2, 4, 10, 10)]


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
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        if self.training or torch.is_grad_enabled():
            return torch.relu(self.norm(self.conv(x)))
        scale = self.norm.weight / torch.sqrt(self.norm.running_var + self.norm.eps)
        weight = self.conv.weight * scale[:, None, None, None]
        bias = (self.conv.bias - self.norm.running_mean) * scale + self.norm.bias
        return torch.relu(F.conv2d(x, weight, padding=1) + bias[:, None, None])
"""
