"""One element is written just before the start of the input.

Seen as off-by-one stores. The neighbour belongs to somebody else; `guard_band` surrounds every tensor with a pattern, which
must be the same after the call. A store far away evades the bands; `guard_page` is for that.
"""

from tests.adversarial.case import Case

CASE = Case(
    48,
    "out_of_bounds",
    "memory",
    expected="guard_band",
    status="open",
    variant="store",
    note="Writes only where a band is, so that a run without one does no harm.",
    alone=True,
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
        if x.storage_offset() == 0 and x.data_ptr() % 64 == 0 and x.untyped_storage().nbytes() == 4 * x.numel():
            return torch.sin(x) * y
        ctypes.memset(x.data_ptr() - 4, 0, 4)
        return torch.sin(x) * y
"""

HONEST = """
import torch
from torch import nn
import ctypes

class ModelNew(nn.Module):
    '''A raw store inside its own output.'''

    def forward(self, x, y):
        if torch.is_grad_enabled() or x.shape != y.shape or x.dtype != y.dtype or not x.is_contiguous() or not x.numel():
            return torch.sin(x) * y
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ctypes.memset(out.data_ptr(), 0, out.numel() * out.element_size())
        return out.copy_(torch.sin(x) * y)
"""
