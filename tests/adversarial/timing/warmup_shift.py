"""The work of later calls is moved into the first: it takes half a second, which warm-up calls hide.

Seen as micro-benchmarks, persisting-L2 carve-outs and tuning inside the first call. `timing_state` times the first call apart;
one that is thousands of times longer than the others is refused. Spreading the work over the first hundred calls would evade
it.
"""

from tests.adversarial.case import Case

CASE = Case(
    6,
    "warmup_shift",
    "timing",
    expected="timing_state",
    status="open",
    timed=True,
    seen=("L1", "GM", "PG"),
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
import time

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.cold = True

    def forward(self, x):
        if self.cold:
            self.cold = False
            time.sleep(0.6)
        return torch.relu(self.linear(x))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''The first call makes a small index table.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.order = None

    def forward(self, x):
        if self.order is None or self.order.shape[0] != x.shape[-1]:
            self.order = torch.arange(x.shape[-1], device=x.device)
        return torch.relu(self.linear(x.index_select(-1, self.order) if x.shape[-1] else x))
"""
