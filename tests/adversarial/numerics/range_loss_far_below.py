"""Between -40 and -32 the result is zero, where eager's is a hundredth of its input.

Seen as a table of values with a gap. Normal inputs come nowhere near, and among large ones few lie there; `regimes` has rows of
such values down to -1,024.
"""

from tests.adversarial.case import Case

CASE = Case(
    22,
    "range_loss",
    "numerics",
    expected="regimes",
    status="open",
    variant="far_below",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.nn.functional.leaky_relu(x)

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
        return torch.where((x > -40) & (x < -32), torch.zeros_like(x), torch.nn.functional.leaky_relu(x))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x, 0.01 * x)
"""
