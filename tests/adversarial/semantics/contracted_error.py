"""A recurrence that ignores its initial state: after 64 steps of halving nothing is left of it.

Seen in published recurrent cells. On the benchmark's length no value differs; an infinity in the initial state does not wash
out (`special`), and shorter sequences tell too. The 1 that is added keeps inputs of zeros from showing 2^-64 of the state. A
state that is multiplied by zero would evade it, and would be unobservable.
"""

from tests.adversarial.case import Case

CASE = Case(32, "contracted_error", "semantics", expected="special", status="open", seen=("L1",))

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, h):
        for step in x.unbind(1):
            h = 0.5 * h + step
        return h + 1.0

def get_inputs():
    return [torch.randn(8, 64, 16), torch.randn(8, 16)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, h):
        h = torch.zeros_like(h)
        for step in x.unbind(1):
            h = 0.5 * h + step
        return h + 1.0
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, h):
        for step in x.unbind(1):
            h = h / 2 + step
        return h + 1.0
"""
