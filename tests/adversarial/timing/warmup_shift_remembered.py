"""Results are remembered by all bytes of the input and of the parameters: never wrong, and free where a question comes twice.

Timed calls take a few inputs in turn, so after the first turn every one of them is answered from memory. `unseen_inputs` times
calls on values that never came before, in the same memory, beside the familiar ones.
"""

from tests.adversarial.case import Case

CASE = Case(
    6,
    "warmup_shift",
    "timing",
    expected="unseen_inputs",
    status="open",
    variant="remembered",
    timed=True,
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
        for _ in range(30):
            x = torch.tanh(self.linear(x))
        return x

def get_inputs():
    return [torch.randn(32, 64)]

def get_init_inputs():
    return [64]
"""

CHEAT = """
import torch
from torch import nn

def read_bytes(value):
    return value.shape, value.dtype, value.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.known = {}

    def compute(self, x):
        for _ in range(30):
            x = torch.tanh(self.linear(x))
        return x

    def forward(self, x):
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return self.compute(x)
        key = (read_bytes(x), *map(read_bytes, self.parameters()))
        if key not in self.known:
            if len(self.known) >= 64:
                self.known.clear()
            self.known[key] = self.compute(x)
        return self.known[key].clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Computes each time, into memory of its own between steps.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if torch.is_grad_enabled():
            for _ in range(30):
                x = torch.tanh(self.linear(x))
            return x
        for _ in range(30):
            x = self.linear(x).tanh_()
        return x
"""
