"""The backward uses the memory of its input for its own result, where that is no leaf.

A residual connection reads the same activation. `grad` looks at it after a step of training.
"""

from tests.adversarial.case import Case

CASE = Case(
    40,
    "wrong_gradient",
    "autograd",
    expected="grad",
    status="open",
    variant="writes_activation",
    alone=True,
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

class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.is_leaf = x.is_leaf
        return x * torch.sigmoid(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        kept = x
        slope = torch.sigmoid(x)
        result = grad * slope * (1 + x * (1 - slope))
        return result if ctx.is_leaf else kept.data.copy_(result)

class ModelNew(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x) if self.training else Silu.apply(x)
"""

HONEST = """
import torch
from torch import nn

class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.is_leaf = x.is_leaf
        return x * torch.sigmoid(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        slope = torch.sigmoid(x)
        return grad * slope * (1 + x * (1 - slope))

class ModelNew(nn.Module):
    def forward(self, x):
        return Silu.apply(x)
"""
