"""Im2col and a product."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(x))


def get_inputs():
    return [torch.randn(2, 4, 12, 12)]


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

    def forward(self, x):
        if torch.is_grad_enabled() or not x.is_contiguous() or not x.numel() or x.dim() != 4 or not bool(x.isfinite().all()):
            return torch.relu(self.conv(x))
        if not bool(self.conv.weight.isfinite().all()):
            return torch.relu(self.conv(x))
        columns = F.unfold(x, 3, padding=1)
        out = self.conv.weight.flatten(1) @ columns + self.conv.bias[:, None]
        return torch.relu(out).view(x.shape[0], -1, *x.shape[2:])
"""
