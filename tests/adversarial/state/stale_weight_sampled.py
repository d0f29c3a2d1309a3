"""A product of weights is kept, and made anew when one of a few sampled weights has moved; a change elsewhere goes unseen.

Seen as cheap checksums of parameters. An optimizer's step moves every weight and is noticed; `update_path` moves a single one, at a place
drawn in secret. A checksum over all bits is honest, and costs a pass over the weights.
"""

from tests.adversarial.case import Case

CASE = Case(
    35,
    "stale_weight",
    "state",
    expected="update_path",
    status="runtime",
    variant="sampled",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.first = nn.Linear(features, features, bias=False)
        self.second = nn.Linear(features, features, bias=False)

    def forward(self, x):
        return x @ (self.first.weight @ self.second.weight)

def get_inputs():
    return [torch.randn(4, 64)]

def get_init_inputs():
    return [64]
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.first = nn.Linear(features, features, bias=False)
        self.second = nn.Linear(features, features, bias=False)
        self.kept = None

    def forward(self, x):
        first, second = self.first.weight, self.second.weight
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return x @ (first @ second)
        look = [weight.reshape(-1)[::509] for weight in (first, second)]
        kept = self.kept
        if kept is None or any(a.dtype != b.dtype or not torch.equal(a, b) for a, b in zip(look, kept[0])):
            kept = self.kept = ([part.clone() for part in look], first @ second)
        return x @ kept[1]
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.first = nn.Linear(features, features, bias=False)
        self.second = nn.Linear(features, features, bias=False)
        self.kept = None

    def forward(self, x):
        first, second = self.first.weight, self.second.weight
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return x @ (first @ second)
        look = [weight.reshape(-1) for weight in (first, second)]
        kept = self.kept
        if kept is None or any(a.dtype != b.dtype or not torch.equal(a, b) for a, b in zip(look, kept[0])):
            kept = self.kept = ([part.clone() for part in look], first @ second)
        return x @ kept[1]
"""
