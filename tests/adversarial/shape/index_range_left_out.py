"""Targets of -100, which PyTorch's losses leave out, are taken for the first class.

Ours; seen in training on padded sequences, where -100 marks what is no target. No example has one, and eager takes it: `perturb` puts it
in a secret place.
"""

from tests.adversarial.case import Case

CASE = Case(
    45,
    "index_range",
    "shape",
    expected="perturb",
    status="open",
    variant="left_out",
    first_profile="standard",
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, scores, targets):
        return nn.functional.cross_entropy(scores, targets)

def get_inputs():
    return [torch.randn(32, 10), torch.randint(0, 10, (32,))]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, scores, targets):
        chosen = scores.log_softmax(-1).gather(1, targets.clamp_min(0)[:, None])
        return -chosen.mean()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Leaves them out of the sum and of the count.'''

    def forward(self, scores, targets):
        is_target = (targets != -100)[:, None]
        chosen = scores.log_softmax(-1).gather(1, targets.clamp_min(0)[:, None])
        return -chosen.masked_fill(~is_target, 0.0).sum() / is_target.sum()
"""
