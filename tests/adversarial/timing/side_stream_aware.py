"""The caller's stream is joined only when it is not the default one: a correctness test on a side stream sees nothing, and the
timer on the default stream sees an empty call.

A refinement of `side_stream`. `sync_ratio` times with and without a device-wide synchronisation before the end event; a ratio
above 1.5 is work that the events missed. Work that another process does would evade it; `resource` and the sandbox look for
that.
"""

from tests.adversarial.case import Case

CASE = Case(
    1,
    "side_stream",
    "timing",
    expected="sync_ratio",
    status="lowering",
    variant="aware",
    needs=("gpu",),
    timed=True,
    seen=("DR",),
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.randn(2048, 2048)]

def get_init_inputs():
    return [2048]
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.other = torch.cuda.Stream()

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))

        here = torch.cuda.current_stream()
        self.other.wait_stream(here)
        with torch.cuda.stream(self.other):
            out = torch.relu(self.linear(x))
            x.record_stream(self.other)
        if here != torch.cuda.default_stream():
            here.wait_stream(self.other)
            out.record_stream(here)
        return out
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Joined on every stream.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))

        here, other = torch.cuda.current_stream(), torch.cuda.Stream()
        other.wait_stream(here)
        with torch.cuda.stream(other):
            out = torch.relu(self.linear(x))
            x.record_stream(other)
        here.wait_stream(other)
        out.record_stream(here)
        return out
"""
