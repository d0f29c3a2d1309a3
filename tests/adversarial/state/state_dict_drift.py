"""The layer has another name, so a checkpoint of the reference does not load.

Seen in 89 of 156 published modules with state. Names, shapes and dtypes of the state are compared with the reference's when the
module is made (`mode`); nothing is loaded loosely.
"""

from tests.adversarial.case import Case

CASE = Case(37, "state_dict_drift", "state", expected="mode", status="closed", seen=("L1",))

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
        self.dense = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.dense(x))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Another formula over the same names.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(torch.nn.functional.linear(x, self.linear.weight, self.linear.bias))
"""
