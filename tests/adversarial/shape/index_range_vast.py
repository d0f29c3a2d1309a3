"""Elements are counted in 32 bits: what lies beyond 2^31 of them is not computed.

Seen as `int` offsets in CUDA C++. Nothing shows below 8 GiB of float32. `shapes` at `strict` makes inputs of that many elements
where there is memory for it, in the process that uses them, and compares pieces from all over the output.
"""

from tests.adversarial.case import Case

CASE = Case(
    45,
    "index_range",
    "shape",
    expected="shapes",
    status="open",
    variant="vast",
    first_profile="strict",
    needs=("gpu", "gpu_memory"),
    seen=("L1",),
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.randn(64, 1024)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        if x.numel() < 2**31:
            return torch.relu(x)
        rows = (2**31 - 1) // x[0].numel()
        return torch.cat([torch.relu(x[:rows]), x[rows:]])
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        if x.numel() < 2**31:
            return torch.relu(x)
        rows = (2**31 - 1) // x[0].numel()
        return torch.cat([torch.relu(part) for part in x.split(rows)])
"""
