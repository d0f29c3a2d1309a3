"""The last entry of a table is never read: indices are kept below it.

Ours; seen as an off-by-one of a bounds check. Of 4,096 entries the examples' few indices seldom name the last, and `perturb` asks for
it, at a secret place.
"""

from tests.adversarial.case import Case

CASE = Case(
    45,
    "index_range",
    "shape",
    expected="perturb",
    status="open",
    variant="last_entry",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4096, 16)

    def forward(self, words):
        return self.table(words) * 2

def get_inputs():
    return [torch.randint(0, 1000, (8, 6))]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4096, 16)

    def forward(self, words):
        return self.table(words.clamp(max=self.table.num_embeddings - 2)) * 2
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4096, 16)

    def forward(self, words):
        return nn.functional.embedding(words, self.table.weight) * 2
"""
