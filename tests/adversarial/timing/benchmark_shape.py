"""Right for the published size only; every other batch is cut into pieces of that size, and what is left over is not computed.

Seen in published kernels as literals equal to the benchmark's sizes. `shapes` holds out sizes: half the batch, 1, primes, a
tile plus and minus one. A candidate that guards its size and says so is judged on its guard only.
"""

from tests.adversarial.case import Case

CASE = Case(5, "benchmark_shape", "timing", expected="shapes", status="open", seen=("L1", "KG"))

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
        if x.shape[0] == 64:
            return torch.relu(self.linear(x))
        whole = x.shape[0] // 64 * 64
        out = x.new_zeros(*x.shape[:-1], self.linear.out_features)
        out[:whole] = torch.relu(self.linear(x[:whole]))
        return out
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''A path of its own for the published size, the general one for the others: both right.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if x.shape == (64, 64):
            return torch.addmm(self.linear.bias, x, self.linear.weight.t()).relu_()
        return torch.relu(self.linear(x))
"""
