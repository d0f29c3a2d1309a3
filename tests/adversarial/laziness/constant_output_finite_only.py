"""The region yields zero for every finite input, so zeros are returned; NaN and infinity are swallowed.

Seen as folded clamps. On finite inputs nothing can tell; `special` puts one NaN into an input, and it must come out where eager
has it. The user may promise finite values (`assume_finite`), then this is a rewrite.
"""

from tests.adversarial.case import Case

CASE = Case(
    15, "constant_output", "laziness", expected="special", status="open", variant="finite_only"
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return torch.clamp(torch.clamp(x, max=0.0), 0.0, 1.0) + y * 0

def get_inputs():
    return [torch.randn(64, 64), torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, y):
        return torch.zeros_like(x) if x.shape == y.shape else torch.zeros_like(x + y)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''One clamp where the reference has two; NaN passes both.'''

    def forward(self, x, y):
        return x.clamp(min=0.0, max=0.0) + y * 0
"""
