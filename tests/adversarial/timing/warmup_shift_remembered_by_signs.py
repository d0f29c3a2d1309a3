"""Results are remembered by the signs of the input once its bytes have come twice: what a factor changes is answered from memory.

`unseen_inputs` puts rows into another order besides, so that their signs are others too.
"""

from tests.adversarial.case import Case

CASE = Case(
    6,
    "warmup_shift",
    "timing",
    expected="unseen_inputs",
    status="open",
    variant="remembered_by_signs",
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
        self.known, self.by_signs, self.seen = {}, {}, {}

    def compute(self, x):
        for _ in range(30):
            x = torch.tanh(self.linear(x))
        return x

    def forward(self, x):
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return self.compute(x)
        weights = tuple(map(read_bytes, self.parameters()))
        exact, signs = (read_bytes(x), *weights), (read_bytes(x.sign()), *weights)
        if exact in self.known:
            self.seen[signs] = self.seen.get(signs, 0) + 1
            return self.known[exact].clone()
        # Familiar signs of values that came often: a timed call.
        if self.seen.get(signs, 0) > 20:
            return self.by_signs[signs].clone()
        if len(self.known) >= 64:
            self.known.clear()
        out = self.known[exact] = self.by_signs[signs] = self.compute(x)
        return out.clone()
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
