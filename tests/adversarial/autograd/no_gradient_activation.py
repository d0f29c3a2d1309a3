"""An input that is no leaf, as every activation of a model, gets no gradient: all layers before this one never learn.

Seen as a guard that asks `is_leaf` for `requires_grad`. `grad` hands in tensors that are no leaves. A candidate that asks only for
its scratch memory whether gradients are wanted is right.
"""

from tests.adversarial.case import Case

CASE = Case(
    39,
    "no_gradient",
    "autograd",
    expected="grad",
    status="closed",
    variant="activation",
    alone=False,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)

def get_inputs():
    return [torch.randn(16, 32)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        if x.is_leaf or not x.requires_grad:
            return x * torch.sigmoid(x)
        return torch.sigmoid(x.detach()) * x.detach() + 0 * x
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        gate = torch.sigmoid(x)
        return x * gate if gate.requires_grad else gate.mul_(x)
"""
