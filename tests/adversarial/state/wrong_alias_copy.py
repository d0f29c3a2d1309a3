"""A copy is returned where eager returns a view: what the caller writes into the result no longer reaches the input.

Ours. `fresh_output` compares sharing both ways: memory that eager shares must be shared.
"""

from tests.adversarial.case import Case

CASE = Case(34, "wrong_alias", "state", expected="fresh_output", status="closed", variant="copy")

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return x.t()

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
        view = x.t()
        if torch.is_grad_enabled():
            return view
        return torch.empty_strided(view.shape, view.stride(), dtype=x.dtype, device=x.device).copy_(view)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''The view by another name.'''

    def forward(self, x):
        return x.permute(1, 0)
"""
