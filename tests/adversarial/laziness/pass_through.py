"""The input itself for the norm of data that happens to be normalised.

Seen in rule sets. Inputs of the judge are not what the benchmark draws: `numerics` shifts their mean and changes their scale,
and `impostor` proves for each set that the input itself would be refused.
"""

from tests.adversarial.case import Case

CASE = Case(18, "pass_through", "laziness", expected="numerics", status="open", seen=("KG", "WF"))

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.nn.functional.layer_norm(x, (x.shape[-1],))

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
        return x.clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)).contiguous()
"""
