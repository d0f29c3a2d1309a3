"""The backward reads what the last call of the module saved, so a model that calls it twice before `backward()` learns nonsense.

Seen as tensors that are kept on the module instead of the context. `grad` makes a second call on other inputs before the backward of
the first. A backward that reads its own context is right.
"""

from tests.adversarial.case import Case

CASE = Case(
    40,
    "wrong_gradient",
    "autograd",
    expected="grad",
    status="open",
    variant="last_call",
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

SAVED = {}

class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        SAVED["last"] = (x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, grad):
        x, gate = SAVED["last"]
        return grad * (gate + x * gate * (1 - gate))

class ModelNew(nn.Module):
    def forward(self, x):
        return Swish.apply(x)
"""

HONEST = """
import torch
from torch import nn

class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        return grad * (gate + x * gate * (1 - gate))

class ModelNew(nn.Module):
    def forward(self, x):
        return Swish.apply(x)
"""
