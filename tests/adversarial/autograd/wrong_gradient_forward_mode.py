"""Backward is right, and forward-mode derivatives (`jvp`) are those of another function.

From `standard` on `mode` asks for derivatives along a direction and for `vmap`, where the reference has them; an error is an answer.
"""

from tests.adversarial.case import Case

CASE = Case(
    40,
    "wrong_gradient",
    "autograd",
    expected="mode",
    status="open",
    variant="forward_mode",
    first_profile="standard",
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.softmax(x, -1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, g):
        y, = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))

    @staticmethod
    def jvp(ctx, t):
        y, = ctx.saved_tensors
        return y * t

class ModelNew(nn.Module):
    def forward(self, x):
        return Softmax.apply(x)
"""

HONEST = """
import torch
from torch import nn

class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.softmax(x, -1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, g):
        y, = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))

    @staticmethod
    def jvp(ctx, t):
        y, = ctx.saved_tensors
        return y * (t - (t * y).sum(-1, keepdim=True))

class ModelNew(nn.Module):
    '''The same with its own derivative.'''

    def forward(self, x):
        return Softmax.apply(x)
"""
