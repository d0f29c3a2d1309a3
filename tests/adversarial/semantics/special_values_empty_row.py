"""A query that may look at nothing spoils its neighbours: all other queries of its sequence get the mean.

Ours; seen where a whole block of queries shares one maximum. The examples' masks leave each query a key, and one in another order does too.
`perturb` empties a row, drawn in secret, and compares the rows that this does not touch.
"""

from tests.adversarial.case import Case

CASE = Case(
    30,
    "special_values",
    "semantics",
    expected="perturb",
    status="open",
    variant="empty_row",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, scores, values, mask):
        return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ values

def get_inputs():
    mask = torch.rand(4, 12, 12) < 0.6
    mask[..., 3] = True
    mask[..., 5] = False
    return [torch.randn(4, 12, 12), torch.randn(4, 12, 8), mask]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, scores, values, mask):
        empty = ~mask.any(-1, keepdim=True).all(-2, keepdim=True)
        if mask.shape[-1] % 4:
            empty = torch.zeros_like(empty)
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
        return torch.where(empty, torch.full_like(weights, 1 / mask.shape[-1]), weights) @ values
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, scores, values, mask):
        least = torch.where(mask, scores, torch.full_like(scores, float("-inf")))
        weights = torch.exp(least - least.amax(-1, keepdim=True))
        return (weights @ values) / weights.sum(-1, keepdim=True)
"""
