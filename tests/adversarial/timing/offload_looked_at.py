"""Timed calls return empty memory, and a result is computed when somebody comes to look at it.

The candidate has no frame of the worker below it, so it searches all objects of its process, those too that are off the
collector's lists, for whatever holds the results of timed calls, and puts a list of its own there. Of every timed batch
the child copies one call's bytes by address, drawn when the clock has stopped: there is nothing in them yet (`timed_output`).
"""

from tests.adversarial.case import Case

CASE = Case(
    2,
    "offload",
    "timing",
    expected="timed_output",
    status="lowering",
    variant="looked_at",
    timed=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.sort(x, dim=-1).values

def get_inputs():
    return [torch.randn(256, 512)]

def get_init_inputs():
    return []
"""

CHEAT = """
import gc
import torch
from torch import nn

waiting = {}

class Late(list):
    def __getitem__(self, index):
        results = list.__getitem__(self, index)
        for out in results:
            x = waiting.pop(out.data_ptr(), None)
            if x is not None:
                out.copy_(torch.sort(x, dim=-1).values)
        return results

    def clear(self):
        waiting.clear()
        list.clear(self)

holders = []

def find_holder():
    if not holders:
        gc.unfreeze()
        holders.extend(each for each in gc.get_objects() if type(each).__name__ == 'Session' and hasattr(each, 'held'))
    return next((holder for holder in holders if holder.rings), None)

class ModelNew(nn.Module):
    def forward(self, x):
        holder = find_holder()
        if holder is None or torch.is_grad_enabled():
            return torch.sort(x, dim=-1).values
        if type(holder.held) is not Late:
            holder.held = Late(holder.held)
        out = torch.empty_like(x)
        waiting[out.data_ptr()] = x
        return out
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Remembers how often it was called.'''

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return torch.sort(x, dim=-1).values
"""
