"""In train mode a batch of another size, as the last one of an epoch, is normalised by the running statistics.

Seen as a path for the benchmark's batch and a fallback that nobody trained with. `grad` asks at other sizes in train mode as well.
"""

from tests.adversarial.case import Case

CASE = Case(
    31,
    "train_eval",
    "semantics",
    expected="grad",
    status="open",
    variant="other_batch",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        return self.norm(x)

def get_inputs():
    return [torch.randn(16, 32)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        norm = self.norm
        if self.training and x.shape[0] != 16:
            scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            return (x - norm.running_mean) * scale + norm.bias
        return norm(x)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        norm = self.norm
        if self.training:
            return norm(x)
        scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        return ((x - norm.running_mean) * scale + norm.bias).contiguous()
"""
