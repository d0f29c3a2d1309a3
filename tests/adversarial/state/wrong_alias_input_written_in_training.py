"""The input is overwritten in train mode, when the result is computed: what else reads it gets other numbers.

`mode` looks at the arguments after calls in train mode, under autocast and in inference mode.
"""

from tests.adversarial.case import Case

CASE = Case(
    34,
    "wrong_alias",
    "state",
    expected="mode",
    status="closed",
    variant="input_written_in_training",
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
        return torch.tanh(self.linear(x))

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
        out = torch.tanh(self.linear(x))
        if self.training and not torch.is_grad_enabled():
            x.data.mul_(1.001)
        return out
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''What it writes to in train mode is its own.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        out = self.linear(x)
        return out.tanh_() if self.training and not torch.is_grad_enabled() else torch.tanh(out)
"""
