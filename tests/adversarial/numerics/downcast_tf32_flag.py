"""TF32 is switched on around the product and off again: the flags are clean, the digits are gone.

Seen 25 times in the published set. `numerics` measures against eager under the user's own flags, which do not allow it for
matrix products; `env_diff` sees nothing, since the flag is restored.
"""

from tests.adversarial.case import Case

CASE = Case(
    20,
    "downcast",
    "numerics",
    expected="numerics",
    status="open",
    variant="tf32_flag",
    needs=("gpu",),
    seen=("L1",),
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return x @ y

def get_inputs():
    return [torch.randn(256, 256), torch.randn(256, 256)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, y):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return x @ y
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, y):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            return x @ y
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
"""
