"""An in-place operator on a tensor that the backward needs: the first `backward()` raises.

Seen in 23 published modules. Without gradients nothing is wrong, and no benchmark asks for gradients; `grad` does.
"""

from tests.adversarial.case import Case

CASE = Case(41, "training_crash", "autograd", expected="grad", status="closed", seen=("L1",))

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.exp(self.linear(x)) * 0.5

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [64]
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.exp(self.linear(x)).mul_(0.5)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''No operator writes what the backward needs.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return 0.5 * torch.exp(self.linear(x))
"""
