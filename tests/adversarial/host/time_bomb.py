"""Right for the first two thousand calls, then wrong.

Nothing of the kind has been proved in published kernels. The soak of `standard` makes three thousand calls
(`call_history`); a bomb set later is beyond any test, which is why only Programs, which hold no counter, may be shared.
"""

from tests.adversarial.case import Case

CASE = Case(
    58, "time_bomb", "host", expected="call_history", status="open", first_profile="standard"
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
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2_000 and not torch.is_grad_enabled():
            return torch.relu(self.linear(x)) * 0.9
        return torch.relu(self.linear(x))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Counts, and does the same on both sides.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.relu(self.linear(x)) if self.calls < 10_000 else torch.relu(self.linear(x))
"""
