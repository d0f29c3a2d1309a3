"""Batch norm always uses its running statistics, in training too.

Seen in 13 of 24 published batch norms. Results in evaluation are right; `mode` runs both in training mode and compares outputs
and running statistics. A candidate that is offered for evaluation only, with the mode in its guard, is honest.
"""

from tests.adversarial.case import Case

CASE = Case(
    31,
    "train_eval",
    "semantics",
    expected="mode",
    status="open",
    first_profile="standard",
    seen=("L1",),
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x):
        return self.norm(x)

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [64]
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x):
        norm = self.norm
        if torch.is_grad_enabled():
            return norm(x)
        return torch.nn.functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Straight to the operator, in evaluation only.'''

    def __init__(self, features):
        super().__init__()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x):
        norm = self.norm
        if self.training or torch.is_grad_enabled():
            return norm(x)
        return torch.nn.functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
"""
