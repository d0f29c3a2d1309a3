"""The judge's clock in the process is replaced after five hundred calls: what looks for patches has looked by then, the timer not.

A refinement of `clock_patch`: the clock that is used is in C++ and cannot be patched, so what hands it out is. The parent times
whole batches on its own clock as well, which no patch reaches: both must agree (`wall_slope`), and the parent's decides. Slowing
the parent down evades nothing: it would make the candidate slower.
"""

from tests.adversarial.case import Case

CASE = Case(
    3,
    "clock_patch",
    "timing",
    expected="wall_slope",
    status="lowering",
    variant="late",
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
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [64]
"""

CHEAT = """
import torch
from torch import nn
import dataclasses
import sys

class Liar:
    def __init__(self, real):
        self.real = real

    def read(self, *args, **keywords):
        return [dataclasses.replace(each, wall_us=each.wall_us / 10) for each in self.real.read(*args, **keywords)]

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 500:
            timing = sys.modules['torch_cudal1.judge.benchmark.timing']
            real = timing.choose_clock
            timing.choose_clock = lambda device: Liar(real(device))
        return torch.relu(self.linear(x))
"""

HONEST = """
import torch
from torch import nn
import time

class ModelNew(nn.Module):
    '''Notes the time of its last call.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.last_ns = time.perf_counter_ns()
        return torch.relu(self.linear(x))
"""
