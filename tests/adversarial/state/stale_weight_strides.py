"""The weight's memory is read in the order that the constructor gave it, whatever its strides are.

Ours. `module.to(memory_format=torch.channels_last)` moves the elements and keeps the shape, as programs do that serve convolutions in
half precision. `update_path` lays weights out so.
"""

from tests.adversarial.case import Case

CASE = Case(
    35,
    "stale_weight",
    "state",
    expected="update_path",
    status="runtime",
    variant="strides",
    first_profile="standard",
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(x))

def get_inputs():
    return [torch.randn(2, 8, 12, 12)]

def get_init_inputs():
    return [8]
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        weight = self.conv.weight
        _, c, h, w = weight.shape
        weight = torch.as_strided(weight, weight.shape, (c * h * w, h * w, w, 1))
        return torch.relu(nn.functional.conv2d(x, weight, self.conv.bias, padding=1))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Puts the weight into that order first.'''

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        weight = self.conv.weight.contiguous()
        _, c, h, w = weight.shape
        weight = torch.as_strided(weight, weight.shape, (c * h * w, h * w, w, 1))
        return torch.relu(nn.functional.conv2d(x, weight, self.conv.bias, padding=1))
"""
