"""Where the input wants no gradient the layer computes without one: as a model's first layer it never learns.

Seen as an inference path that asks the input instead of the grad mode. With gradients wanted of the input everything is right;
`grad` asks once more for those of the parameters alone. A candidate that asks both, parameters too, is right.
"""

from tests.adversarial.case import Case

CASE = Case(
    39,
    "no_gradient",
    "autograd",
    expected="grad",
    status="closed",
    variant="first_layer",
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
    return [torch.randn(16, 32)]

def get_init_inputs():
    return [32]
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if x.requires_grad:
            return torch.relu(self.linear(x))
        with torch.no_grad():
            return self.linear(x).relu_()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        result = self.linear(x)
        return torch.relu(result) if result.requires_grad else result.relu_()
"""
