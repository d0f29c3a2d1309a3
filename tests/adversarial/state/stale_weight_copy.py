"""The forward holds the layer itself, so a deep copy of the module computes with its original's weights.

Ours. Programs copy a module to average its weights, to train a second one or to quantise it: the copy gets weights of its own and answers
with those of the other. `update_path` writes new weights into a copy.
"""

from tests.adversarial.case import Case

CASE = Case(
    35,
    "stale_weight",
    "state",
    expected="update_path",
    status="runtime",
    variant="copy",
    first_profile="standard",
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))

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
        linear = self.linear = nn.Linear(features, features)
        self.compute = lambda x: nn.functional.linear(x, linear.weight, linear.bias)

    def forward(self, x):
        return torch.relu(self.compute(x))
"""

HONEST = """
import torch
from torch import nn

def compute(linear, x):
    return nn.functional.linear(x, linear.weight, linear.bias)

class ModelNew(nn.Module):
    '''What the forward calls is handed the layer of this module.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.compute = compute

    def forward(self, x):
        return torch.relu(self.compute(self.linear, x))
"""
