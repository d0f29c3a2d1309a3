"""A result of the last call is kept with its graph: a used module can be neither copied nor pickled.

Seen in twelve published modules, whose deepcopy fails. `update_path` writes new weights to a deep copy of a used instance; `mode`,
asked later, copies and pickles one and compares what the copies yield.
"""

from tests.adversarial.case import Case

CASE = Case(
    42,
    "works_once",
    "autograd",
    expected="update_path",
    status="runtime",
    variant="uncopyable",
    first_profile="standard",
    seen=("L1",),
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
import threading

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        out = torch.relu(self.linear(x))
        self.__dict__["last"] = (lambda: out)
        self.__dict__["lock"] = self.__dict__.get("lock") or threading.Lock()
        return out.clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Keeps a shape.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        out = torch.relu(self.linear(x))
        self.__dict__["last"] = tuple(out.shape)
        return out
"""
