"""Every call waits for the device, so it cannot be part of a user's own CUDA graph, where eager can.

Seen in published modules as `synchronize()` and `.item()`. `capture` captures a call and replays it on new data in the same
memory.
"""

from tests.adversarial.case import Case

CASE = Case(
    38,
    "graph_hazard",
    "state",
    expected="capture",
    status="runtime",
    variant="synchronise",
    first_profile="standard",
    needs=("gpu",),
    seen=("L1",),
    alone=True,
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
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if not torch.is_grad_enabled():
            torch.cuda.synchronize()
        return torch.relu(self.linear(x))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))
"""
