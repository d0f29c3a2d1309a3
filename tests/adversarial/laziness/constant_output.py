"""Zeros of the right shape.

Seen in the published set and at Sakana. `numerics` refuses it wherever the output is not almost zero itself; references for
which it is not refused are found by `impostor`, see the variant `degenerate`. A tolerance far above the output's scale would
let it pass.
"""

from tests.adversarial.case import Case

CASE = Case(
    15, "constant_output", "laziness", expected="numerics", status="open", seen=("L1", "SK")
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, 1) * 1e-3

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        return x * 0
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        return torch.softmax(x - x.detach().amax(1, keepdim=True), 1) * 1e-3
"""
