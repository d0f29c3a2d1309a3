"""A task of KernelBench and a job, which tests of several modules share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.kernelbench.job import PROFILES, Job
from benchmarks.kernelbench.loading import (
    TaskSource,
    import_source,
)

DIAGONAL = """import torch
from torch import nn

class Model(nn.Module):
    def forward(self, a, b):
        return torch.diag(a) @ b

def get_inputs():
    return [torch.rand(512), torch.rand(512, 256)]

def get_init_inputs():
    return []
"""


JOB = Job("cpu", replace(PROFILES["quick"], tune_s=120.0, measure_s=0.05))


CPU = torch.device("cpu")


def load_source(tmp_path: Path, source: str = DIAGONAL) -> TaskSource:
    path = tmp_path / "task.py"
    path.write_text(source)
    return import_source(path)
