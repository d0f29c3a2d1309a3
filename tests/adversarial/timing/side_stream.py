"""The product runs on a stream of its own that nobody waits for, so events on the caller's stream see no work.

Seen in published kernels and rule sets. `stream_order` reads the result, and overwrites the input, on the caller's stream
without a device-wide synchronisation: the bytes are wrong. Joining only where a test looks evades it; see the variant `aware`.
"""

from tests.adversarial.case import Case

CASE = Case(
    1,
    "side_stream",
    "timing",
    expected="stream_order",
    status="lowering",
    needs=("gpu",),
    seen=("DR", "KB", "GM", "KG"),
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
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [64]
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

        with torch.cuda.stream(self.other):
            return torch.relu(self.linear(x))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''The same, joined by events both ways.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))

        here = torch.cuda.current_stream()
        other = torch.cuda.Stream()
        other.wait_stream(here)
        with torch.cuda.stream(other):
            out = torch.relu(self.linear(x))
            x.record_stream(other)
        here.wait_stream(other)
        out.record_stream(here)
        return out
"""
