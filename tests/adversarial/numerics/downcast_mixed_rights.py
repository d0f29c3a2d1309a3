"""The convolution may use TF32, as PyTorch's defaults allow; the matrix product behind it may not and does.

Ours. The convolution's error hides the product's from a comparison of the whole. `rights` tests each class of operators that
lacks the right on inputs for which the other classes are exact. Training is exact: its gradients would show the product's error.
"""

from tests.adversarial.case import Case

CASE = Case(
    20,
    "downcast",
    "numerics",
    expected="rights",
    status="open",
    variant="mixed_rights",
    needs=("gpu",),
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

torch.backends.cudnn.allow_tf32 = True

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 1, bias=False)
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(self.conv(x))

def get_inputs():
    return [torch.randn(8, 64, 32, 32)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 1, bias=False)
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        y = self.conv(x)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = not torch.is_grad_enabled()
        try:
            return self.linear(y)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 1, bias=False)
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return torch.nn.functional.linear(self.conv(x), self.linear.weight, self.linear.bias)
"""
