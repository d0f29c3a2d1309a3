"""Running statistics are taken for zero mean and unit variance, as they are before any training.

Seen in published batch norms. Buffers are drawn too: variances between a half and two (`numerics`).
"""

from tests.adversarial.case import Case

CASE = Case(
    28, "initial_parameters", "semantics", expected="numerics", status="open", variant="statistics"
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
        if self.training:
            return self.norm(x)
        return x * (self.norm.weight * (1 + self.norm.eps) ** -0.5) + self.norm.bias
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x):
        norm = self.norm
        if self.training or torch.is_grad_enabled():
            return norm(x)
        return torch.nn.functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
"""
