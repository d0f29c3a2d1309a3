"""The backward reads the result that its caller holds, and may have changed, past autograd's own record of changes.

PyTorch raises when a saved result was changed in place. Here the gradient is silently another; `grad` doubles the result before
it asks. The twin saves the result as PyTorch wants it, and raises.
"""

from tests.adversarial.case import Case

CASE = Case(
    40,
    "wrong_gradient",
    "autograd",
    expected="grad",
    status="open",
    variant="changed_result",
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
        ctx.result = result
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.result.detach() * grad

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
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad

class ModelNew(nn.Module):
    def forward(self, x):
        return Exp.apply(x)
"""
