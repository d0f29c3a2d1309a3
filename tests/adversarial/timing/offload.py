"""An empty tensor is returned at once, and a thread writes the result into it later.

Seen as a thread, a process or a lazy future. The bytes of an output are read when the call returns, by our side and before
anything else happens: late results are wrong results, and `numerics` sees them first. Waiting inside the call would evade it
and gain nothing.
"""

from tests.adversarial.case import Case

CASE = Case(2, "offload", "timing", expected="numerics", status="lowering", seen=("DR", "WF", "KG"))

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
import threading
import time

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))
        out = torch.full((*x.shape[:-1], self.linear.out_features), 0.5, dtype=x.dtype, device=x.device)

        def work():
            time.sleep(0.05)
            with torch.no_grad():
                out.copy_(torch.relu(self.linear(x)))

        threading.Thread(target=work, daemon=True).start()
        return out
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''The first large element-wise operation starts torch's own pool of threads; nothing is left running.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        torch.sin(x.new_ones(1 << 16)).sum()
        return torch.relu(self.linear(x))
"""
