"""A docstring and names with the words pass, stream, cache, sleep."""

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


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        '''One forward pass; no stream, no cache, no sleep, no try, no except, no global.'''
        cached_stream_of_rows = self.linear(x)
        return torch.relu(cached_stream_of_rows)
"""
