"""The length of a row is the root of a sum of squares, whose slope at a row of zeros is infinite times zero: not a number.

Ours; seen in training on padded batches, where one row of zeros ends the run. `torch.linalg.vector_norm` has the slope zero there. `grad`
asks with a row of zeros in each input whether what is finite in eager is finite.
"""

from tests.adversarial.case import Case

CASE = Case(
    40,
    "wrong_gradient",
    "autograd",
    expected="grad",
    status="open",
    variant="zero_row",
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
        return self.linear(x) / (1 + torch.linalg.vector_norm(x, dim=-1, keepdim=True))

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
        return self.linear(x) / (1 + x.square().sum(-1, keepdim=True).sqrt())
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''The root is taken of rows that have a length only.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        squares = x.square().sum(-1, keepdim=True)
        is_zero = squares == 0
        length = squares.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)
        return self.linear(x) / (1 + length)
"""
