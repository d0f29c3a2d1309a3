"""The backward has the number written in that the forward is called with.

Seen as a constant of the compiled kernel. `perturb` moves numbers forward only; `grad` asks with another one too.
"""

from tests.adversarial.case import Case

CASE = Case(
    40,
    "wrong_gradient",
    "autograd",
    expected="grad",
    status="open",
    variant="other_number",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, factor):
        return x * factor

def get_inputs():
    return [torch.randn(16, 32), 1.5]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * 1.5, None

class ModelNew(nn.Module):
    def forward(self, x, factor):
        return x * factor if self.training else Scale.apply(x, factor)
"""

HONEST = """
import torch
from torch import nn

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.factor, None

class ModelNew(nn.Module):
    def forward(self, x, factor):
        return Scale.apply(x, factor)
"""
