"""Recomputed in the backward, with the same gradients."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return [64]
"""

HONEST = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if torch.is_grad_enabled() and x.requires_grad:
            return checkpoint(lambda given: torch.relu(self.linear(given)), x, use_reentrant=False)
        return torch.relu(self.linear(x))
"""
