"""The scale is folded into the weight after every load of a state dict, by a hook.

Ours. Loading works, and what is stored is no longer what was loaded: a plain write into a parameter is not scaled
(`update_path`), and gradients are those of the scaled weight (`grad`).
"""

from tests.adversarial.case import Case

CASE = Case(
    36, "same_key_other_meaning", "state", expected="update_path", status="closed", variant="hook"
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features, scale):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.scale = scale

    def forward(self, x):
        return self.linear(x) * self.scale

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [64, 0.5]
"""

CHEAT = """
import torch
from torch import nn

def fold(module, keys):
    with torch.no_grad():
        module.linear.weight.mul_(module.scale)
        module.linear.bias.mul_(module.scale)

class ModelNew(nn.Module):
    def __init__(self, features, scale):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.scale = scale
        self.register_load_state_dict_post_hook(fold)
        fold(self, None)

    def forward(self, x):
        return self.linear(x)
"""

HONEST = """
import torch
from torch import nn

def note(module, keys):
    module.loads.append(len(keys.missing_keys))

class ModelNew(nn.Module):
    '''A hook that only counts.'''

    def __init__(self, features, scale):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.scale = scale
        self.loads = []
        self.register_load_state_dict_post_hook(note)

    def forward(self, x):
        return (x * self.scale) @ self.linear.weight.t() + self.linear.bias * self.scale
"""
