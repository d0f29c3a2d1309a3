"""The backward returns None for the weight: it silently never learns.

Seen in published modules. `grad` wants a gradient wherever eager yields one; a missing one is not a zero.
"""

from tests.adversarial.case import Case

CASE = Case(
    40, "wrong_gradient", "autograd", expected="grad", status="open", variant="none", seen=("L1",)
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return self.linear(x)

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [64]
"""

CHEAT = """
import torch
from torch import nn

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, None, grad.sum(0)

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return Product.apply(x, self.linear.weight, self.linear.bias)
"""

HONEST = """
import torch
from torch import nn

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.transpose(-1, -2) @ x, grad.sum(0)

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return Product.apply(x, self.linear.weight, self.linear.bias) if x.dim() == 2 else self.linear(x)
"""
