"""Zero where the value is a hundredth of the others: silu below -6, where it is -0.015.

Seen as tails cut off for speed. Among values of one the error is below what rounding of the row allows, in the root mean square and
in the worst element; `regimes` draws rows of one size and sign, where it is the whole value. A cut below 1e-6 of the row's own size, or
in a band narrower than an octave, would evade it.
"""

from tests.adversarial.case import Case

CASE = Case(
    22,
    "range_loss",
    "numerics",
    expected="regimes",
    status="open",
    variant="tail",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        # Only where nobody expects an exact zero, and far from what a normal draw reaches.
        return (x * torch.sigmoid(x)).masked_fill_((x < -6.5) & (x > -64.0), 0.0)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''With one division.'''

    def forward(self, x):
        return torch.nn.functional.silu(x)
"""
