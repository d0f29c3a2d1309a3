"""The backward multiplies what the forward saved in place, so that a second one over the same graph is wrong.

Seen as a buffer that a hand-written backward writes its result into. `retain_graph=True` is how losses are added one by one;
`grad` asks for it, and an error would be an answer.
"""

from tests.adversarial.case import Case

CASE = Case(
    40,
    "wrong_gradient",
    "autograd",
    expected="grad",
    status="open",
    variant="second_backward",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.exp(x)

def get_inputs():
    return [torch.randn(16, 32)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = torch.exp(x)
        ctx.slope = result.clone()
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.slope.mul_(grad)

class ModelNew(nn.Module):
    def forward(self, x):
        return torch.exp(x) if self.training else Exp.apply(x)
"""

HONEST = """
import torch
from torch import nn

class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = torch.exp(x)
        ctx.slope = result.clone()
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.slope * grad

class ModelNew(nn.Module):
    def forward(self, x):
        return Exp.apply(x)
"""
