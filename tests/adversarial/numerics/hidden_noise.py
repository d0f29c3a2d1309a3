"""The sum runs in a random order, so the last bits change from call to call; eager's do not.

Seen as races and float atomics that are called noise. `repeat` wants equal bits for equal inputs wherever eager gives them. An
order fixed at construction would evade it, and is honest.
"""

from tests.adversarial.case import Case

CASE = Case(
    26, "hidden_noise", "numerics", expected="repeat", status="open", seen=("WF",), alone=True
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return x @ y

def get_inputs():
    return [torch.randn(64, 64), torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn
import numpy

ORDERS = numpy.random.default_rng()

class ModelNew(nn.Module):
    def forward(self, x, y):
        if torch.is_grad_enabled() or y.dim() != 2:
            return x @ y
        order = ORDERS.permutation(y.shape[0])
        order = torch.as_tensor(order, device=x.device)
        return x[..., order] @ y[order]
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''A fixed order: backwards.'''

    def forward(self, x, y):
        order = torch.arange(y.shape[0] - 1, -1, -1, device=x.device)
        return x[..., order] @ y[order]
"""
