"""In train mode the result is the input itself, where eager makes a copy: whoever writes into the one changes the other.

Seen as a dropout of zero that hands its input on. `fresh_output` calls in eval mode; `mode` compares the memory too.
"""

from tests.adversarial.case import Case

CASE = Case(
    34,
    "wrong_alias",
    "state",
    expected="mode",
    status="open",
    variant="train_mode",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return x.clone()

def get_inputs():
    return [torch.randn(16, 32)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        return x if self.training else x.clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        return torch.empty_like(x).copy_(x)
"""
