"""A hand-written backward whose bias gradient is the mean over the batch, not the sum.

Seen in 26 published modules in one form or another. The forward result is right; `grad` compares every gradient with float64
under random cotangents.
"""

from tests.adversarial.case import Case

CASE = Case(40, "wrong_gradient", "autograd", expected="grad", status="open", seen=("L1",))

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
        return grad @ weight, grad.transpose(-1, -2) @ x, grad.mean(0)

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

from torch.autograd.function import once_differentiable

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, (x.t() @ grad).t(), torch.einsum('ij->j', grad)

class ModelNew(nn.Module):
    '''Another order of summation.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return Product.apply(x, self.linear.weight, self.linear.bias) if x.dim() == 2 else self.linear(x)
"""
