"""The memory of indices is read as numbers of 64 bits, whatever type they have.

Ours; seen in kernels that are handed a pointer and no type. Tokenizers and samplers yield indices of 32 bits too, which eager takes.
`dtypes` asks with them.
"""

from tests.adversarial.case import Case

CASE = Case(
    45,
    "index_range",
    "shape",
    expected="dtypes",
    status="open",
    variant="narrow",
    first_profile="standard",
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)

    def forward(self, words):
        return self.table(words) * 2

def get_inputs():
    return [torch.randint(0, 50, (8, 6))]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)

    def forward(self, words):
        whole = words.contiguous().view(-1).view(torch.int64)
        rows = self.table.weight[whole.clamp(0, 49)].repeat(words.numel() // whole.numel(), 1)
        return rows.view(*words.shape, 16) * 2
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Widens them first.'''

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)

    def forward(self, words):
        whole = words.long().contiguous().view(-1)
        return self.table.weight[whole].view(*words.shape, 16) * 2
"""
