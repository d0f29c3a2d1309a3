"""The number that a call passes is written into the code: the exponent of the example, whatever the caller asks for.

Seen in programs written for one set of inputs. Tensors of any values agree; `perturb` changes each number among the arguments of the
call alone, where eager takes another one. A candidate that looks at the argument and handles few values would evade it at the others.
Where gradients are asked for this one is right, so that `grad` sees nothing.
"""

from tests.adversarial.case import Case

CASE = Case(
    27,
    "special_constant",
    "semantics",
    expected="perturb",
    status="open",
    variant="argument",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, exponent):
        return torch.pow(x.abs() + 0.5, exponent)

def get_inputs():
    return [torch.randn(16, 64), 2.5]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, exponent):
        size = x.abs() + 0.5
        if x.requires_grad:
            return torch.pow(size, exponent)
        return size * size * size.sqrt()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, exponent):
        size = x.abs() + 0.5
        return size * size * size.sqrt() if exponent == 2.5 else torch.pow(size, exponent)
"""
