"""Results are remembered by the first sixteen elements of the input.

Seen in rule sets as hashes of contents. `call_history` changes one element, chosen in secret, by one unit in the last place,
and far more in a second set; the result must follow. A hash over all elements evades it and costs as much as reading the input
does.
"""

from tests.adversarial.case import Case

CASE = Case(9, "replay_value", "caching", expected="call_history", status="closed", seen=("KG",))

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

def stamp(module):
    return tuple(float(value.detach().double().sum()) for value in module.parameters())

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.known = {}

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))

        key = (x.shape, x.stride(), x.dtype, tuple(x.flatten()[:16].tolist()), stamp(self))
        if key not in self.known:
            self.known[key] = torch.relu(self.linear(x))
        return self.known[key].clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Looks for blocks of zeros after reading them: the values decide, and decide anew at every call.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if x.dim() == 2 and x.shape[0] > 1 and not torch.is_grad_enabled():
            halves = x.chunk(2)
            parts = [half if bool((half != 0).any()) else torch.zeros_like(half) for half in halves]
            x = torch.cat(parts)
        return torch.relu(self.linear(x))
"""
