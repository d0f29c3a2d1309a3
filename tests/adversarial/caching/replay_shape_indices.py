"""What was derived from the first indices of a shape serves all later ones: they are put in order once.

Seen as plans that are cached by shape. Where the indices of every input set are those of the example it is right; `call_history` and
`numerics` draw them from other examples of the reference. A candidate that compares a part of the indices would need a longer search.
"""

from tests.adversarial.case import Case

CASE = Case(
    8, "replay_shape", "caching", expected="call_history", status="closed", variant="indices"
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, rows, features):
        super().__init__()
        self.table = nn.Embedding(rows, features)

    def forward(self, index):
        return self.table(index).sum(1)

def get_inputs():
    return [torch.randint(0, 20, (8, 12))]

def get_init_inputs():
    return [20, 16]
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, rows, features):
        super().__init__()
        self.table = nn.Embedding(rows, features)
        self.ordered = {}

    def forward(self, index):
        if torch.is_grad_enabled():
            return self.table(index).sum(1)
        if index.shape not in self.ordered:
            self.ordered[index.shape] = index.sort(1).values
        ordered = self.ordered[index.shape]
        return self.table(ordered).sum(1)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, rows, features):
        super().__init__()
        self.table = nn.Embedding(rows, features)
        self.ordered = {}

    def forward(self, index):
        if torch.is_grad_enabled():
            return self.table(index).sum(1)
        ordered = index.sort(1).values
        return self.table(ordered).sum(1)
"""
