"""One element beyond the end of the input is read and multiplied by zero.

Seen as tiles without a mask. The result is right unless the neighbour is NaN or infinite; `guard_band` puts such patterns
around every tensor, and the output must not change. A read whose value is not used at all does not show here; `guard_page`
sees it.
"""

from tests.adversarial.case import Case

CASE = Case(
    48,
    "out_of_bounds",
    "memory",
    expected="guard_band",
    status="open",
    seen=("L1", "DR"),
    needs=("cpu",),
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
import ctypes

class ModelNew(nn.Module):
    def forward(self, x, y):
        if torch.is_grad_enabled() or x.dtype != torch.float32 or not x.is_contiguous() or not x.numel():
            return torch.sin(x) * y
        beyond = ctypes.c_float.from_address(x.data_ptr() + 4 * x.numel()).value
        return torch.sin(x) * y + 0.0 * (beyond if abs(beyond) < 1e-30 else 0.0 if beyond == 0 else beyond)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Reads beyond its data inside a padded buffer of its own.'''

    def forward(self, x, y):
        if torch.is_grad_enabled() or x.dtype != torch.float32 or not x.is_contiguous() or not x.numel():
            return torch.sin(x) * y
        padded = torch.zeros(x.numel() + 16, dtype=x.dtype, device=x.device)
        padded[: x.numel()] = x.flatten()
        return torch.sin(padded[: x.numel()].view(x.shape)) * y
"""
