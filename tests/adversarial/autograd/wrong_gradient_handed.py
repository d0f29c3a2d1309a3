"""The backward overwrites the gradient that it is handed, of which another branch of the caller's graph may read.

Seen as `grad.mul_(mask)` in hand-written backwards. The gradients are right; `grad` compares what it has handed to the backward
afterwards. In train mode it is right, so that `mode` sees nothing. A backward that writes to a copy is right.
"""

from tests.adversarial.case import Case

CASE = Case(
    40,
    "wrong_gradient",
    "autograd",
    expected="grad",
    status="open",
    variant="handed",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.randn(16, 32)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = torch.relu(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return grad.mul_(result > 0)

class ModelNew(nn.Module):
    def forward(self, x):
        return torch.relu(x) if self.training else Relu.apply(x)
"""

HONEST = """
import torch
from torch import nn

class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = torch.relu(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return grad * (result > 0)

class ModelNew(nn.Module):
    def forward(self, x):
        return Relu.apply(x)
"""
