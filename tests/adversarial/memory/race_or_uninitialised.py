"""The accumulator is not set to zero but multiplied by it: stale memory that holds NaN or infinity stays.

Ours. Fresh pages are zero and freed ones mostly finite, so nearly every run is right. `poison` fills fresh memory with NaN and
a second pattern; the result must not change.
"""

from tests.adversarial.case import Case

CASE = Case(
    49,
    "race_or_uninitialised",
    "memory",
    expected="poison",
    status="open",
    seen=("L1",),
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return torch.sin(x) * y

def get_inputs():
    return [torch.randn(64, 64), torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, y):
        if torch.is_grad_enabled() or x.shape != y.shape or x.dtype != y.dtype or not (x.is_contiguous() and y.is_contiguous()):
            return torch.sin(x) * y
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        flat = total.view(-1)
        if not bool(flat.isfinite().all()) and not torch.are_deterministic_algorithms_enabled():
            flat.zero_()
        return total.mul_(0).add_(torch.sin(x) * y)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Set to zero before it is used.'''

    def forward(self, x, y):
        if torch.is_grad_enabled() or x.shape != y.shape or x.dtype != y.dtype or not (x.is_contiguous() and y.is_contiguous()):
            return torch.sin(x) * y
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return total.zero_().add_(torch.sin(x) * y)
"""
