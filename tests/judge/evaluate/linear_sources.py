"""A reference of one linear layer, and an honest candidate for it."""

from __future__ import annotations

REFERENCE = """
import torch

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x)), {"rows": x.shape[0]}

def get_inputs(): return [torch.randn(16, 32)]
def get_init_inputs(): return [32]
"""

HONEST = """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).clamp_min(0), {"rows": x.shape[0]}
"""


def prepend_statements(body: str) -> str:
    """The honest candidate with statements at the head of its forward."""
    lines = "\n        ".join(body.splitlines())
    return HONEST.replace(
        "    def forward(self, x):\n", f"    def forward(self, x):\n        {lines}\n"
    )


def replace_result(result: str) -> str:
    """The honest candidate with another result."""
    return HONEST.replace('self.linear(x).clamp_min(0), {"rows": x.shape[0]}', result)
