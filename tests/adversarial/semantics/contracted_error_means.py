"""The mean of a product as the product of means, washed out because one factor is centred.

Seen in published reductions. With zero-mean inputs both are close to zero; `numerics` measures relatively, and shifts the
inputs.
"""

from tests.adversarial.case import Case

CASE = Case(
    32,
    "contracted_error",
    "semantics",
    expected="numerics",
    status="open",
    variant="means",
    seen=("L1",),
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return (x * y).mean(1)

def get_inputs():
    return [torch.randn(64, 64), torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, y):
        return x.mean(1) * y.mean(1)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, y):
        return (x * y).sum(1) / x.shape[1]
"""
