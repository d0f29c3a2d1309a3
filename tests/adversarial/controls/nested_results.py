"""A dict with a list and a plain number."""

REFERENCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def forward(self, x):
        return {'sum': x.sum(-1), 'parts': [x * 2, x.argmax(-1)], 'n': 3}


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
        doubled = x + x
        return {'sum': x.sum(-1), 'parts': [doubled, x.argmax(-1)], 'n': 3}
"""
